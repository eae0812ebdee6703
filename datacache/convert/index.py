"""The annotations of a snapshot, read once and kept in the catalog.

Used by conversions, queries, statistics and previews, all through `open_table`. Images are taken in ranges whose ends
depend on their paths alone; the next version of a data set takes over the ranges in which no image and no annotation has
changed, and reads only the others. Annotation files are parsed and images' headers looked at in as many processes as
there are processors; the result does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from datacache.annotations import coco, keras_yolo, voc, yolo
from datacache.annotations.check import check
from datacache.annotations.image_header import ImageHeader, read_header
from datacache.annotations.layout import Layout, detect
from datacache.annotations.model import Annotation, Draft, Problem
from datacache.annotations.table import EncodedRange, Row, Table, TableBuilder, encode_range
from datacache.catalog.base import Catalog
from datacache.convert.parallel import ordered_map
from datacache.convert.reading import Files
from datacache.core.errors import AnnotationError
from datacache.core.objects import object_id
from datacache.manifest.codec import ends_range
from datacache.reader.snapshot import Snapshot

VERSION = 1
"""Of what is read out of a file. A table made by another version is made anew."""
