"""`dsctl snapshot diff`: what changed from one snapshot to another.

With `--json`: `{"a": REF, "b": REF, "added": {"files", "bytes"}, "removed": {"files", "bytes"}, "changed": {"files",
"bytes_before", "bytes_after"}, "unchanged": {"files"}, "changes": [{"kind", "path", "before", "after"}]}`; `before` and
`after` are `{"bytes", "mtime_ns", "etag", "version"}` or null. With `--objects` it is `{"a", "b", "images": {"added",
"removed", "changed"}, "objects": {KIND: {LABEL: NUMBER}}, "changes": [{"path", "kind", "objects": [{"kind", "before",
"after"}]}]}`; `before` and `after` are `{"label", "box": [x1, y1, x2, y2]}` in pixels or null. All changes are there
unless `--limit` or `--stat` says otherwise. Exit code 0 whether they differ or not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.settings import format_bytes
from dataset_cli.app import App, SnapshotRef, command, listing_options, most_listed
from dataset_cli.output import Lines, printable


@command()
@click.argument("a", type=SnapshotRef())
@click.argument("b", type=SnapshotRef(), required=False)
@click.option("--stat", is_flag=True, help="Only how many files and bytes.")
@click.option("--objects", is_flag=True, help="What changed in the annotations, object by object, instead of files.")
@listing_options("changes")
def diff(app: App, *, a: str, b: str | None, stat: bool, objects: bool, limit: int | None, everything: bool) -> None:
    """Show what changed from snapshot A to snapshot B, or to A from its parent.

    \b
    dsctl snapshot diff mask@v1 mask@v2
    dsctl snapshot diff mask                     the latest, with the one before it
    dsctl snapshot diff mask --objects           boxes added, moved, relabelled
    """
    most = 0 if stat else most_listed(app, limit, everything)
    if objects:
        _diff_objects(app, a, b or "", most, stat=stat)
        return
    files: Counter[str] = Counter()
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    with app.catalog() as catalog, Lines() as lines:
        old, new, changes = api.compare_snapshots(catalog, a, b or "")
        for change in changes:
            files[change.kind] += 1
            before[change.kind] += change.before.size_bytes if change.before else 0
            after[change.kind] += change.after.size_bytes if change.after else 0
            if most is None or len(lines) < most:
                lines.add(_as_json(change) if app.out.json else _as_line(change))
        sizes = {"bytes_before": before["changed"], "bytes_after": after["changed"]}
        value: dict[str, Any] = {
            "a": old.ref,
            "b": new.ref,
            "added": {"files": files["added"], "bytes": after["added"]},
            "removed": {"files": files["removed"], "bytes": before["removed"]},
            "changed": {"files": files["changed"], **sizes},
            "unchanged": {"files": old.files - files["removed"] - files["changed"]},
        }
        app.out.result_with(value, "changes", None if stat else lines)
        app.out.line(f"{old.ref} → {new.ref}")
        same = count(value["unchanged"]["files"], "file")
        if not files:
            app.out.line(f"no difference: {same} in both")
            return
        for kind in ("added", "removed", "changed"):
            found = value[kind]
            size = " → ".join(format_bytes(size) for name, size in found.items() if name != "files")
            app.out.line(f"{kind:<10}{count(found['files'], 'file'):>16}  {size}")
        app.out.line(f"{'unchanged':<10}{same:>16}")
        if not stat:
            app.out.line()
            app.out.lines(lines)
            if rest := files.total() - len(lines):
                app.out.line(f"… and {rest:,} more: --all")


def _as_line(change: api.Change) -> str:
    path = printable(change.path.decode("utf-8", "surrogateescape"))
    sizes = [format_bytes(entry.size_bytes) for entry in (change.before, change.after) if entry is not None]
    if change.kind == "removed":
        return f"- {path}"
    return f"{'+' if change.kind == 'added' else '~'} {path}  {' → '.join(sizes)}"


def _as_json(change: api.Change) -> str:
    path = change.path.decode("utf-8", "surrogateescape")
    before, after = (
        entry and {"bytes": entry.size_bytes, "mtime_ns": entry.mtime_ns, "etag": entry.etag, "version": entry.version}
        for entry in (change.before, change.after)
    )
    return json.dumps({"kind": change.kind, "path": path, "before": before, "after": after})


def _diff_objects(app: App, a: str, b: str, most: int | None, *, stat: bool) -> None:
    with app.catalog() as catalog:
        old, new, _ = api.compare_snapshots(catalog, a, b)
    images: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    with (
        app.annotations(f"{old.dataset}@{old.id}") as (_, before),
        app.annotations(f"{new.dataset}@{new.id}") as (_, after),
        Lines() as lines,
    ):
        for image in api.compare_annotations(before, after):
            kind = "added" if image.before is None else "removed" if image.after is None else "changed"
            images[kind] += 1
            found = image.objects
            for change in found:
                kinds.setdefault(change.kind, Counter())[_label(change)] += 1
            if most is None or len(lines) < most:
                lines.add(
                    _image_as_json(image.path, kind, found) if app.out.json else _image_as_line(image.path, kind, found)
                )
        value = {
            "a": old.ref,
            "b": new.ref,
            "images": {kind: images[kind] for kind in ("added", "removed", "changed")},
            "objects": {kind: dict(sorted(kinds[kind].items())) for kind in _KINDS if kind in kinds},
        }
        app.out.result_with(value, "changes", None if stat else lines)
        app.out.line(f"{old.ref} → {new.ref}")
        if not images:
            app.out.line(f"no difference: {count(after.images, 'image')} annotated the same")
            return
        for kind in ("added", "removed", "changed"):
            app.out.line(f"{kind:<10}{count(images[kind], 'image'):>16}")
        for kind in value["objects"]:
            labels = ", ".join(f"{label} {number:,}" for label, number in sorted(kinds[kind].items()))
            app.out.line(f"{kind:<12}{count(kinds[kind].total(), 'object'):>14}  {printable(labels)}")
        if not stat:
            app.out.line()
            app.out.lines(lines)
            if rest := images.total() - len(lines):
                app.out.line(f"… and {rest:,} more: --all")


_KINDS = ("added", "removed", "moved", "relabelled", "edited")


def _label(change: api.ObjectChange) -> str:
    """Return the label, or both."""
    labels = dict.fromkeys(box.label for box in (change.before, change.after) if box is not None)
    return " → ".join(labels)


def _image_as_line(path: str, kind: str, found: Sequence[api.ObjectChange]) -> str:
    sign = {"added": "+", "removed": "-", "changed": "~"}[kind]
    counts = Counter((each.kind, _label(each)) for each in found)
    texts = [
        f"{each} {label} ({number:,})" if number > 1 else f"{each} {label}" for (each, label), number in counts.items()
    ]
    without = "size, labels or captions of the image" if kind == "changed" else "no objects"
    return printable(f"{sign} {path}  {', '.join(texts) or without}")


def _image_as_json(path: str, kind: str, found: Sequence[api.ObjectChange]) -> str:
    def shown(box: api.Box | None) -> dict[str, Any] | None:
        return box and {"label": box.label, "box": list(box[1:5])}

    objects = [{"kind": each.kind, "before": shown(each.before), "after": shown(each.after)} for each in found]
    return json.dumps({"path": path, "kind": kind, "objects": objects})
