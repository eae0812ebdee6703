"""An image on its way through a conversion: a plain value."""

from __future__ import annotations

from typing import NamedTuple

from datacache.annotations.model import Annotation
from datacache.manifest.model import Entry


class Image(NamedTuple):
    """An image on its way through a conversion."""

    path: str
    """In the source."""
    annotation: Annotation
    entry: Entry
    """Its entry in the source, or in the result once it was written anew."""
    row: int
    """Its row in the source."""
    split: str
    annotated: bool
    objects: int
    """Its boxes in the source."""
    goes_on: bool = False
    """True for a JPEG with bytes behind its end."""
