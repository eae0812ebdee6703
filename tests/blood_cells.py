"""Find the blood-cell data set (BCCD) for the tests that read it, or fetch it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "scripts/fetch_bccd.sh"
FOLDER = "tests/data/bccd"
"""The place where the script puts it for the tests, below the checkout; git ignores it."""
_FETCH_S = 120


def find_blood_cells(root: Path = ROOT) -> Path:
    """Return the folder with the data set: the one that `DATACACHE_TEST_DATA` names, the one beside the checkout, or
    what the script fetches. Skip the test where that has no network, and fail it where the data are wrong."""
    named = os.environ.get("DATACACHE_TEST_DATA")
    path = Path(named or root.parent / "shared" / "data" / "bccd")
    if (path / "Annotations").is_dir():
        return path
    if named:
        pytest.fail(f"DATACACHE_TEST_DATA: there is no VOC data set (Annotations, ImageSets, JPEGImages) at {path}")
    missing = f"the blood-cell data set is not here: run {SCRIPT} {FOLDER}, or set DATACACHE_TEST_DATA"
    try:
        done = subprocess.run(
            [root / SCRIPT, FOLDER], cwd=root, capture_output=True, text=True, timeout=_FETCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{missing} ({SCRIPT} took longer than {_FETCH_S} s)")
    if done.returncode == 3:
        pytest.skip(f"{missing} ({done.stderr.strip()})")
    assert done.returncode == 0, done.stderr
    return root / FOLDER / "BCCD"
