"""Convert: make a snapshot with the images of another one, or of several, and other annotation files.

Used by `api.convert`, merges and subsets. Images are entered by reference: the new manifest names the same objects
under other paths. Labels are new small files in packs. Only image operations write images. Nothing is visible before
the commit, a conversion that was killed can be run again, and the same input gives the same snapshot. One thread, and
as many processes as there are processors for reading annotations and for image operations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from datacache.annotations.classes import class_order, spelled_alike
from datacache.annotations.formats.metadata import is_metadata
from datacache.annotations.image_header import jpeg_end
from datacache.annotations.model import HALVES, Action, Annotation, Box, Problem, quote, truncated_image, unforeseen
from datacache.annotations.shapes.outline import NOTHING
from datacache.annotations.table.ranges import Row
from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_manifest
from datacache.catalog.objects import NewFiles, ObjectWriter
from datacache.conversion.combine import Found, Inputs
from datacache.conversion.fitting import Losses, fit
from datacache.conversion.index import Reading
from datacache.conversion.joining import joined
from datacache.conversion.model import Image, Report, Splits, stem
from datacache.conversion.operations import Operations
from datacache.conversion.problems import Mending, renamed
from datacache.conversion.targets import TARGETS, About, Target
from datacache.core.counters import count
from datacache.core.errors import BrokenImageError, ConversionError, UsageError
from datacache.core.parallel import Workers
from datacache.manifest.builder import ManifestBuilder, sorted_entries
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord, Source
from datacache.reader.snapshot import Snapshot

Progress = Callable[[str, int, int], None]
"""Step, images done, images in all."""
_SHOWN = 10
_AT_A_TIME = 64
"""Images whose labels are written together."""
_IMAGE_FOLDERS = frozenset({"jpegimages", "images", "obj_train_data"})
_DOCUMENT = re.compile(rb"(?:(?i:readme|licen[sc]e|notice|copying|citation)(?:\.[a-z]{1,4})?|[^/]+\.(?:md|rst|pdf))")
_UNANNOTATED_HINT = "--keep-unannotated takes images that have no annotation."
_LABELS_HINT = "The format has labels of whole images alone. Choose one that has objects: --to yolo, for one."
_BARE_HINT = (
    "It has images and no annotations of objects. Where each folder is a class, no conversion is needed: "
    "SnapshotDataset(REF) and dsctl shard --classes-from-folders take the folders as labels, and --format folders "
    "--to yolo-classify sorts them into splits. "
    "--keep-unannotated takes all images as background, without objects."
)


class Marks(NamedTuple):
    """Give some images other annotations than their files do."""

    marked: Callable[[Row], Annotation | None]
    """Returns what an image has now; None for one that stays as it is."""
    labels: Collection[str]
    """Of all objects that it gives."""
    looked_at: Callable[[str], bool]
    """Tells whether objects were looked for in the image of this path: it is annotated, also where it has none."""
    placed: Callable[[str, str], None]
    """Is told of each image in the result its path in the source, and the one that it has now."""
    skip_predictions: bool = False
    """Leave out objects with a score. Otherwise `UsageError` for one in a format without scores."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The request for a conversion."""

    to: str
    naming: Naming
    reading: Reading = field(default_factory=Reading)
    splits: Splits | None = None
    """None: as the data set's own lists say, if it has any."""
    classes: Sequence[str] | None = None
    """Their order, and no others; None: the order of the previous version, new ones after it by name."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Class → what it is called in the result; several may become one."""
    skip_difficult: bool = False
    keep_unannotated: bool = False
    strict: bool = False
    operations: Operations | None = None
    fix: bool = False
    """Mend what a closer look finds (`problems`); of one snapshot."""
    marks: Marks | None = None
    """Of one snapshot. All its images are kept, in a split or in none, and those that are not annotated stay so where
    the format can tell."""
    reencode_broken: bool = False
    """Write JPEGs with bytes behind their end anew, without these."""
    only: Collection[str] | None = None
    """These images and no others; None: all."""
    command: str = "convert"
    """The command in the snapshot's lineage."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """More of them for the lineage."""
    lineage: Lineage | None = None
    """How the snapshot is made, where that is not by this plan."""


class Conversion(NamedTuple):
    """The result: the snapshot, and what was done."""

    record: SnapshotRecord
    report: Report

    def _repr_html_(self) -> str:
        return self.record._repr_html_() + self.report._repr_html_()


def run(
    catalog: Catalog,
    snapshots: Sequence[Snapshot],
    plan: Plan,
    *,
    open_objects: Callable[[], ObjectWriter],
    processes: Workers = None,
    progress: Progress = lambda _what, _done, _total: None,
    check: Callable[[SnapshotRecord], None] | None = None,
) -> Conversion:
    """Run a plan; `check` is as for `commit_manifest`. Operations are for one snapshot alone. `ConversionError` under
    `strict` with every problem, and nothing committed; `UsageError` for what cannot be meant; the store's and the
    catalog's errors."""
    if plan.to not in TARGETS:
        raise UsageError(f"{plan.to!r} is no format to convert to", hint=f"There are: {', '.join(TARGETS)}.")
    snapshot, refs = snapshots[0], tuple(each.ref for each in snapshots)
    check_target(
        catalog,
        plan.naming,
        plan.lineage or Lineage(plan.command, {"to": plan.to}, refs),
    )
    sources: list[Source] = list(snapshot.manifest.root.sources)
    files = NewFiles(sources, catalog.put_blobs, open_objects)
    if plan.operations:
        _ = files.objects  # that no place is set for new images is said now, and not after hours of reading
    inputs = Inputs(catalog, snapshots, plan.reading, plan.splits, plan.rename, processes=processes, progress=progress)
    if plan.marks is not None and inputs.unread:
        raise UsageError(
            f"{quote(inputs.unread)} cannot be read, and a version without it would have lost what it says",
            hint="Mend the file in a new version first; dsctl stats --problems says what is wrong.",
        )
    report = Report(images=sum(table.images for table in inputs.tables))
    # That a repeated box is kept is not so where it is mended, which is said then.
    report.problems += (each for each in inputs.problems() if not (plan.fix and each.code == "box-repeated"))
    mending = Mending(snapshot, inputs.tables[0], inputs.splits[0], fix=True) if plan.fix else None
    if mending is not None:
        plan = replace(plan, rename={**mending.spellings, **plan.rename})
    order = _class_order(catalog, plan, inputs, report)
    about = About(
        order,
        inputs.split_names,
        plan.reading.origin,
        inputs.skeletons(plan.rename),
        inputs.supercategories(plan.rename),
        inputs.identifiers(plan.rename),
        lists_unannotated=plan.marks is None,
    )
    target = TARGETS[plan.to](about)
    builder = ManifestBuilder(sources, catalog.put_blobs)
    losses = Losses(target.holds, about.skeletons)
    images: Iterable[Image] = _images(
        inputs, plan, mending, files, classes=frozenset(order), target=target, losses=losses, report=report
    )
    if plan.operations:
        number = files.source(files.objects.source)
        from datacache.conversion.images import process_images  # with numpy and Pillow, a fifth of a second

        images = process_images(
            snapshot,
            images,
            plan.operations,
            files.objects,
            number,
            processes=processes,
            report=report,
            skeletons=about.skeletons,
        )
    elif plan.reencode_broken:
        images = _ended(snapshot, images, files, report)
    if plan.strict and plan.operations:
        _expect_none_wrong(inputs, report)  # before any image is written anew
    documents = () if plan.marks is None else _documents(snapshot, files)
    for entry in sorted_entries(chain(documents, _write(images, target, files, report, progress, marks=plan.marks))):
        builder.add(entry)
    report.problems += inputs.unmatched()
    report.problems += losses.problems()
    report.problems += _empty_splits(inputs.split_names, report, plan.to)
    if plan.strict:
        _expect_none_wrong(inputs, report)
    report.problems.sort(key=lambda problem: (problem.file, problem.line))
    if not report.written:
        bare = inputs.tables[0].meta.get("format") in ("none", "folders")
        hint = _BARE_HINT if bare else _UNANNOTATED_HINT if target.of_objects else _LABELS_HINT
        raise ConversionError(
            f"no image of {inputs.named} is left to write; nothing was made",
            problems=report.problems,
            hint=f"Mend or remove {quote(inputs.unread)}." if inputs.unread else hint,
        )
    record = commit_manifest(
        catalog,
        builder,
        plan.naming,
        origin=f"datacache://{snapshot.record.ref}",
        lineage=plan.lineage or Lineage(plan.command, _parameters(plan, inputs.splits[0], order), refs),
        packs=files.packs,
        objects=files.opened_objects,
        check=check,
    )
    return Conversion(record, report)


