"""docs/GUIDE.md does what it says: its commands run as they are written, on the data it speaks of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises import promise

ROOT = Path(__file__).resolve().parent.parent


_MARK = """
from datacache import api
path = "JPEGImages/BloodImage_00338.jpg"
with api.open_annotations("bccd") as (snapshot, table):
    row = table.row(path)
    objects = [api.MarkedObject(n, *box[:5]) for n, box in enumerate(row.annotation.boxes)]
    objects.append(api.MarkedObject(-1, "RBC", 480, 320, 560, 400))
    catalog = api.open_catalog()
    api.save_draft(catalog, row, snapshot.record, objects, author="Ada", rev="", done=True)
"""
"""What the page does when somebody draws a box."""


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "GUIDE.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@promise("README and guide run as they are written, from a fresh clone")
def test_the_guide_runs_as_it_is_written(
    blood_cells: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(blood_cells, tmp_path / "BCCD_Dataset" / "BCCD")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert sum(line.startswith("dsctl ") for line in lines) > 12
    program = tmp_path / "bin" / "dsctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dataset_cli "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-eux", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for picture in ("stats.png", "grid.png", "changed.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG"), picture
    for line in blocks("text")[0].splitlines()[1:4]:  # the counts, as the guide shows them
        assert line in done.stdout
    assert (tmp_path / "bccd-yolo" / "data.yaml").is_file()
    assert "~ labels/train/BloodImage_00001.txt" in done.stdout
    names = re.findall(r"^ *\d+: \"?(\w+)", _data_yaml(environment, tmp_path), re.MULTILINE)
    assert names == ["Platelets", "RBC", "WBC", "Basophil"]
    subprocess.run([sys.executable, "-c", _MARK], cwd=tmp_path, env=environment, check=True, timeout=60)
    marked = subprocess.run(
        ["bash", "-eux", "-c", "".join(blocks("sh"))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert marked.returncode == 0, marked.stderr[-3000:]
    assert "~ labels/train/BloodImage_00338.txt" in marked.stdout
    python = subprocess.run(
        [sys.executable, "-c", blocks("python")[0]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert python.returncode == 0, python.stderr
    assert "bccd-coco@" in python.stdout


def _data_yaml(environment: dict[str, str], folder: Path) -> str:
    script = "import datacache; print(datacache.open_snapshot('bccd-yolo@v2').read('data.yaml').decode())"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout
