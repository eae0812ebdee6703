"""The snapshots that a conversion is made of, as one: mostly a single one, several for a merge.

Used by the pipeline. An image that several snapshots have, by its bytes, is there once, with all its objects: at its
place in the first of them. Those that one snapshot has twice stay. Memory is some hundred bytes an image of a merge,
and a range of each table. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from datacache.annotations.layout import text
from datacache.annotations.model import FORMATS, Annotation, Problem
from datacache.annotations.pairing import is_image
from datacache.annotations.shapes.outline import Skeleton
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import LabelCount, Table
from datacache.catalog.base import Catalog
from datacache.conversion.index import Annotations, Progress, Reading, with_entries
from datacache.conversion.model import Splits
from datacache.core.counters import count
from datacache.core.errors import UsageError
from datacache.core.parallel import Workers
from datacache.manifest.model import Entry, Source
from datacache.reader.snapshot import Snapshot

if TYPE_CHECKING:
    from datacache.conversion.contents import ImageContents


_UNREAD: Final = frozenset(
    {
        "encoding",
        "file-too-large",
        "json-broken",
        "not-coco",
        "not-cvat",
        "not-label-studio",
        "xml-broken",
        "xml-entities",
    }
)
"""The problems for which a file of many images is left out."""


class Found(NamedTuple):
    """An image that can be used, and all that is said of it."""

    row: Row
    number: int
    """Its row in the manifest."""
    entry: Entry
    """With its key, as it is in the result."""
    annotations: Sequence[Annotation]
    """Its own first, then those of snapshots that have it, too."""
    splits: Splits
    refs: Sequence[str]
    """Of the snapshots that say so, where there are several."""

    @property
    def where(self) -> str:
        """Name its snapshot before a path, where there are several."""
        return f"{self.refs[0]}/" if self.refs else ""

    def named(self) -> list[Annotation]:
        """Return what is said of it with the snapshots of the files, where there are several."""
        if not self.refs:
            return [*self.annotations]
        pairs = zip(self.refs, self.annotations, strict=True)
        return [each._replace(source=f"{ref}/{each.source}" if each.source else "") for ref, each in pairs]


class Inputs:
    """The snapshots of a conversion, with their tables."""

    def __init__(
        self,
        catalog: Catalog,
        snapshots: Sequence[Snapshot],
        reading: Reading,
        splits: Splits | None,
        rename: Mapping[str, str],
        *,
        processes: Workers,
        progress: Progress,
    ) -> None:
        """Read their annotations. `splits` are those that data sets bring, if None; `rename` is of classes.
        `UsageError` where one brings splits and another none; the store's errors."""
        self._snapshots, self._progress = snapshots, progress
        annotations = [Annotations(snapshot, catalog, reading) for snapshot in snapshots]
        self.tables: list[Table] = [each.table(processes=processes, progress=progress) for each in annotations]
        self.named = " and ".join(snapshot.record.ref for snapshot in snapshots)
        if splits is not None and splits.stratify:
            from datacache.conversion.deal import stratify  # with numpy

            splits = replace(splits, dealt=stratify(self.tables, splits.shares, splits.seed, rename))
        self.splits: list[Splits] = [splits or _listed(each) for each in annotations]
        self.split_names = tuple(dict.fromkeys(chain.from_iterable(its.names for its in self.splits)))
        for snapshot, its in zip(snapshots, self.splits, strict=True):
            if self.split_names and not its.names:
                raise UsageError(
                    f"{snapshot.record.ref} has no splits, and others have {', '.join(self.split_names)}",
                    hint="Deal all images anew with --split train=0.8,val=0.2, or have no splits: --split none.",
                )

    def problems(self) -> Iterator[Problem]:
        """Yield all that reading has found. Of several snapshots, files are named with theirs."""
        listed = (its.listed.problems if its.listed is not None else () for its in self.splits)
        return self._named(map(chain, (table.problems() for table in self.tables), listed))

    def unmatched(self) -> Iterator[Problem]:
        """Yield the lines of lists that name none of the images that were gone through, likewise."""
        return self._named(its.listed.unmatched() if its.listed is not None else () for its in self.splits)

    def _named(self, problems: Iterable[Iterable[Problem]]) -> Iterator[Problem]:
        for snapshot, found in zip(self._snapshots, problems, strict=True):
            where = f"{snapshot.record.ref}/" if len(self._snapshots) > 1 else ""
            for problem in found:
                yield problem._replace(file=where + problem.file)

    @cached_property
    def unread(self) -> str:
        """Return a file of many images that is left out, or "". Images without annotation may have one there."""
        of_many = [not FORMATS[table.meta.get("format", "none")].suffix for table in self.tables]
        problems = self._named(
            table.problems() if many else () for table, many in zip(self.tables, of_many, strict=True)
        )
        return next((each.file for each in problems if each.action == "skipped" and _is_unread(each)), "")

    def labels(self) -> list[LabelCount]:
        """Return the labels of each table, one after the other."""
        return list(chain.from_iterable(table.labels.values() for table in self.tables))

    def classes(self) -> Iterator[str]:
        """Yield the classes that the data sets list, in the order of their ids."""
        return chain.from_iterable(table.meta.get("classes") or () for table in self.tables)

    @property
    def numbered(self) -> bool:
        """Tell whether the labels of one are ids."""
        return any(FORMATS[table.meta.get("format", "none")].numbered for table in self.tables)

    def skeletons(self, rename: Mapping[str, str]) -> dict[str, Skeleton]:
        """Return the skeletons of classes, as `rename` calls them. `UsageError` where one would have two."""
        found: dict[str, Skeleton] = {}
        for label, skeleton in chain.from_iterable(table.skeletons.items() for table in self.tables):
            name = rename.get(label, label)
            known = found.get(name, skeleton)
            joins, flip = known.edges or skeleton.edges, known.flip or skeleton.flip
            if known.names != skeleton.names or joins != (skeleton.edges or joins):
                raise UsageError(
                    f"the class {name!r} would have two skeletons: {', '.join(known.names)}; and "
                    f"{', '.join(skeleton.names)}{', joined otherwise' * (known.names == skeleton.names)}",
                    hint="Give one of the classes a name of its own: dsctl convert REF --map OLD=NEW.",
                )
            found[name] = known._replace(edges=joins, flip=flip)
        return found

    def supercategories(self, rename: Mapping[str, str]) -> dict[str, str]:
        """Return the groups that classes belong to, as `rename` calls these."""
        known = (table.meta.get("supercategories", {}).items() for table in reversed(self.tables))
        return {rename.get(label, label): name for label, name in chain.from_iterable(known)}

    def identifiers(self, rename: Mapping[str, str]) -> dict[str, str]:
        """Return the ids of classes that keep their names."""
        known = (table.meta.get("identifiers", {}).items() for table in reversed(self.tables))
        return {label: id for label, id in chain.from_iterable(known) if rename.get(label, label) == label}

    def images(
        self, source: Callable[[Source], int], problems: list[Problem], *, unusable: bool = False
    ) -> Iterator[Found]:
        """Yield the images that can be used, each once; with `unusable` also the others, as not annotated. `source`
        gives the sources of manifests their number in the result."""
        several = len(self._snapshots) > 1
        contents: ImageContents | None = None
        if several:
            from datacache.conversion import contents as of_images  # with numpy

            contents = of_images.ImageContents(self._snapshots, self._progress)
        for number, (snapshot, table, splits) in enumerate(zip(self._snapshots, self.tables, self.splits, strict=True)):
            manifest, repeats = snapshot.manifest, dict[str, list[str]]()
            sources = [source(each) for each in manifest.root.sources]
            prefixes = [each.prefix.encode("utf-8", "surrogateescape") for each in manifest.root.sources]
            for row, at, entry in with_entries(manifest, table.rows()):
                if splits.listed is not None:
                    splits.listed.found(row.path.encode("utf-8", "surrogateescape"))
                own = row.annotation or (Annotation(row.path, 0, 0) if unusable else None)
                if own is None:
                    continue
                others = [] if contents is None else self._others(contents, number, at)
                if others and others[0][0] < number:
                    repeats.setdefault(self._snapshots[others[0][0]].record.ref, []).append(row.path)
                    continue
                key = entry.key if entry.key is not None else prefixes[entry.source] + entry.path
                entered = entry._replace(key=key, source=sources[entry.source])
                said = [(number, own), *others]
                refs = [self._snapshots[of].record.ref for of, _ in said] if several else []
                yield Found(row, at, entered, [annotation for _, annotation in said], splits, refs)
            for first, paths in repeats.items():
                message = f"{first} has {count(len(paths), 'image')} too, this one first: each is there once"
                problems.append(
                    Problem("image-repeated", "noted", f"{snapshot.record.ref}/{paths[0]}", 0, message),
                )

    def _others(self, contents: ImageContents, number: int, row: int) -> list[tuple[int, Annotation]]:
        """Return what other snapshots say of an image, and their numbers, in their order."""
        found = []
        for of, at in contents.same(number, row):
            if of != number:
                other = self.tables[of].row(text(self._snapshots[of].manifest.path(at)))
                if other is not None and other.annotation is not None:
                    found.append((of, other.annotation))
        return found


