"""An image's size and EXIF orientation from its header, without decoding: JPEG, PNG, GIF, BMP, WebP, TIFF.

It runs for every image of a conversion, on the cached bytes where they lie: nothing is copied but a few fields, and a
JPEG takes some microseconds. Own code for all formats, because a library's reader has other aims: Pillow's allocates a
WebP's whole canvas when it opens one, swaps a TIFF's sides by its orientation, and refuses large images whose pixels
nobody asked for.

Pure, any thread. Sources: ITU-T T.81 annex B (JPEG), CIPA DC-008 (Exif), the PNG specification (third edition), GIF89a,
the WebP container specification, TIFF 6.0 and the BigTIFF design.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from datacache.core.errors import BrokenImageError


class ImageHeader(NamedTuple):
    """The contents of a header. `width` and `height` are those of the stored pixels."""

    format: str
    """`jpeg`, `png`, `gif`, `bmp`, `webp` or `tiff`."""
    width: int
    height: int
    orientation: int = 1
    """As in EXIF: 1 is upright, 2 to 8 are mirrored and turned; 5 to 8 swap the sides."""
    complete: bool = True
    """True if the end of the image is there, too."""
    goes_on: bool = False
    """True if a JPEG's last two bytes are others than its end marker: something stands behind the image."""

    @property
    def displayed_width(self) -> int:
        return self.height if self.orientation >= 5 else self.width

    @property
    def displayed_height(self) -> int:
        return self.width if self.orientation >= 5 else self.height


HEAD_BYTES, TAIL_BYTES = 2**18, 2**16
"""How much of the beginning and of the end of a large image nearly always tells all."""


def read_header(data: bytes | memoryview, *, size_bytes: int | None = None) -> ImageHeader:
    """Read the header of an image. Raises `BrokenImageError` for what is empty, of no known format, damaged, or cut
    short in its header.

    Of a large image the first `HEAD_BYTES` and the last `TAIL_BYTES`, joined, will mostly do, with the `size_bytes` of
    the whole. Where they do not (a TIFF's directory may be anywhere), the same error says so.
    """
    view = memoryview(data)
    size_bytes = len(view) if size_bytes is None else size_bytes
    head = view if len(view) == size_bytes else view[:HEAD_BYTES]
    try:
        header = _read(head, view, size_bytes)
    except (struct.error, IndexError, OverflowError):
        raise BrokenImageError(f"the image ends in its header, after {size_bytes} bytes") from None
    if header.width <= 0 or header.height <= 0:
        raise BrokenImageError(f"the image's header says {header.width}x{header.height} pixels")
    return header


def _read(head: memoryview, view: memoryview, size_bytes: int) -> ImageHeader:
    magic = bytes(head[:16])
    if magic.startswith(b"\xff\xd8"):
        return _read_jpeg(head, view)
    if magic.startswith(b"\x89PNG\r\n\x1a\n"):
        return _read_png(head, view)
    if magic.startswith(b"RIFF") and magic[8:12] == b"WEBP":
        return _read_webp(head, size_bytes)
    if magic.startswith((b"GIF89a", b"GIF87a")):
        width, height = struct.unpack_from("<HH", head, 6)
        return ImageHeader("gif", width, height, complete=bytes(view[-1024:]).rstrip(b"\0\r\n").endswith(b";"))
    if magic.startswith(b"BM"):
        return _read_bmp(head, size_bytes)
    if magic.startswith(_TIFF):
        if head is not view:
            raise BrokenImageError(_ENDS)
        return _read_tiff(view)
    if not magic:
        raise BrokenImageError("the image is empty")
    raise BrokenImageError(f"no known image format begins with {magic[:8]!r}")


_ENDS: Final = "the image's beginning and end do not tell its size and orientation"


# --- JPEG ----------------------------------------------------------------------------------------------------------