def _class_order(catalog: Catalog, plan: Plan, inputs: Inputs, report: Report) -> tuple[str, ...]:
    """Return the classes of the result. `UsageError` for a class to be renamed that there is not, `ConversionError`
    where none would be left."""
    labels = inputs.labels()
    there = {total.label for total in labels}
    marked = sorted(plan.marks.labels) if plan.marks else ()
    unknown = next((label for label in plan.rename if label not in there), None)
    if unknown is not None:
        hint = f"It has {', '.join(sorted(there)[:_SHOWN])}."
        raise UsageError(f"--map: {inputs.named} has no class {unknown!r}", hint=hint)
    found = _renamed((*(total.label for total in labels if total.boxes), *marked), plan.rename)
    order = class_order(
        found,
        given=plan.classes,
        previous=_earlier_classes(catalog, plan.naming.name) or _renamed(inputs.classes(), plan.rename),
        numbered=inputs.numbered,
    )
    if found and not set(order) & set(found):
        raise ConversionError(
            f"{inputs.named} has none of the classes asked for, and no box would be left; nothing was made",
            problems=report.problems,
            hint=f"It has {', '.join(sorted(found)[:_SHOWN])}{' and more' if len(found) > _SHOWN else ''}.",
        )
    if found and not inputs.numbered and all(label.isdecimal() for label in found):
        shown = ", ".join(map(quote, found[:_SHOWN])) + (", …" if len(found) > _SHOWN else "")
        message = f"the classes {shown} are numbers: if they are ids, --map {found[0]}=NAME says what one is called"
        if not any(problem.code == "classes-missing" for problem in report.problems):
            report.problems.append(Problem("classes-missing", "noted", "", 0, message))
    for alike in spelled_alike(found) if len(inputs.tables) > 1 else ():
        message = f"the classes {', '.join(map(quote, alike))} differ in their spelling alone; --map makes them one"
        report.problems.append(Problem("class-spelling", "noted", "", 0, message))
    return order


