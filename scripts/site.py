"""Give the site (`mkdocs.yml`, hooks) what docs/ does not hold: protocols beside packages, promises with tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkdocs.structure.files import File  # noqa: E402

from scripts.promises import table  # noqa: E402

PACKAGES = ("datacache", "fuse_mount", "csi_driver")


def on_files(files: Any, config: Any) -> None:
    """Add each package's CONCURRENCY.md in its place, and PROMISES.md."""
    pages = {page.relative_to(ROOT): page.read_text() for top in PACKAGES for page in (ROOT / top).rglob("*.md")}
    for path, text in (pages | {Path("PROMISES.md"): table()}).items():
        files.append(File.generated(config, str(path), content=text))


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Let links between docs/ and the packages lead to where the site has both: all in one folder."""
    markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./(?=(?:{'|'.join(PACKAGES)})/[\w/]+\.md)", r"](\1", markdown)
    return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown) if page.file.src_uri.startswith(PACKAGES) else markdown
