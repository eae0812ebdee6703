"""JPEGs of decoded frames, from their planes: no pixel goes by way of RGB. Any thread.

A frame is turned as it is to be displayed (quarter turns), made smaller if it is too large, and brought to the full
range of values that a JPEG has, by swscale, as ffmpeg does it when it writes JPEGs. Its chroma stays subsampled as it
was. As with ffmpeg, the colour matrix is not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from datacache.imports.videos.video import rotation_of

_FULL, _LIMITED = 2, 1  # AVCOL_RANGE_JPEG, AVCOL_RANGE_MPEG


def encode_frame(frame: Any, *, max_side: int, quality: int) -> bytes:
    """Return a frame (`av.VideoFrame`) as a JPEG whose longer side has at most `max_side` pixels; 0 for no limit."""
    planes = displayed_planes(frame, max_side=max_side)
    return bytes(simplejpeg.encode_jpeg_yuv_planes(*planes, quality=quality))


def displayed_planes(frame: Any, *, max_side: int) -> list[NDArray[np.uint8]]:
    """Return the planes Y, U and V of a frame as a JPEG has them."""
    quarters = round(rotation_of(frame) / 90) % 4
    width, height = fitted(frame.width, frame.height, max_side)
    full = frame.color_range == _FULL or frame.format.name.startswith(("yuvj", "rgb", "bgr", "gbr", "pal8"))
    converted = frame.reformat(
        width=width,
        height=height,
        format=_planar_format(frame.format, turned=quarters % 2 == 1),
        interpolation="BICUBIC",
        src_color_range=_FULL if full else _LIMITED,
        dst_color_range=_FULL,
    )
    planes = (_array(plane) for plane in converted.planes)
    return [np.ascontiguousarray(np.rot90(plane, quarters)) for plane in planes]


def fitted(width: int, height: int, max_side: int) -> tuple[int, int]:
    """Return the size of an image whose longer side is to have at most `max_side` pixels, in its proportions."""
    longer = max(width, height)
    if not max_side or longer <= max_side:
        return width, height
    return max(1, round(width * max_side / longer)), max(1, round(height * max_side / longer))


def _planar_format(format: Any, *, turned: bool) -> str:
    """Return the format of a JPEG that keeps the chroma that there is. One that is halved in width alone would be
    halved in height after a quarter turn, which encoders do not take."""
    components = format.components
    if format.is_rgb:
        return "yuvj444p"
    if len(components) < 3 or components[1].height != components[0].height:
        return "yuvj420p"
    if components[1].width == components[0].width:
        return "yuvj444p"
    return "yuvj420p" if turned else "yuvj422p"


def _array(plane: Any) -> NDArray[np.uint8]:
    rows = np.frombuffer(plane, np.uint8)[: plane.height * plane.line_size]
    return rows.reshape(plane.height, plane.line_size)[:, : plane.width]