def _expect_none_wrong(inputs: Inputs, report: Report) -> None:
    report.problems.sort(key=lambda problem: (problem.file, problem.line))
    wrong = sum(problem.action != "noted" for problem in report.problems)
    if wrong:
        raise ConversionError(
            f"{count(wrong, 'problem')} in {inputs.named}, and --strict allows none; nothing was made",
            problems=report.problems,
            hint="Mend the files named, or convert without --strict: what is wrong is then mended or left out.",
        )


def _images(
    inputs: Inputs,
    plan: Plan,
    mending: Mending | None,
    files: NewFiles,
    *,
    classes: frozenset[str],
    target: Target,
    losses: Losses,
    report: Report,
) -> Iterator[Image]:
    """Yield the images that go into the result, with what is left of their boxes."""
    for image in inputs.images(files.source, report.problems, unusable=plan.marks is not None):
        row, found, path = image.row, image.annotations, image.where + image.row.path
        if plan.only is not None and row.path not in plan.only:
            continue
        if mending is not None and mending.is_left_out(row.path, report.problems):
            continue
        found = [_changed(each, row, plan, mending, target=target, report=report) for each in found]
        image = image._replace(annotations=found)  # noqa: PLW2901
        annotated = _is_annotated(row.path, found, plan.marks, target)
        if not annotated and plan.marks is None:
            problem = _unannotated(image, plan, inputs, target)
            report.problems.append(problem)
            if problem.action == "skipped":
                continue
        split = image.splits.of(found[0])
        if split is None and plan.marks is None:
            message = f"{row.path} is in none of the lists of splits; it is left out"
            report.problems.append(Problem("not-in-split", "skipped", path, 0, message))
            continue
        if target.unwritable is not None and (wrong := target.unwritable.search(row.path)):
            has = "a line break" if wrong[0] in "\r\n" else "bytes that are no text" if HALVES.match(wrong[0]) else ""
            message = f"{quote(row.path)} has {has or 'a control character'}, which a file of this format cannot hold"
            message += "; it is left out"
            report.problems.append(Problem("path-unwritable", "skipped", path, 0, message))
            continue
        try:
            chosen = joined([_with_chosen_boxes(each, plan, classes, report) for each in image.named()])
        except Exception as exc:  # noqa: BLE001 - one image must not end the conversion of all
            report.problems.append(unforeseen(exc, found[0].source or path, f"{quote(row.path)} is"))
            continue
        if chosen.boxes and not target.of_objects:
            message = f"{row.path}: {count(len(chosen.boxes), 'object')} left out; the format has none"
            report.problems.append(Problem("objects-left-out", "changed", chosen.source, 0, message))
            chosen = chosen._replace(boxes=())
        losses.take(chosen)
        goes_on = any(problem.code == "image-goes-on" for problem in row.problems)
        objects = sum(len(each.boxes) for each in found)
        ref = image.refs[0] if image.refs else ""
        yield Image(row.path, chosen, image.entry, image.number, split or "", annotated, objects, goes_on, ref)


