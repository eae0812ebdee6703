"""Lists of classes: reading and writing them, and the order that gives each class its id.

A class's id is its position in a list, so a list is never mended: what could mean two orders is an error. `class_ids`
is the one order for training, from shards as from files, so that a model trained on one knows the classes of the other.
Used by readers of formats, conversions, shards and data sets. Pure functions, any thread.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from datacache.annotations.check import clean_label
from datacache.annotations.model import FORMATS, quote
from datacache.annotations.shapes.outline import Skeleton
from datacache.annotations.table.table import Table
from datacache.core.errors import AnnotationError, UsageError

_MAX_CLASSES = 100_000
_MAX_KEYPOINTS = 10_000
_OBB = re.compile(r"^#\s*task\s*:\s*obb\s*$", re.MULTILINE)
_UNLISTED = re.compile(r"class_(0|[1-9][0-9]*)")
_BETWEEN = re.compile(r"(?<=[^\W\d_])[\s_-]+(?=[^\W_])|(?<=\d)[\s_-]+(?=[^\W\d_])")
_ENCODINGS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


class DataYaml(NamedTuple):
    """The contents of the `data.yaml` of an Ultralytics data set."""

    classes: tuple[str, ...]
    """By id. An id that the file leaves out is called `class_7`."""
    folders: dict[str, tuple[str, ...]]
    """`train`, `val`, `test` → folders of images, or text files that list images, as they are written there."""
    pose: Skeleton | None = None
    """There is a `kpt_shape`: the labels have keypoints after each box. Without names where it cannot be used."""
    rotated: bool = False
    """A comment `# task: obb` says that labels have the four corners of rotated boxes."""


def decode(data: bytes) -> str | None:
    """Decode a file with names in it: with or without a byte order mark, UTF-8, UTF-16 or else GB18030 (which
    holds GBK). None if it is none of these."""
    encoding = next((encoding for mark, encoding in _ENCODINGS if data.startswith(mark)), "")
    for attempt in (encoding,) if encoding else ("utf-8", "gb18030"):
        try:
            return data.decode(attempt)
        except UnicodeDecodeError:
            continue
    return None


def read_classes(data: bytes, file: str) -> tuple[str, ...]:
    """Read the names in `classes.txt`, `obj.names` or the file of `--classes`, one a line, cleaned like labels.

    `UsageError` names the line: a name that is there twice has two ids, and a blank line before the last name is an id
    to some tools and none to others. Blank lines at the end are nothing.
    """
    text = decode(data)
    if text is None:
        raise UsageError(f"{file}: this list of classes is not in UTF-8", hint="Save it as UTF-8")
    # Not splitlines(): U+2028 and the like are part of a name to every other reader of such files.
    names = [clean_label(line) for line in text.replace("\r\n", "\n").replace("\r", "\n").rstrip().split("\n")]
    if names == [""]:
        return ()
    lines: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name:
            raise UsageError(
                f"{file}, line {number}: a blank line between names of classes",
                hint="Classes are numbered by their lines: remove the line, or put a name there",
            )
        if name in lines:
            raise UsageError(
                f"{file}, line {number}: the class {name!r} is in line {lines[name]} already",
                hint="Classes are numbered by their lines, so each is there once",
            )
        lines[name] = number
    return tuple(names)


def read_data_yaml(data: bytes, file: str) -> DataYaml:
    """Read names as a list or as a mapping from ids; with `nc` alone, `class_0` and so on. `AnnotationError`
    without."""
    import yaml

    text = decode(data)
    if text is None:
        raise _yaml_error(file, "it is not in UTF-8")
    try:
        # BaseLoader gives every scalar as it is written: a class is called `yes` or `010`, and not True or 8. It makes
        # nothing but str, list and dict.
        content = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        reason = getattr(exc, "problem", None) or str(exc).splitlines()[0]
        raise _yaml_error(file, f"it is no YAML: {reason}", mark.line + 1 if mark else 0) from exc
    except (RecursionError, ValueError) as exc:
        raise _yaml_error(file, f"it is no YAML: {type(exc).__name__}") from exc
    if not isinstance(content, dict):
        raise _yaml_error(file, "there are no keys")
    folders: dict[str, tuple[str, ...]] = {}
    for split, key in (("train", "train"), ("val", "val"), ("val", "valid"), ("val", "validation"), ("test", "test")):
        value = content.get(key)
        items = value if isinstance(value, list) else [value]
        paths = tuple(item for item in items if isinstance(item, str) and item not in ("", "~", "null"))
        if paths:
            folders.setdefault(split, paths)
    return DataYaml(_yaml_classes(content, file), folders, _skeleton(content), _OBB.search(text) is not None)


def read_pose(data: bytes) -> Skeleton | None:
    """Read what keypoints labels have from a `data.yaml` that need not say the classes."""
    import yaml

    text = decode(data) or ""
    if not re.search(r"^kpt_shape\s*:", text, re.MULTILINE):
        return None
    try:
        content = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - see `read_data_yaml`
    except (yaml.YAMLError, RecursionError, ValueError):
        return Skeleton(())
    return _skeleton(content) if isinstance(content, dict) else Skeleton(())


def write_classes(names: Iterable[str]) -> bytes:
    """Write one name a line. `UsageError` for a name that `read_classes` would read as something else."""
    names = tuple(names)
    lines = [f"{name}\n".encode("utf-8", "backslashreplace") for name in names]
    if read_classes(b"".join(lines), "classes") != names:
        odd = next(name for name, line in zip(names, lines, strict=True) if read_classes(line, "classes") != (name,))
        raise UsageError(f"the class {odd!r} cannot be written as a line", hint="Give it another name")
    return b"".join(lines)


def class_order(
    found: Collection[str],
    given: Sequence[str] | None = None,
    previous: Sequence[str] | None = None,
    *,
    numbered: bool = False,
) -> tuple[str, ...]:
    """Return the classes of a conversion in the order of their ids.

    `given`: exactly these, whatever was found. `previous` (the list of an earlier version, or of the data set itself):
    these, then what is new by name, so that no id changes from version to version. Neither: what was found, by name.
    `numbered`: the data set's own labels are ids, so that what is called `class_7` for want of a name gets the id 7, if
    that is free. `UsageError` for ids that no list could hold.
    """
    if given is not None:
        twice = _repeated(given)
        if twice is not None:
            raise UsageError(f"--classes: {twice!r} is given twice")
        return tuple(given)
    kept = tuple(dict.fromkeys(previous or ()))
    if numbered:
        ids = [int(match[1]) for name in set(found) - set(kept) if (match := _UNLISTED.fullmatch(name))]
        highest = max(ids, default=-1)
        if highest >= _MAX_CLASSES:
            raise UsageError(
                f"there are labels of class {highest}, and no list has so many classes",
                hint=f"Mend them: dsctl query --label {unlisted(highest)} says where they are",
            )
        kept = tuple(dict.fromkeys((*kept, *(unlisted(id) for id in range(len(kept), highest + 1)))))
    return kept + tuple(sorted(set(found) - set(kept)))


def spelled_alike(labels: Iterable[str]) -> list[list[str]]:
    """Return the labels that differ in capitals, spaces, `_` and `-` alone, together, sorted."""
    found: dict[str, list[str]] = {}
    for label in sorted(labels):
        found.setdefault(spelled(label), []).append(label)
    return [alike for alike in found.values() if len(alike) > 1]


def spelled(label: str) -> str:
    """Return a label without capitals and separators, but those between two digits. Labels of one character are as they
    are: `a` may not be `A`."""
    return _BETWEEN.sub("", label.casefold()) if len(label) > 1 else label


def unlisted(id: int | str) -> str:
    """Return the label of a class that has no name."""
    return f"class_{id}"


def _skeleton(content: dict[object, object]) -> Skeleton | None:
    """Return what `kpt_shape`, `kpt_names` (those of the first class) and `flip_idx` say."""
    if "kpt_shape" not in content:
        return None
    try:
        count, dims = (int(value) for value in content["kpt_shape"])  # type: ignore[attr-defined]
        flip = tuple(int(value) for value in content.get("flip_idx") or ())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return Skeleton(())
    if not 0 < count <= _MAX_KEYPOINTS or dims not in (2, 3):
        return Skeleton(())
    names = content.get("kpt_names")
    first = next(iter(names.values()), None) if isinstance(names, dict) else names
    if not isinstance(first, list) or len(first) != count or not all(isinstance(name, str) for name in first):
        first = unnamed(count)
    return Skeleton(tuple(first), (), flip if sorted(flip) == list(range(count)) else (), dims)


def unnamed(count: int) -> tuple[str, ...]:
    """Return names for keypoints that have none."""
    return tuple(f"point_{n}" for n in range(1, count + 1))


def _yaml_classes(content: dict[object, object], file: str) -> tuple[str, ...]:
    names = content.get("names")
    if names is None and "nc" in content:
        names = [""] * _class_count(content["nc"], file)
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict):
        raise _yaml_error(file, "`names` is neither a list nor a mapping")
    by_id = {}
    for key, name in names.items():
        id = _class_count(key, file)
        if not isinstance(name, str):
            raise _yaml_error(file, f"the name of class {id} is no text")
        by_id[id] = clean_label(name)
    classes = tuple(by_id.get(id) or unlisted(id) for id in range(max(by_id, default=-1) + 1))
    twice = _repeated(classes)
    if twice is not None:
        raise _yaml_error(file, f"the class {twice!r} is there twice")
    return classes


def _class_count(value: object, file: str) -> int:
    text = str(value)
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) > _MAX_CLASSES:
        raise _yaml_error(file, f"{quote(text)} is no number of a class")
    return int(text)


def _repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def _yaml_error(file: str, reason: str, line: int = 0) -> AnnotationError:
    return AnnotationError(
        f"{file} does not say the classes: {reason}",
        code="classes-unusable",
        file=file,
        line=line,
        hint="Give the classes with --classes FILE",
    )


def class_ids(table: Table, given: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of the class ids 0, 1, …: those of boxes in the order that a conversion gives them, then those
    that are of whole images alone, by name. With `given` exactly these. `UsageError` for ids that no list could
    hold."""
    order = class_order(
        [total.label for total in table.labels.values() if total.boxes],
        given=given,
        previous=table.meta.get("classes"),
        numbered=FORMATS[table.meta.get("format", "none")].numbered,
    )
    if given is not None:
        return order
    known = set(order)
    return order + tuple(label for label in table.labels if label not in known)