_MARKER: Final = re.compile(rb"\xff[\x01-\xfe]")
_END: Final = re.compile(rb"\xff\xd9")
_FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""SOF0 to SOF15; C4 is DHT, C8 is reserved, CC is DAC."""
_BARE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
"""TEM, RST0 to RST7 and SOI have no length."""
_length = struct.Struct(">H").unpack_from
_frame = struct.Struct(">HH").unpack_from


def _read_jpeg(head: memoryview, view: memoryview) -> ImageHeader:
    position, width, height, orientation = 2, 0, 0, 0
    end = len(head)
    while position + 4 <= end:
        marker = head[position + 1]
        if head[position] != 0xFF or marker in (0xFF, 0):
            # Fill bytes (B.1.1.2), or something between two segments: decoders go on at the next marker.
            match = _MARKER.search(head, position)
            if match is None:
                break
            position = match.end() - 2
            continue
        if marker in _BARE:
            position += 2
            continue
        if marker in (0xDA, 0xD9):
            break
        if marker in _FRAMES:
            if not width:
                height, width = _frame(head, position + 5)
                if not height:
                    raise BrokenImageError("the image's header does not say its height")
        elif marker == 0xE1 and not orientation and bytes(head[position + 4 : position + 10]) == b"Exif\0\0":
            orientation = _exif_orientation(head[position + 10 : position + 2 + _length(head, position + 2)[0]])
        position += 2 + _length(head, position + 2)[0]
    scanned = position + 2 < end and head[position + 1] == 0xDA
    if not scanned and head is not view:
        raise BrokenImageError(_ENDS)
    if not width:
        raise BrokenImageError(f"the image has no frame header in its {end} bytes")
    ends = bytes(view[-2:]) == b"\xff\xd9"
    # In a scan, a FF is followed by 00 or RSTn, so the first FF D9 is the end; what cameras write behind it does not
    # matter. It is nearly always in the last bytes.
    tail = max(position, len(view) - 4096)
    complete = scanned and bool(ends or _END.search(view, tail) or _END.search(view, position, tail + 1))
    return ImageHeader("jpeg", width, height, orientation or 1, complete, complete and not ends)


def jpeg_end(data: bytes) -> int:
    """Return how many bytes of a JPEG are the image, its end marker included: what follows is something else.

    `BrokenImageError` where the image has no end. Tables between the scans of a progressive image are passed over, so
    two bytes in them that look like an end marker are none.
    """
    position = 2
    while position + 2 <= len(data):
        match = _MARKER.search(data, position)
        if match is None:
            break
        position, marker = match.end(), data[match.end() - 1]
        if marker == 0xD9:
            return position
        if marker not in _BARE and position + 2 <= len(data):
            position += _length(data, position)[0]
    raise BrokenImageError("the image ends before its end")


# --- PNG and WebP: chunks ------------------------------------------------------------------------------------------


def _read_png(head: memoryview, view: memoryview) -> ImageHeader:
    if bytes(head[12:16]) != b"IHDR":
        raise BrokenImageError("the PNG does not begin with an IHDR chunk")
    width, height = struct.unpack_from(">II", head, 16)
    orientation, position = 1, 33
    while position + 8 <= len(head):
        size, kind = struct.unpack_from(">I4s", head, position)
        if kind == b"eXIf":
            orientation = _exif_orientation(head[position + 8 : position + 8 + size])
        elif kind == b"IEND":
            return ImageHeader("png", width, height, orientation)
        position += 12 + size
    tail = b"" if head is view else bytes(view[-TAIL_BYTES:])
    if b"eXIf" in tail:
        raise BrokenImageError(_ENDS)
    return ImageHeader("png", width, height, orientation, complete=b"IEND" in tail)


def _read_webp(head: memoryview, size_bytes: int) -> ImageHeader:
    riff_size, kind = struct.unpack_from("<I4x4s", head, 4)
    complete = riff_size + 8 <= size_bytes
    if kind == b"VP8 ":
        if bytes(head[23:26]) != b"\x9d\x01\x2a":
            raise BrokenImageError("the WebP does not begin with a key frame")
        width, height = struct.unpack_from("<HH", head, 26)
        return ImageHeader("webp", width & 0x3FFF, height & 0x3FFF, complete=complete)
    if kind == b"VP8L":
        mark, bits = struct.unpack_from("<BI", head, 20)
        if mark != 0x2F:
            raise BrokenImageError("the WebP has no lossless header")
        return ImageHeader("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, complete=complete)
    if kind != b"VP8X":
        raise BrokenImageError(f"the WebP begins with an unknown chunk {kind!r}")
    flags, *canvas = struct.unpack_from("<B3xHBHB", head, 20)
    width, height = canvas[0] + (canvas[1] << 16) + 1, canvas[2] + (canvas[3] << 16) + 1
    orientation, position = 1, 12
    while flags & 0x08 and position + 8 <= len(head):
        kind, size = struct.unpack_from("<4sI", head, position)
        if kind == b"EXIF":
            orientation = _exif_orientation(head[position + 8 : position + 8 + size])
            break
        position += 8 + size + size % 2
    else:
        if flags & 0x08 and len(head) < size_bytes:
            raise BrokenImageError(_ENDS)
    return ImageHeader("webp", width, height, orientation, complete)


# --- BMP -----------------------------------------------------------------------------------------------------------


def _read_bmp(head: memoryview, size_bytes: int) -> ImageHeader:
    pixels_at, header_size = struct.unpack_from("<II", head, 10)
    if header_size == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", head, 18)
        compression = 0
    else:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", head, 18)
    height = abs(height)  # negative where the rows go downwards
    row_bytes = (width * bits + 31) // 32 * 4
    # 1, 2, 4 and 5 are compressed (run lengths, JPEG, PNG): their length is not known from the header.
    complete = compression in (1, 2, 4, 5) or pixels_at + row_bytes * height <= size_bytes
    return ImageHeader("bmp", width, height, complete=complete)


# --- TIFF, and Exif, which is one ----------------------------------------------------------------------------------

_TIFF: Final = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_TYPES: Final = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q"}
"""Field types that are whole numbers: BYTE, SHORT, LONG, IFD, LONG8."""
_WIDTH, _HEIGHT, _ORIENTATION = 256, 257, 274
_DATA: Final = ((273, 279), (324, 325))
"""Offsets and lengths of strips, and of tiles."""


class _Field(NamedTuple):
    """An entry of a directory: where its values lie."""

    tag: int
    type: int
    values: int
    position: int


def _fields(view: memoryview) -> Iterator[_Field]:
    """Yield the first directory's entries. Raises where the data ends."""
    order = _order(view)
    if struct.unpack_from(order + "H", view, 2)[0] == 43:
        (offset,) = struct.unpack_from(order + "Q", view, 8)
        head, entry, inline, long = struct.Struct(order + "Q"), struct.Struct(order + "HHQ"), 8, order + "Q"
    else:
        (offset,) = struct.unpack_from(order + "I", view, 4)
        head, entry, inline, long = struct.Struct(order + "H"), struct.Struct(order + "HHI"), 4, order + "I"
    (count,) = head.unpack_from(view, offset)
    position = offset + head.size
    for _ in range(min(count, 65535)):
        tag, type, values = entry.unpack_from(view, position)
        position += entry.size
        fits = struct.calcsize("=" + _TYPES.get(type, "B")) * values <= inline
        yield _Field(tag, type, values, position if fits else struct.unpack_from(long, view, position)[0])
        position += inline


