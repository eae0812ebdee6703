"""Data sets without images that repeat others."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import datacache
from datacache.annotations.image_header import read_header
from datacache.conversion.dedupe import _first_alike, image_hash
from datacache.conversion.images import check_whole
from datacache.core.errors import AnnotationError, UsageError
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings
from tests.promises import promise

DataSet = Callable[..., str]


@promise("`dsctl dedupe` leaves out what repeats another image, and names both")
def test_of_the_same_bytes_the_one_with_the_most_objects_stays_then_the_first(
    data_set: DataSet, settings: Settings, opened: Callable[[str], Snapshot]
) -> None:
    two = [("x", 2), ("x", 30)]
    ref = data_set("some", {"a": (1, [("x", 2)]), "b": (1, two), "c": (1, two), "d": (2, [("x", 2)]), "e": (2, [])})
    record, left_out = datacache.dedupe(ref, name="once", settings=settings)
    names = [(Path(each.path).stem, Path(each.kept).stem, each.similar) for each in left_out]
    assert names == [("a", "b", False), ("c", "b", False), ("e", "d", False)]
    with opened(ref) as source, opened(record.ref) as result:
        images = [path for path in result.paths() if path.endswith(".bmp")]
        assert images == ["JPEGImages/b.bmp", "JPEGImages/d.bmp"]
        assert all(result.object_ref(path) == source.object_ref(path) for path in images)
        assert "Annotations/b.xml" in result.paths()
        assert "Annotations/a.xml" not in result.paths()
    assert record.lineage is not None
    assert (record.lineage.command, record.lineage.parameters) == ("dedupe", {})
    assert datacache.dedupe(ref, name="once", settings=settings)[0].ref == record.ref


def drawing(seed: int, width: int = 160, height: int = 120) -> Image.Image:
    shades = np.random.default_rng(seed).integers(0, 256, (8, 10), np.uint8)
    return Image.fromarray(shades).resize((width, height), Image.Resampling.BICUBIC).convert("RGB")


def test_images_that_look_alike_are_found_whatever_their_size_and_format(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    drawing(1).save(folder / "a.jpg", quality=95)
    drawing(1).resize((90, 70)).save(folder / "b.png")
    drawing(1).save(folder / "c.jpg", quality=30)
    drawing(2).save(folder / "d.jpg")
    drawing(1).convert("LA").save(folder / "e.png")
    drawing(1).convert("I;16").save(folder / "f.png")  # all but black
    for name in "abcdef":
        (folder / f"{name}.txt").write_text("0 0.5 0.5 0.2 0.2\n" * (1 + (name == "c")))
    (folder / "classes.txt").write_text("x\n")
    ref = datacache.create_snapshot("some", folder.as_uri(), settings=settings).ref
    for processes in (1, 2):
        record, left_out = datacache.dedupe(ref, name="once", similar=4, processes=processes, settings=settings)
        assert left_out == [("a.jpg", "c.jpg", True), ("b.png", "c.jpg", True), ("e.png", "c.jpg", True)]
        assert record.lineage is not None
        assert record.lineage.parameters == {"similar": 4}
    assert datacache.dedupe(ref, name="all", settings=settings)[1] == []
    with pytest.raises(UsageError, match="0 to 8 bits, not in 9"):
        datacache.dedupe(ref, name="once", similar=9, settings=settings)


def test_a_hash_is_of_64_comparisons_and_none_of_what_is_no_image() -> None:
    file = io.BytesIO()
    Image.fromarray(np.tile(np.arange(0, 90, 10, dtype=np.uint8), (8, 1))).save(file, "PNG")
    assert image_hash(file.getvalue()) == 2**64 - 1
    assert image_hash(b"no image") is None
    assert image_hash(file.getvalue()[:60]) is None


@pytest.mark.parametrize("look", [image_hash, lambda data: check_whole(data, read_header(data), "x.jpg")])
@pytest.mark.parametrize(("side", "scans", "said"), [(65_500, 1, "pixels"), (64, 200, "scans")])
def test_a_small_jpeg_that_asks_for_gigabytes_or_hours_is_not_decoded(
    look: Callable[[bytes], object], side: int, scans: int, said: str
) -> None:
    file = io.BytesIO()
    drawing(1, 64, 64).save(file, "JPEG", progressive=True)
    data = bytearray(file.getvalue())
    at = data.index(b"\xff\xc2") + 5
    data[at : at + 4] = struct.pack(">HH", side, side)
    last = data.rindex(b"\xff\xda")
    data[last:-2] = data[last:-2] * scans
    if look is image_hash:
        assert look(bytes(data)) is None
    else:
        with pytest.raises(AnnotationError, match=said) as caught:
            look(bytes(data))
        assert caught.value.code == "image-too-large"


@pytest.mark.parametrize("bits", [0, 3, 8])
def test_what_is_left_out_is_alike_to_a_kept_one_and_no_two_kept_ones_are_alike(bits: int) -> None:
    random = np.random.default_rng(bits)
    base = random.integers(0, 2**63, 40, np.uint64)
    flips = np.uint64(1) << random.integers(0, 64, (40, 12), np.uint64)
    hashes = np.concatenate([base ^ np.bitwise_xor.reduce(flips[:, :n], axis=1) for n in range(0, 12, 2)])
    random.shuffle(hashes)
    first = _first_alike(hashes, bits)
    values = [int(value) for value in hashes]
    kept: list[int] = []
    for number, value in enumerate(values):  # the plain way
        near = next((other for other in kept if (values[other] ^ value).bit_count() <= bits), None)
        assert first[number] == (number if near is None else near)
        if near is None:
            kept.append(number)
    assert len(kept) < len(hashes)
