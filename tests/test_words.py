"""A class name exists once in the tree: a reader who looks for it finds one thing (docs/GLOSSARY.md)."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("datacache", "fuse_mount", "csi_driver", "dataset_cli", "benchmarks", "scripts")
SHARED = frozenset(
    [
        "Body",
        "Change",
        "Child",
        "Clock",
        "Draft",
        "Epoch",
        "Failure",
        "Fetcher",
        "Found",
        "Index",
        "Journal",
        "Kind",
        "Lines",
        "Member",
        "Mounted",
        "Names",
        "Node",
        "Options",
        "Part",
        "Picture",
        "Placed",
        "Plan",
        "Problem",
        "Reading",
        "Record",
        "Report",
        "Room",
        "Root",
        "Sample",
        "Snapshot",
        "Stored",
        "Tally",
        "Tree",
        "Turn",
        "Turns",
        "Usage",
        "Wait",
        "Worker",
        "_Client",
        "_Connection",
        "_Files",
        "_Folder",
        "_Group",
        "_Item",
        "_Iteration",
        "_Lines",
        "_Mapped",
        "_Names",
        "_Reader",
        "_Section",
    ]
)
"""Names that still stand for several things. Only remove from this list."""


def homes_of_classes() -> dict[str, list[str]]:
    """Return the files that define each class, but for generated ones."""
    found: dict[str, list[str]] = defaultdict(list)
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("*.py")):
            if file.name.endswith("_pb2.py"):
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(file.relative_to(ROOT)))
    return found


def test_a_class_name_is_defined_once() -> None:
    twice = {name: files for name, files in homes_of_classes().items() if len(files) > 1 and name not in SHARED}
    assert twice == {}