def _is_annotated(path: str, found: Sequence[Annotation], marks: Marks | None, target: Target) -> bool:
    """Tell whether something is said of an image that the format holds. Labels of whole images say nothing of objects,
    but to a format that has such labels."""
    if target.of_objects and any(map(_says_objects, found)):
        return True
    if marks is not None and target.of_objects and (marks.looked_at(path) or (target.in_metadata and found[0].source)):
        return True
    captioned = target.of_objects and "captions" in target.holds
    return "labels" in target.holds and any(each.labels or (captioned and each.captions) for each in found)


def _changed(
    annotation: Annotation, row: Row, plan: Plan, mending: Mending | None, *, target: Target, report: Report
) -> Annotation:
    """Return the annotation of an image as the plan mends it, or marks it."""
    if mending is not None:
        return mending.mended(annotation, report.problems)
    return annotation if plan.marks is None else _marked(row, annotation, plan.marks, target)


def _marked(row: Row, annotation: Annotation, marks: Marks, target: Target) -> Annotation:
    """Return what an image has after the marks."""
    annotation = marks.marked(row) or annotation
    if not any(box.extra for box in annotation.boxes):
        return annotation
    boxes = annotation.boxes
    if marks.skip_predictions:
        boxes = tuple(box for box in boxes if (box.extra or NOTHING).score is None)
    elif "score" not in target.holds and any((box.extra or NOTHING).score is not None for box in boxes):
        raise UsageError(
            f"{quote(row.path)} has predictions that nobody has accepted, and the format has no scores; nothing was "
            "made",
            hint="Accept or reject them, leave all out (--skip-predictions), or keep them: --to yolo-predictions.",
        )
    if "author" not in target.holds:  # whoever accepted a prediction is no loss to report
        boxes = tuple(map(_without_author, boxes))
    return annotation._replace(boxes=boxes)


def _without_author(box: Box) -> Box:
    extra = box.extra and box.extra._replace(author="")
    return box if extra == box.extra else box._replace(extra=None if extra == NOTHING else extra)


def _unannotated(image: Found, plan: Plan, inputs: Inputs, target: Target) -> Problem:
    """Return the problem of an image without what the format holds. It is `skipped` or kept as background."""
    path = image.row.path
    said = any(each.boxes or each.labels or each.captions for each in image.annotations)
    lacks = "annotation" if not said else "objects" if target.of_objects else "label of the whole image"
    unread = "" if said else inputs.unread
    if unread:
        lacks += f" but perhaps in {quote(unread)}, which cannot be read"
    kept = plan.keep_unannotated and not unread
    message = f"{path} has no {lacks}; it is {'kept as a background image' if kept else 'left out'}"
    return Problem("image-unannotated", "noted" if kept else "skipped", image.where + path, 0, message)


