"""`scripts/fetch_bccd.sh` gives exactly the public data set, or says why not; the tests find what it fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.blood_cells import FOLDER, ROOT, SCRIPT, find_blood_cells
from tests.promises import promise

NOWHERE = "file:///nowhere/to/be/found"


def fetch(*arguments: str | Path, source: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"BCCD_SOURCE": source, "BCCD_COMMIT": "HEAD"}
    return subprocess.run(
        [ROOT / SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def flip_a_byte(folder: Path) -> None:
    image = folder / "JPEGImages" / "BloodImage_00007.jpg"
    data = bytearray(image.read_bytes())
    data[5000] ^= 1
    image.write_bytes(data)


@pytest.fixture
def copy(blood_cells: Path, tmp_path: Path) -> Path:
    """The data set as the public repository has it, to be committed."""
    shutil.copytree(blood_cells, tmp_path / "public" / "BCCD")
    return tmp_path / "public"


def commit(repository: Path) -> str:
    """The URL of what is in the folder now, as a git repository."""
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "data"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "core.autocrlf=false"]
        subprocess.run(["git", *identity, *command], cwd=repository, check=True)
    return repository.as_uri()


@promise("One command fetches the public data set and compares it with its checksum")
def test_the_fetched_data_set_is_checked_and_kept(copy: Path, blood_cells: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "BCCD_Dataset"
    done = fetch(target, source=commit(copy))
    assert done.returncode == 0, done.stderr
    for path in blood_cells.rglob("*.*"):
        assert (target / "BCCD" / path.relative_to(blood_cells)).read_bytes() == path.read_bytes()
    again = fetch(target, source=NOWHERE)  # it is there: nothing is asked for
    assert again.returncode == 0, again.stderr
    assert os.listdir(target.parent) == ["BCCD_Dataset"]


@promise("One command fetches the public data set and compares it with its checksum")
def test_of_a_data_set_with_one_flipped_bit_nothing_is_kept(copy: Path, tmp_path: Path) -> None:
    flip_a_byte(copy / "BCCD")
    done = fetch(tmp_path / "new" / "x", source=commit(copy))
    assert done.returncode == 1
    assert "not the data set that is expected" in done.stderr
    assert os.listdir(tmp_path / "new") == []


@promise("One command fetches the public data set and compares it with its checksum")
@pytest.mark.parametrize("harm", ["flipped", "missing", "more"])
def test_a_folder_with_other_data_is_told_and_left_alone(copy: Path, harm: str) -> None:
    assert fetch(copy, source=NOWHERE).returncode == 0
    if harm == "flipped":
        flip_a_byte(copy / "BCCD")
    elif harm == "missing":
        (copy / "BCCD" / "ImageSets" / "Main" / "val.txt").unlink()
    else:
        (copy / "BCCD" / "Annotations" / "more.xml").touch()
    before = sorted(copy.rglob("*"))
    done = fetch(copy, source=NOWHERE)
    assert done.returncode == 1
    assert f"remove {copy}" in done.stderr
    assert sorted(copy.rglob("*")) == before


@promise("One command fetches the public data set and compares it with its checksum")
def test_tests_without_the_data_fetch_it_or_skip_with_the_command(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "elsewhere" / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, checkout / SCRIPT)
    monkeypatch.delenv("DATACACHE_TEST_DATA", raising=False)
    monkeypatch.setenv("BCCD_COMMIT", "HEAD")
    monkeypatch.setenv("BCCD_SOURCE", NOWHERE)
    with pytest.raises(pytest.skip.Exception, match=f"run {SCRIPT} {FOLDER}, or set"):
        find_blood_cells(checkout)
    monkeypatch.setenv("BCCD_SOURCE", commit(copy))
    assert find_blood_cells(checkout) == checkout / FOLDER / "BCCD"
    monkeypatch.setenv("DATACACHE_TEST_DATA", str(tmp_path / "mistyped"))
    with pytest.raises(pytest.fail.Exception, match="mistyped"):
        find_blood_cells(checkout)
