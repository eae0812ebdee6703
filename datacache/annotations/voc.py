from __future__ import annotations

from datacache.annotations.model import Annotation, Draft, Problem


def parse(data: bytes | memoryview, file: str, *, origin: int = 0) -> tuple[Draft, list[Problem]]:
    """What an annotation file says; `AnnotationError` for one that cannot be used at all."""
    raise NotImplementedError


def write(annotation: Annotation, *, origin: int = 0, folder: str = "", depth: int = 3) -> bytes:
    """The annotation as a Pascal VOC file."""
    raise NotImplementedError