def _ended(snapshot: Snapshot, images: Iterable[Image], files: NewFiles, report: Report) -> Iterator[Image]:
    """Store those with bytes behind their end anew, without these. No pixel changes."""
    for image in images:
        if not image.goes_on:
            yield image
            continue
        data = bytes(snapshot.rows.read_row(image.row, 0, image.entry.size_bytes))
        try:
            stored = files.objects.put(data[: jpeg_end(data)])
        except BrokenImageError:  # what looked like its end belongs to something behind it
            report.problems.append(truncated_image(image.path))
            continue
        yield image.stored_anew(stored, files.source(files.objects.source))


def _renamed(labels: Iterable[str], rename: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rename.get(label, label) for label in labels))


def _says_objects(annotation: Annotation) -> bool:
    """Tell whether objects were looked for: not by files that have labels of images, too, and list no empty ones."""
    source = annotation.source
    if annotation.boxes or source in ("", annotation.path):
        return bool(annotation.boxes)
    return not (is_metadata(source) or source.endswith(".csv"))


def _with_chosen_boxes(annotation: Annotation, plan: Plan, classes: frozenset[str], report: Report) -> Annotation:
    if plan.rename:
        annotation = renamed(annotation, plan.rename)
    boxes = annotation.boxes
    if plan.skip_difficult and any(box.difficult for box in boxes):
        boxes = tuple(box for box in boxes if not box.difficult)
        report.difficult_left_out += len(annotation.boxes) - len(boxes)
    if plan.classes is not None and not classes.issuperset(box.label for box in boxes):
        for box in boxes:
            if box.label not in classes:
                message = f"the class {box.label!r} is not among those asked for; the object is left out"
                report.problems.append(Problem("class-left-out", "skipped", annotation.source, box.line, message))
        boxes = tuple(box for box in boxes if box.label in classes)
    return annotation if boxes is annotation.boxes else annotation._replace(boxes=boxes)


def _write(
    images: Iterable[Image],
    target: Target,
    files: NewFiles,
    report: Report,
    progress: Progress,
    *,
    marks: Marks | None,
) -> Iterator[Entry]:
    """The entries of the result, in no particular order."""
    names = _Names()
    newest = 0
    images = iter(images)
    while some := list(islice(images, _AT_A_TIME)):
        placed: list[tuple[Image, Annotation]] = []
        for image in some:
            annotation = image.annotation
            wanted = target.relative(_relative(annotation.path), image.split, annotation.labels)
            below = image.ref.partition("@")[0] if target.of_objects else ""
            # All splits share the names, so that another conversion can deal anew; marks leave them as they are.
            apart = image.split if marks is not None and target.split_folders else ""
            relative, problems = names.give(wanted, image, below=below, apart=apart)
            path = target.image_path(relative, image.split)
            try:
                placed.append((image, fit(annotation, target.holds, report.problems)._replace(path=path)))
            except Exception as exc:  # noqa: BLE001 - one image must not end the conversion of all
                report.problems.append(unforeseen(exc, annotation.source or image.path, f"{quote(image.path)} is"))
                continue
            report.problems += problems
        try:
            target.expect([annotation for _, annotation in placed])
            alone = False
        except Exception:  # noqa: BLE001 - each by itself tells at which
            alone = True
        for image, annotation in placed:
            try:
                if alone:
                    target.expect([annotation])
                own, more = target.add(annotation, image.split, annotated=image.annotated)
            except Exception as exc:  # noqa: BLE001 - as above
                report.problems.append(unforeseen(exc, annotation.source or image.path, f"{quote(image.path)} is"))
                continue
            report.problems += more
            entry = image.entry
            yield files.refer(entry._replace(path=annotation.path.encode("utf-8", "surrogateescape")))
            for name, data in own:
                yield from files.add(name, data, entry.mtime_ns)
            if marks is not None:
                marks.placed(image.path, annotation.path)
            newest = max(newest, entry.mtime_ns)
            report.count(image, of_objects=target.of_objects)
            progress("writing", report.written, max(report.written, report.images))  # tiles are more than their images
    for name, data in target.finish():
        yield from files.add(name, data, newest)
    yield from files.end_pack()


