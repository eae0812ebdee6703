"""An image's size and EXIF orientation from its header, without decoding: JPEG, PNG, GIF, BMP, WebP, TIFF.

It runs for every image of a conversion, on the cached bytes where they lie: nothing is copied but a few header fields,
and a JPEG takes some microseconds. Own code for all formats, because a library's reader has other aims: Pillow's
allocates a WebP's whole canvas when it opens one, swaps a TIFF's sides by its orientation, and refuses large images whose pixels
nobody asked for.

Pure, any thread. Sources: ITU-T T.81 annex B (JPEG), CIPA DC-008 (Exif), the PNG specification (third edition),
GIF89a, the WebP container specification, TIFF 6.0 and the BigTIFF design.
"""

from __future__ import annotations

from typing import NamedTuple


class ImageHeader(NamedTuple):
    """What the header says. `width` and `height` are those of the stored pixels."""

    format: str
    """`jpeg`, `png`, `gif`, `bmp`, `webp` or `tiff`."""
    width: int
    height: int
    orientation: int = 1
    """As in EXIF: 1 is upright, 2 to 8 are mirrored and turned; 5 to 8 swap the sides."""
    complete: bool = True
    """Whether the image's end is there too."""

    @property
    def displayed_width(self) -> int:
        return self.height if self.orientation >= 5 else self.width

    @property
    def displayed_height(self) -> int:
        return self.width if self.orientation >= 5 else self.height


def read_header(data: bytes | memoryview) -> ImageHeader:
    """The header of an image. Raises `BrokenImageError` for what is empty, of no known format, damaged, or cut
    short in its header."""
    raise NotImplementedError
