"""Images so large that only their ends are read when they are not on the node."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datacache import api
from datacache.annotations.formats.voc import write
from datacache.annotations.model import Annotation, Box
from datacache.conversion.files import Data, Files, Part
from datacache.conversion.index import Annotations, Reading
from datacache.core.ids import BLOCK_BYTES
from datacache.settings import Settings

SIDE = 1400
FORMATS = {
    "bmp": ("BMP", {}),
    "jpg": ("JPEG", {"quality": 100, "subsampling": 0}),
    "png": ("PNG", {"compress_level": 0}),
    "tif": ("TIFF", {"compression": "tiff_lzw"}),  # whose directory is behind the pixels
    "webp": ("WEBP", {"lossless": True, "method": 0}),
}


@pytest.mark.parametrize("extension", FORMATS)
def test_a_large_image_is_known_by_its_ends(
    extension: str, tmp_path: Path, make: Callable[[Path], str], settings: Settings
) -> None:
    format, options = FORMATS[extension]
    noise = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, format, **options)
    data = file.getvalue()
    assert len(data) > BLOCK_BYTES
    folder = tmp_path / "large"
    (folder / "Annotations").mkdir(parents=True)
    (folder / "JPEGImages").mkdir()
    box = Box("cat", 1, 2, 3, 4)
    for name, bytes_ in (("whole", data), ("cut", data[: -BLOCK_BYTES // 2])):
        (folder / "JPEGImages" / f"{name}.{extension}").write_bytes(bytes_)
        annotation = Annotation(f"{name}.{extension}", SIDE, SIDE, (box,))
        (folder / "Annotations" / f"{name}.xml").write_bytes(write(annotation))
    ref = make(folder)
    with api.open_snapshot(ref, settings) as snapshot, closing(api.open_catalog(settings)) as catalog:
        table = Annotations(snapshot, catalog, Reading()).table()
        rows = {row.path.rpartition("/")[2].partition(".")[0]: row for row in table.rows()}
    whole, cut = rows["whole"], rows["cut"]
    assert whole.problems == ()
    assert whole.annotation is not None
    assert (whole.annotation.width, whole.annotation.height) == (SIDE, SIDE)
    assert cut.annotation is None
    assert [problem.code for problem in cut.problems] in (["image-truncated"], ["image-broken"])


def test_of_a_large_image_whose_annotation_is_of_another_image_only_the_ends_are_read(
    tmp_path: Path, make: Callable[[Path], str], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Part] = []
    read = Files.read

    def recorded(files: Files, parts: Iterable[Part]) -> Iterator[Data]:
        asked.extend(parts := list(parts))
        return read(files, parts)

    monkeypatch.setattr(Files, "read", recorded)
    folder = tmp_path / "large"
    folder.mkdir()
    file = io.BytesIO()
    Image.new("RGB", (2000, 2000)).save(file, "BMP")
    assert len(file.getvalue()) > 2 * BLOCK_BYTES
    (folder / "a.bmp").write_bytes(file.getvalue())
    Image.new("RGB", (SIDE, SIDE)).save(folder / "a.png")
    (folder / "a.xml").write_bytes(write(Annotation("a.png", SIDE, SIDE, (Box("cat", 1, 2, 3, 4),))))
    ref = make(folder)
    with api.open_snapshot(ref, settings) as snapshot, closing(api.open_catalog(settings)) as catalog:
        row = Annotations(snapshot, catalog, Reading(trust_sizes=True)).table(processes=1).row("a.bmp")
        assert row is not None
        assert row.annotation == Annotation("a.bmp", 2000, 2000)
    assert not any(part.stop > BLOCK_BYTES and not part.ends_only for part in asked), asked
