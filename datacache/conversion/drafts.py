"""What files that speak of many images (COCO, keras-yolo3, `metadata.jsonl`) say, brought to the images that they mean.

Used by `source`. An image that a file names exactly is never given what is said of another; what two files say of one
image is taken together, and a box that both have counts once. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from datacache.annotations.formats.metadata import is_metadata
from datacache.annotations.formats.named_images import BY_NAME, WHOLE, Named, NamedImages
from datacache.annotations.layout import text
from datacache.annotations.model import Box, Draft, Problem
from datacache.annotations.problems import quote
from datacache.annotations.split_names import file_split

Said = tuple[Draft, tuple[Problem, ...]]
"""What is said of one image, and what was wrong with it."""
_SPLITS: Final = ("train", "val", "test")


class _Claim(NamedTuple):
    named: Named
    said: Said


@dataclass
class _Repeats:
    """Images that two files have."""

    first: bytes
    images: int = 0
    same: int = 0
    more: int = 0


class Drafts:
    """Takes file after file. `split_files`: the files' names say the splits of their images."""

    def __init__(self, named: NamedImages, *, split_files: bool) -> None:
        self._named, self._split_files = named, split_files
        self._drafts: dict[bytes, Said] = {}
        self._by_name: dict[bytes, list[_Claim]] = {}
        self._repeats: dict[tuple[str, str], _Repeats] = {}
        self.problems: list[Problem] = []
        """Those of no image."""

    def add(self, file: bytes, images: Iterable[tuple[Draft, list[Problem]]]) -> None:
        """Take what one file says."""
        claims: dict[bytes, list[_Claim]] = {}
        for draft, problems in images:
            said = draft, tuple(problems)
            named = self._named.named(draft.name, file)
            if named is None:
                self._lose(said)
            else:
                claims.setdefault(named.image, []).append(_Claim(named, said))
        for image, several in claims.items():
            best = max(claim.named.certainty for claim in several)
            chosen = [claim for claim in several if claim.named.certainty == best]
            for claim in several:
                if claim.named.certainty != best:
                    self._lose(claim.said, f", and {_shown(image)} is another")
            if best == BY_NAME:
                self._by_name.setdefault(image, []).extend(chosen)
            elif best == WHOLE or _of_one_name(chosen):
                for claim in chosen:
                    self._take(image, claim.said)
            else:
                self._lose_all(image, chosen)

    def finish(self) -> dict[bytes, Said]:
        """By image. Names that fit by their last part alone are looked at now that all exact ones are known."""
        for image, claims in self._by_name.items():
            if image in self._drafts or not _of_one_name(claims):
                self._lose_all(image, claims)
                continue
            for claim in claims:
                draft, problems = claim.said
                message = f"there is no image {draft.name!r} in the snapshot; {_shown(image)} is taken for it"
                by_name = Problem("image-by-name", "noted", draft.file, draft.line, message)
                self._take(image, (draft, (*problems, by_name)))
        for (one, other), of in self._repeats.items():
            where = f"are in {one}, too" if one != other else "are named there in several ways"
            message = (
                f"{of.images:,} image(s), {_shown(of.first)} first, {where}: {of.same:,} box(es) are the same and count"
                f" once, {of.more:,} more are taken, too"
            )
            self.problems.append(Problem("image-repeated", "noted", other, 0, message))
        return self._drafts

    def _take(self, image: bytes, said: Said) -> None:
        earlier = self._drafts.get(image)
        self._drafts[image] = said if earlier is None else self._merged(image, earlier, said)

    def _merged(self, image: bytes, one: Said, other: Said) -> Said:
        (a, a_problems), (b, b_problems) = one, other
        problems = a_problems + b_problems
        known = {box[:5] for box in a.boxes}
        more = tuple(box for box in b.boxes if box[:5] not in known)
        first, second = a, b
        if is_metadata(a.file) == is_metadata(b.file):
            repeats = self._repeats.setdefault((a.file, b.file), _Repeats(image))
            repeats.images += 1
            repeats.same += len(b.boxes) - len(more)
            repeats.more += len(more)
            if self._rank(b) < self._rank(a):
                first, second = b, a
            ranks = self._rank(first), self._rank(second)
            if ranks[0] < ranks[1] < len(_SPLITS):
                kept, left = _SPLITS[ranks[0]], _SPLITS[ranks[1]]
                message = f"{_shown(image)} is in {left} here, and in {kept} in {first.file}; it is in {kept}"
                problems += (Problem("split-repeated", "repaired", second.file, second.line, message),)
        draft = first._replace(
            boxes=_lines_of(first, a, a.boxes) + _lines_of(first, b, more),
            labels=tuple(dict.fromkeys(a.labels + b.labels)),
            width=a.width or b.width,
            height=a.height or b.height,
        )
        return draft, problems

    def _rank(self, draft: Draft) -> int:
        split = file_split(draft.file.encode("utf-8", "surrogateescape")) if self._split_files else ""
        return _SPLITS.index(split) if split in _SPLITS else len(_SPLITS)

    def _lose_all(self, image: bytes, claims: Iterable[_Claim]) -> None:
        for claim in claims:
            self._lose(claim.said, f", and whether {_shown(image)} is meant is not clear")

    def _lose(self, said: Said, more: str = "") -> None:
        draft, problems = said
        message = f"there is no image {draft.name!r} in the snapshot{more}; what is said of it is left out"
        self.problems += problems
        self.problems.append(Problem("annotation-without-image", "skipped", draft.file, draft.line, message))


def _of_one_name(claims: Iterable[_Claim]) -> bool:
    return len({claim.named.name for claim in claims}) == 1


def _lines_of(chosen: Draft, draft: Draft, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """Boxes with their lines, which are those of the chosen file."""
    return boxes if draft.file == chosen.file else tuple(box._replace(line=0) for box in boxes)


def _shown(image: bytes) -> str:
    return quote(text(image))