def _listed(annotations: Annotations) -> Splits:
    listed = annotations.splits()
    return Splits(names=listed.names, listed=listed)


def _is_unread(problem: Problem) -> bool:
    """Tell whether a problem is that of a whole file; an unforeseen one may be of an image."""
    of_file = problem.code == "unforeseen" and not is_image(problem.file.encode("utf-8", "surrogateescape"))
    return of_file or problem.code in _UNREAD


def own_target(tables: Sequence[Table]) -> str:
    """Return the format that tables are written in, so that they lose nothing. `UsageError` where they differ."""
    found = {_target_of(table) for table in tables if table.meta.get("format", "none") != "none"}
    if len(found) > 1:
        found.discard("imagefolder")  # a `metadata.jsonl` is beside any other
    if len(found) == 1:
        return found.pop()
    raise UsageError(
        f"the annotations are in several formats ({', '.join(sorted(found))})" if found else "there are no annotations",
        hint="Say in which the result shall be: --to coco, for one.",
    )


def _target_of(table: Table) -> str:
    """Return the target of a table. A YOLO file may hold several kinds of labels, and its targets hold one."""
    format: str = table.meta["format"]
    if not format.startswith("yolo"):
        return format
    kinds = {"keypoints": "yolo-pose", "rotated": "yolo-obb", "polygons": "yolo-segment"}
    for _, summary in table.summaries():
        for kind, target in kinds.items():
            if any(summary.shaped(kind)):
                return target
    return "yolo"
