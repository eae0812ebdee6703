"""The uploader over a folder of files, where a name is either a file or a folder and others edit in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datacache.settings import Settings
from datacache.writeback.model import Staged, UploadState
from tests.writeback import upload_rig
from tests.writeback.upload_rig import MIB, Rig


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bucket."""
    found = tmp_path / "bucket"
    found.mkdir()
    monkeypatch.setattr(upload_rig, "PREFIX", f"{found}/"[1:])
    return found


@pytest.fixture
def open_rig(folder: Path, tmp_path: Path, settings: Settings) -> Iterator[Callable[[], Rig]]:
    """Opens the staging area; a second call is the next process."""
    opened: list[Rig] = []

    def make() -> Rig:
        if opened:
            opened.pop().close()
        opened.append(Rig(tmp_path / "staging", "file://", settings))
        return opened[-1]

    yield make
    for rig in opened:
        rig.close()


def test_a_file_becomes_a_folder_of_the_same_name_and_a_file_again(open_rig: Callable[[], Rig], folder: Path) -> None:
    rig = open_rig().start()
    for _ in range(3):
        rig.put("d", b"file")
        rig.uploader.flush(30)
        assert (folder / "d").read_bytes() == b"file"
        rig.remove("d")
        rig.mkdir("d/")
        rig.put("d/x", b"1")
        rig.put("d/y", b"2")
        rig.uploader.flush(30)
        assert sorted(os.listdir(folder / "d")) == ["x", "y"]
        for key in ("d/x", "d/y", "d/"):
            rig.remove(key)
    assert rig.engine.conflict_log.count == 0


def test_a_folder_is_replaced_by_a_file_that_was_in_it(open_rig: Callable[[], Rig], folder: Path) -> None:
    rig = open_rig().start()
    for size in (10, 100_000):
        rig.mkdir("d/")
        rig.put("d/x", b"x" * size)
        rig.uploader.flush(30)
        rig.rename(("d/x", "tmp"))
        rig.remove("d/")
        rig.rename(("tmp", "d"))
        rig.uploader.flush(30)
        assert os.listdir(folder) == ["d"]
        assert (folder / "d").read_bytes() == b"x" * size
        rig.remove("d")
    assert rig.engine.conflict_log.count == 0


def test_what_somebody_edits_in_place_is_not_taken_for_ours(open_rig: Callable[[], Rig], folder: Path) -> None:
    rig = open_rig().start()
    rig.put("log", b"ours, first")
    rig.uploader.flush(30)
    (folder / "log").write_bytes(b"theirs")  # which keeps the file's attributes
    rig.put("log", b"ours, second")
    rig.uploader.flush(30)
    (conflict,) = rig.engine.conflict_log.unsettled()
    assert (folder / "log").read_bytes() == b"theirs"
    assert (folder / conflict.kept_as).read_bytes() == b"ours, second"


@pytest.mark.parametrize("overwritten", [False, True])
def test_an_upload_is_gone_on_with_only_if_its_file_is_as_it_was(
    open_rig: Callable[[], Rig], folder: Path, overwritten: bool
) -> None:
    rig = open_rig()
    rig.put("large", b"o" * (20 * MIB))
    pending = rig.engine.get("large")
    assert pending is not None
    assert isinstance(pending.content, Staged)
    path = rig.files.path(pending.content.file)
    found = path.stat()
    full = rig.engine.prefix + "large"
    upload = rig.bucket.begin_upload(full, {})
    sent = b"O" * rig.bucket.part_bytes  # not what the file has: the result tells whether it was sent again
    rig.bucket.put_part(full, upload, 1, sent)
    state = UploadState(pending.version, upload, len(sent), found.st_mtime_ns, found.st_size)
    rig.engine.save_upload("large", state)
    if overwritten:  # and killed before anything is said of it
        with path.open("r+b") as file:
            file.write(b"new")
        os.utime(path, ns=(0, found.st_mtime_ns + 1))
    rig = open_rig().start()
    rig.uploader.flush(60)
    expected = b"new".ljust(20 * MIB, b"o") if overwritten else sent.ljust(20 * MIB, b"o")
    assert (folder / "large").read_bytes() == expected
    assert os.listdir(folder) == ["large"]
