"""Any image file as a small picture in red, green and blue, turned as it is to be displayed.

Used by `preview`. Pure, any thread.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from datacache.core.errors import BrokenImageError

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x0112
_LARGEST_SCALE = 4
"""An image is not enlarged beyond this."""
_PAPER = (255, 255, 255)
"""What is seen through transparent pixels."""


def thumbnail(data: bytes, width: int, height: int) -> Image:
    """The image in at most this size, its aspect kept, its EXIF orientation applied. A JPEG is decoded in an eighth, a
    quarter or half of its size where that is enough. `BrokenImageError` for whatever cannot be decoded."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
            turned = image.getexif().get(_ORIENTATION, 1) >= 5
            image.draft("RGB", (2 * height, 2 * width) if turned else (2 * width, 2 * height))
            upright = _as_rgb(ImageOps.exif_transpose(image))
    except Exception as exc:  # Pillow's plugins raise all kinds of errors for damaged files
        raise BrokenImageError(str(exc) or type(exc).__name__) from exc
    scale = min(width / upright.width, height / upright.height, _LARGEST_SCALE)
    size = max(1, round(upright.width * scale)), max(1, round(upright.height * scale))
    how = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC
    return upright.resize(size, how, reducing_gap=3.0)


def _as_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith(("I", "F")):  # 16 bits and more: the darkest pixel black, the brightest white
        values = image.convert("F")
        low, high = values.getextrema()
        assert isinstance(low, float)
        assert isinstance(high, float)
        scale = 255 / (high - low) if high > low else 0
        return values.point(lambda value: value * scale - low * scale).convert("L").convert("RGB")
    if image.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in image.info:
        above = image.convert("RGBA")
        paper = Image.new("RGBA", above.size, _PAPER)
        return Image.alpha_composite(paper, above).convert("RGB")
    return image.convert("RGB")
