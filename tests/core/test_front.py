"""The fronts of packages, where they are installed otherwise than in a folder with their sources."""

from __future__ import annotations

import py_compile
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import datacache

_ROOT = Path(datacache.__file__).parents[1]


def _sources() -> Iterator[tuple[Path, str]]:
    for package in ("datacache", "fuse_mount"):
        for file in (_ROOT / package).rglob("*.py"):
            yield file, str(file.relative_to(_ROOT))


def _run(place: Path, program: str) -> subprocess.CompletedProcess[str]:
    begin = f"import sys; sys.path.insert(0, {str(place)!r}); import datacache; "
    return subprocess.run(
        [sys.executable, "-c", begin + program], cwd=place.parent, capture_output=True, text=True, timeout=60
    )


def test_a_front_in_a_zip_has_all_its_names(tmp_path: Path) -> None:
    place = tmp_path / "packages.zip"
    with ZipFile(place, "w") as file:
        for source, name in _sources():
            file.write(source, name)
    done = _run(place, "print(datacache.__file__, *datacache.__all__, datacache.open_snapshot, datacache.mount)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{place}/datacache/__init__.py {' '.join(datacache.__all__)} <function")


def test_a_front_without_its_source_says_what_is_missing(tmp_path: Path) -> None:
    place = tmp_path / "packages"
    for name in ("datacache/__init__.py", "datacache/core/__init__.py", "datacache/core/front.py"):
        py_compile.compile(str(_ROOT / name), cfile=str(place / f"{name}c"), doraise=True)
    done = _run(place, "")
    assert "ImportError: datacache needs its source" in done.stderr
