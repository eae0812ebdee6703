"""Reading many files of a snapshot: where they lie on this machine, else together through the daemon."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from datacache import api
from datacache.annotations.formats.voc import write
from datacache.annotations.image_header import HEAD_BYTES, TAIL_BYTES
from datacache.annotations.model import Annotation, Box
from datacache.conversion.files import Files, Part
from datacache.conversion.index import Annotations, Reading
from datacache.core.errors import ObjectNotFoundError
from datacache.core.ids import ObjectRef
from datacache.daemon.client import DaemonClient
from datacache.reader.blocks import DaemonBlocks
from datacache.reader.rows import RowReader
from datacache.settings import Settings

COUNT = 40


@pytest.fixture
def many(tmp_path: Path, make: Callable[[Path], str]) -> tuple[Path, str]:
    """Forty small files, and a snapshot of them."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(COUNT):
        (folder / f"{number:02}.jpg").write_bytes(b"%d" % number * 100)
    return folder, make(folder)


def _parts(count: int = COUNT) -> list[Part]:
    return [Part(row, 100 * len(str(row))) for row in range(count)]


@pytest.mark.parametrize("at_once_s", [60.0, -1.0], ids=["at once", "in threads"])
def test_files_of_this_machine_are_read_where_they_lie(
    at_once_s: float, many: tuple[Path, str], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.conversion.files._AT_ONCE_S", at_once_s)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the daemon was asked")

    monkeypatch.setattr(DaemonClient, "_ask_until", refuse)
    with api.open_snapshot(many[1], settings) as snapshot:
        assert [bytes(data) for data in Files(snapshot).read(_parts())] == [b"%d" % n * 100 for n in range(COUNT)]


def test_others_are_asked_for_together_and_one_that_is_gone_is_an_error_of_its_own(
    many: tuple[Path, str], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ref = many
    (folder / "20.jpg").unlink()
    asked: list[int] = []
    read_whole = DaemonBlocks.read_whole

    def counted(self: DaemonBlocks, wanted: Sequence[tuple[ObjectRef, int]]) -> list[memoryview | None]:
        asked.append(len(wanted))
        return read_whole(self, wanted)

    monkeypatch.setattr(DaemonBlocks, "read_whole", counted)
    monkeypatch.setattr(RowReader, "read_file", lambda *_: None)  # as of a bucket
    with api.open_snapshot(ref, settings) as snapshot:
        came: list[bytes] = []
        with pytest.raises(ObjectNotFoundError, match=r"20\.jpg"):
            came.extend(bytes(data) for data in Files(snapshot).read(_parts()))
    assert came == [b"%d" % n * 100 for n in range(20)]
    assert max(asked) > 10


def test_an_image_that_ends_far_before_its_file_is_no_truncated_one(
    tmp_path: Path, make: Callable[[Path], str], settings: Settings
) -> None:
    folder = tmp_path / "moving"
    folder.mkdir()
    file = io.BytesIO()
    Image.frombytes("RGB", (420, 420), random.Random(1).randbytes(420 * 420 * 3)).save(file, "JPEG", quality=98)
    film = bytes(2 * TAIL_BYTES)
    assert len(file.getvalue()) > HEAD_BYTES
    (folder / "a.jpg").write_bytes(file.getvalue() + film)
    (folder / "a.xml").write_bytes(write(Annotation("a.jpg", 420, 420, (Box("cat", 1, 2, 3, 4),))))
    ref = make(folder)
    with api.open_snapshot(ref, settings) as snapshot, closing(api.open_catalog(settings)) as catalog:
        [row] = Annotations(snapshot, catalog, Reading()).table(processes=1).rows()
    assert row.annotation is not None
    assert [problem.code for problem in row.problems] == ["image-goes-on"]
