"""CVAT XML 1.1: one file about all images, whose splits are CVAT's subsets, or about the frames of one video."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from datacache.annotations.formats import cvat
from datacache.annotations.formats.cvat_shapes import UNWRITABLE
from datacache.annotations.model import Annotation, Problem
from datacache.annotations.shapes.outline import Skeleton
from datacache.conversion.targets.base import POSE, SAID, About, File, Target
from datacache.core.counters import count
from datacache.core.errors import UsageError


class Cvat(Target):
    unwritable = UNWRITABLE
    holds = SAID | POSE | {"polygon", "mask", "rotated", "names", "group", "author"}
    in_lists = True

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._count, self._skeletons = 0, dict(about.skeletons)

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        name = annotation.path.removeprefix(self.image_path("", split))
        self._kept.put((split, annotation._replace(path=name)))
        self._count += 1
        _number_keypoints(annotation, self._skeletons)
        return (), ()

    def _finish(self) -> Iterator[File]:
        yield "annotations.xml", b"".join(cvat.write(self._kept, self._classes, self._skeletons, self._count))


class CvatVideo(Target):
    """Images are the frames, in the order of their paths."""

    holds = Cvat.holds - {"outline+keypoints", "box+keypoints"} | {"track"}
    split_folders = False

    def __init__(self, about: About) -> None:
        super().__init__(about)
        if about.splits:
            raise UsageError("a video of CVAT has no splits", hint="Convert with --split none, or --to cvat.")
        self._frame, self._size, self._skeletons = -1, "", dict(about.skeletons)

    def image_path(self, relative: str, split: str) -> str:
        """Return the name that CVAT gives the next frame, or a later one where the image has its name already, of
        which there are many behind it."""
        name = relative.rpartition("/")[2]
        named = re.match(r"frame_(\d{6,9})\.", name)
        number = int(named[1]) if named else 0
        self._frame = max(self._frame + 1, number if number < cvat.MAX_FRAMES // 2 else 0)
        if self._frame >= cvat.MAX_FRAMES:
            raise UsageError(f"a video has {cvat.MAX_FRAMES:,} frames at most", hint="Convert with --to cvat.")
        return f"{self.folder}/frame_{self._frame:06d}.{name.rpartition('.')[2]}"

    def _add(self, annotation: Annotation, split: str, annotated: bool) -> tuple[Sequence[File], Sequence[Problem]]:
        size = f"{annotation.width}x{annotation.height}"
        self._size = self._size or size
        if size != self._size:
            raise UsageError(
                f"frames of a video have one size: {annotation.path} is {size}, and those before are {self._size}",
                hint="Convert with --resize, or --to cvat.",
            )
        # Names of later images are given before this one is added.
        frame = int(annotation.path.rpartition("_")[2].partition(".")[0])
        self._kept.put(("", (frame, annotation)))
        _number_keypoints(annotation, self._skeletons)
        alone = sum(box.extra is None or box.extra.track < 0 for box in annotation.boxes)
        if not alone:
            return (), ()
        message = f"{count(alone, 'object')} without a track: each is one of a single frame"
        return (), [Problem("track-made", "noted", annotation.source or annotation.path, 0, message)]

    def _finish(self) -> Iterator[File]:
        frames = (frame for _, frame in self._kept)
        data = b"".join(cvat.write_video(frames, self._classes, self._skeletons, self._frame + 1))
        yield "annotations.xml", data


def _number_keypoints(annotation: Annotation, skeletons: dict[str, Skeleton]) -> None:
    """Number the keypoints of a class that has no names for them, where some are hidden or not there: points alone
    cannot say that."""
    for box in annotation.boxes:
        visible = box.extra.keypoints.visible if box.extra and box.extra.keypoints else b""
        if box.label not in skeletons and visible.count(2) < len(visible):
            skeletons[box.label] = Skeleton(tuple(map(str, range(1, len(visible) + 1))))