def _documents(snapshot: Snapshot, files: NewFiles) -> Iterator[Entry]:
    """Yield the files at the top of a data set that are there for people."""
    for entry in snapshot.manifest.entries():
        if entry.has_object and _DOCUMENT.fullmatch(entry.path):
            yield files.refer(entry)


def _empty_splits(names: Sequence[str], report: Report, to: str) -> Iterator[Problem]:
    used = next((name for name in names if report.splits[name]), "")
    for name in names if used else ():
        if not report.splits[name]:
            more = (
                f"; data.yaml has the images of {used} for it"
                if to.startswith("yolo") and to != "yolo-classify" and name in ("train", "val")
                else ""
            )
            yield Problem("split-empty", "noted", "", 0, f"there is no image in the split {name}{more}")


class _Names:
    """Gives every image a path of its own in the result, unique without its extension: labels are named after it."""

    def __init__(self) -> None:
        self._taken: set[int] = set()  # hashes: a million paths are a hundred megabytes
        self._next: dict[int, int] = {}  # of names that many images want, the first number that may be free

    def give(self, wanted: str, image: Image, *, below: str, apart: str = "") -> tuple[str, list[Problem]]:
        """The path below the folder of images, for an image or a part of one. Where it is taken it is tried `below`
        another folder first. Names that are `apart` may be equal."""
        relative = unchanged = wanted
        count = 1
        while (key := _hash(f"{apart}\0{stem(relative)}")) in self._taken:
            if below:
                relative = wanted = f"{below}/{wanted}"
                below = ""
                continue
            base, dot, extension = wanted.rpartition(".")
            if count == 2:
                count = self._next.get(_hash(f"{apart}\0{stem(wanted)}"), 2)
            suffix = f"_{extension}" if count == 1 and dot else f"_{count}"
            relative, count = f"{base or wanted}{suffix}{dot}{extension if dot else ''}", count + 1
        self._taken.add(key)
        if count > 2:
            self._next[_hash(f"{apart}\0{stem(wanted)}")] = count
        if relative == unchanged:
            return relative, []
        message = (
            f"another image is called like {image.path} but for its extension or folder; this one is now {relative}"
        )
        action: Action = "noted" if image.ref else "repaired"
        path = f"{image.ref}/{image.path}" if image.ref else image.path
        return relative, [Problem("image-renamed", action, path, 0, message)]


def _hash(text: str) -> int:
    return xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))


def _relative(path: str) -> str:
    """A path without the folders that say nothing but that images are in it, and without an old split's folder."""
    *folders, name = path.split("/")
    kept = []
    below_images = False
    for folder in folders:
        if folder.lower() in _IMAGE_FOLDERS:
            below_images = True
            continue
        if below_images and folder in ("train", "val", "test"):
            continue
        kept.append(folder)
    return "/".join([*kept, name])


def _earlier_classes(catalog: Catalog, name: str) -> Sequence[str]:
    """The class order of the newest version that has one: their numbers must not change."""
    for record in reversed(catalog.snapshots(name)):
        if record.lineage is not None and record.lineage.parameters.get("classes"):
            return tuple(record.lineage.parameters["classes"])
    return ()


def _parameters(plan: Plan, splits: Splits, order: Sequence[str]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"to": plan.to, "classes": list(order), **plan.reading.as_json()}
    if splits.shares:
        parameters |= {"split": dict(zip(splits.names, splits.shares, strict=True)), "seed": splits.seed}
        parameters |= {"stratify": True} if splits.stratify else {}
    elif splits.names:
        parameters["split"] = "lists"
    if plan.rename:
        parameters["map"] = dict(plan.rename)
    if plan.operations:
        parameters["operations"] = plan.operations.as_json()
    flags = ("skip_difficult", "keep_unannotated", "strict", "reencode_broken")
    return parameters | {flag: True for flag in flags if getattr(plan, flag)} | dict(plan.parameters)