def _values(view: memoryview, field: _Field) -> tuple[int, ...]:
    if field.type not in _TYPES or not 0 < field.values <= len(view):
        return ()
    return struct.unpack_from(f"{_order(view)}{field.values}{_TYPES[field.type]}", view, field.position)


def _order(view: memoryview) -> str:
    return "<" if view[0] == 0x49 else ">"


def _exif_orientation(view: memoryview) -> int:
    """Return the orientation in an Exif block; 1 where it has none or is damaged, as every viewer takes it."""
    if bytes(view[:6]) == b"Exif\0\0":  # PNG and WebP writers that copied a JPEG's segment
        view = view[6:]
    try:
        if bytes(view[:4]) not in _TIFF:
            return 1
        for field in _fields(view):
            if field.tag == _ORIENTATION:
                value = _values(view, field)[0]
                return value if 1 <= value <= 8 else 1
    except (struct.error, IndexError, OverflowError):
        pass
    return 1


def _read_tiff(view: memoryview) -> ImageHeader:
    fields = {field.tag: field for field in _fields(view)}

    def first(tag: int, default: int) -> int:
        values = _values(view, fields[tag]) if tag in fields else ()
        return values[0] if values else default

    end = 0
    for offsets_tag, lengths_tag in _DATA:
        if offsets_tag in fields and lengths_tag in fields:
            offsets, lengths = _values(view, fields[offsets_tag]), _values(view, fields[lengths_tag])
            end = max([end, *(offset + length for offset, length in zip(offsets, lengths, strict=False))])
    orientation = first(_ORIENTATION, 1)
    width, height = first(_WIDTH, 0), first(_HEIGHT, 0)
    return ImageHeader("tiff", width, height, orientation if 1 <= orientation <= 8 else 1, end <= len(view))
