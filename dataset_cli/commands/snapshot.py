"""`dsctl snapshot`: make, list, show, compare, check, tag and remove snapshots.

With `--json` a snapshot is `{"name", "id", "ref", "files", "bytes", "tags", "created_at", "origin",
"message", "parent", "lineage", "warnings", "held"}`, its lineage `{"command", "parameters", "inputs"}` or null, held
`{"copied", "versioned", "referenced"}`, numbers of files, or null; `list` prints an array of them, `show --files` adds
`"entries"`, and `create --from` `"links_left_out"` and `"entries_passed_over"`, both numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from datacache.core.counters import count
from dataset_cli.app import App, DatasetName, SnapshotRef, json_option, pass_app
from dataset_cli.commands.diff import diff
from dataset_cli.commands.gc import gc
from dataset_cli.commands.imports import import_options, import_snapshot
from dataset_cli.commands.verify import verify
from dataset_cli.output import format_bytes, format_time, printable

if TYPE_CHECKING:
    from datacache.api import Catalog, DatasetRecord, Held, Removal, SnapshotRecord


@click.group()
def snapshot() -> None:
    """Make, list, show, compare, check, tag and remove snapshots."""


snapshot.add_command(diff)
snapshot.add_command(gc)
snapshot.add_command(verify)


def as_json(record: SnapshotRecord, dataset: DatasetRecord | None, held: Held | None = None) -> dict[str, Any]:
    """The JSON shape of a snapshot. `held` is for a record that does not say it."""
    held = record.held or held
    return {
        "name": record.dataset,
        "id": record.id,
        "ref": record.ref,
        "files": record.files,
        "bytes": record.total_bytes,
        "tags": _tags(record, dataset),
        "created_at": record.created_at,
        "origin": record.origin,
        "message": record.message,
        "parent": record.parent,
        "lineage": record.lineage._asdict() if record.lineage else None,
        "warnings": list(record.warnings),
        "held": held._asdict() if held else None,
    }


def _tags(record: SnapshotRecord, dataset: DatasetRecord | None) -> list[str]:
    return sorted(tag for tag, id in dataset.tags.items() if id == record.id) if dataset else []


def _made_from(record: SnapshotRecord) -> str:
    """Where a snapshot comes from: the command and the snapshots it was made of, or the URL."""
    if record.lineage is None or not record.lineage.inputs:
        return record.origin
    return f"{record.lineage.command} {', '.join(map(_short, record.lineage.inputs))}"


def _made_by(record: SnapshotRecord) -> str:
    if record.lineage is None:
        return ""
    command, parameters, inputs = record.lineage
    values = (f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in parameters.items())
    return " ".join([command, *map(_short, inputs), *values])


def _short(input: str) -> str:
    name, _, id = input.partition("@")
    return f"{name}@{id[:12]}"


@snapshot.command()
@click.argument("name", type=DatasetName())
@click.option("--from", "url", metavar="URL", help="s3://bucket/prefix, a folder, any fsspec URL.")
@click.option("--tag", "tags", multiple=True, help="Tag it; may be given several times.")
@click.option("--move-tags", is_flag=True, help="Move tags that name another snapshot.")
@click.option("--replace", is_flag=True, help="Make it the next version, even of something else.")
@click.option("--message", "-m", default="", help="A line on why it was made.")
@click.option("--copy", is_flag=True, help="Copy all objects, so that the snapshot outlives the bucket.")
@click.option("--pin", is_flag=True, hidden=True)  # its former name
@click.option("--objects", metavar="URL", help="Where copies go (default: DATACACHE_OBJECTS).")
@click.option("--check-copies", is_flag=True, help="With --copy: ask for each copy that earlier snapshots have, too.")
@click.option("--follow-links", is_flag=True, help="Of a folder: take along what links out of it lead to.")
@click.option("--attributes", is_flag=True, help="Keep permissions and buckets' links; asks for each object.")
@import_options
@json_option
@pass_app
def create(
    app: App,
    /,
    *,
    name: str,
    url: str | None,
    tags: tuple[str, ...],
    move_tags: bool,
    replace: bool,
    message: str,
    copy: bool,
    pin: bool,
    objects: str | None,
    check_copies: bool,
    follow_links: bool,
    attributes: bool,
    **imports: Any,
) -> None:
    """Give a name and a version to all that lies under URL, to what JSON lines name, or to an annotation tool's export.

    Of stores nothing is copied, unless --copy asks for it. The same input gives the same snapshot again.
    """
    copy |= pin
    of_a_url = {"--check-copies": check_copies, "--follow-links": follow_links, "--attributes": attributes}
    for option, given in of_a_url.items():
        if given and url is None:
            raise click.UsageError(f"{option} is for --from")
    options: dict[str, Any] = {"tags": tags, "move_tags": move_tags, "replace": replace, "message": message}
    imported = import_snapshot(app, name, url=url, copy=copy, objects=objects or "", imports=imports, options=options)
    if imported is not None:
        _print_created(app, imported.record, {"import": imported.value}, imported.notes)
        return
    assert url is not None
    from datacache import api
    from datacache.api import Links

    before, links = api.unchecked_objects(), Links()
    options |= {"follow_links": follow_links, "attributes": attributes, "links": links}
    record = _create_from(app, name, url, copy=copy, objects=objects or "", check_copies=check_copies, options=options)
    unchecked = api.unchecked_objects() - before
    unknown = f"{count(unchecked, 'object')} could not be checked: the store has no checksum"
    notes = [unknown] if unchecked else []
    value = {"links_left_out": links.left_out, "entries_passed_over": links.passed_over}
    _print_created(app, record, value | ({"unchecked": unchecked} if copy else {}), notes)


def _create_from(
    app: App, name: str, url: str, *, copy: bool, objects: str, check_copies: bool, options: dict[str, Any]
) -> SnapshotRecord:
    from datacache import api

    if not copy and (objects or check_copies):
        raise click.UsageError("--objects and --check-copies are for --copy")
    with app.out.progress(f"{'copying' if copy else 'listing'} {url}") as bar:
        return api.create_snapshot(
            name,
            url,
            settings=app.settings,
            copy=copy,
            objects=objects,
            check_copies=check_copies,
            progress=lambda files, size: bar.update(
                f"{'copied ' if copy else ''}{files:,} objects, {format_bytes(size)}"
            ),
            **options,
        )


def _print_created(app: App, record: SnapshotRecord, value: dict[str, Any], notes: Sequence[str]) -> None:
    with app.catalog() as catalog:
        dataset = catalog.dataset(record.dataset)
    for warning in record.warnings:
        app.out.warning(warning)
    tagged = ", ".join(_tags(record, dataset))
    text = f"{record.ref}  {record.files:,} files, {format_bytes(record.total_bytes)}"
    text += f"  tags: {tagged}" if tagged else ""
    app.out.result(as_json(record, dataset) | value, "\n".join([text, *(f"  {printable(note)}" for note in notes)]))


@snapshot.command("list")
@click.argument("name", type=DatasetName(), required=False)
@json_option
@pass_app
def list_(app: App, name: str | None) -> None:
    """List the snapshots of a dataset, or of all.

    HELD says whether the bytes stay: 'copied' by datacache, as 'bucket versions', or 'not held', so that a change in
    the bucket breaks the snapshot (make it with --copy to keep it).
    """
    from datacache.api import held_in_words as in_words
    from datacache.api import resolve

    with app.catalog() as catalog:
        if name is None:
            datasets = catalog.datasets()
        else:
            found = catalog.dataset(name)
            if found is None:
                resolve(catalog, name)  # raises, saying what there is
            datasets = [found] if found else []
        rows = [
            (dataset, record, _held(record, catalog))
            for dataset in datasets
            for record in catalog.snapshots(dataset.name)
        ]
    app.out.result([as_json(record, dataset, held) for dataset, record, held in rows])
    if not rows:
        app.out.line("There are no snapshots yet. Make one: dsctl snapshot create NAME --from URL")
        return
    app.out.table(
        ["REF", "TAGS", "FILES", "SIZE", "HELD", "CREATED (UTC)", "ORIGIN", "MESSAGE"],
        [
            [
                record.ref,
                ", ".join(_tags(record, dataset) + (["latest"] if dataset.latest == record.id else [])),
                f"{record.files:,}",
                format_bytes(record.total_bytes),
                in_words(held) if held else "?",
                format_time(record.created_at),
                _made_from(record),
                record.message,
            ]
            for dataset, record, held in rows
        ],
        right=(2, 3),
    )


def _in_words(held: Held | None) -> str:
    from datacache.api import held_in_words as in_words

    if held is None:
        return ""
    return in_words(held) + (" (a change in the bucket breaks it; --copy copies)" if held.referenced else "")


def _held(record: SnapshotRecord, catalog: Catalog) -> Held | None:
    """Return how a snapshot's files are held; None where it cannot be read, which is no reason not to list it."""
    from datacache.api import held_of
    from datacache.core.errors import CorruptManifestError

    try:
        return held_of(record, catalog.get_blobs)
    except CorruptManifestError:
        return None


@snapshot.command()
@click.argument("ref", type=SnapshotRef())
@click.option("--files", "with_files", is_flag=True, help="List its files, too.")
@click.option("--stats", "with_stats", is_flag=True, help="Count its classes, boxes and sizes, too (dsctl stats).")
@json_option
@pass_app
def show(app: App, ref: str, with_files: bool, with_stats: bool) -> None:
    """Show one snapshot."""
    from datacache.api import resolve
    from dataset_cli.commands.stats import collect, print_stats

    with app.catalog() as catalog:
        record = resolve(catalog, ref)
        dataset = catalog.dataset(record.dataset)
        held = _held(record, catalog)
    value = as_json(record, dataset, held)
    if with_files and app.out.json:
        value["entries"] = list(_entries(app, record))
    if with_stats and app.out.json:
        value["stats"] = collect(app, f"{record.dataset}@{record.id}")[1].as_json()
    app.out.result(value)
    if app.out.json:
        return
    tags = value["tags"] + (["latest"] if dataset and dataset.latest == record.id else [])
    for label, text in {
        "snapshot": f"{record.dataset}@{record.id}",
        "tags": ", ".join(tags),
        "files": f"{record.files:,}",
        "size": f"{format_bytes(record.total_bytes)} ({record.total_bytes:,} bytes)",
        "held": _in_words(held),
        "created": f"{format_time(record.created_at)} UTC",
        "origin": record.origin,
        "made by": _made_by(record),
        "message": record.message,
        "parent": record.parent or "",
    }.items():
        if text:
            app.out.line(f"{label + ':':10}{printable(text)}")
    for warning in record.warnings:
        app.out.line(f"{'warning:':10}{printable(warning)}")
    if with_stats:
        app.out.line()
        print_stats(app, f"{record.dataset}@{record.id}")
    if with_files:
        app.out.line()
        for entry in _entries(app, record):
            app.out.line(f"{entry['bytes']:>14,}  {printable(entry['path'])}")


def _entries(app: App, record: SnapshotRecord) -> Any:
    from datacache import api

    with api.open_snapshot(f"{record.dataset}@{record.id}", app.settings) as opened:
        for entry in opened.manifest.entries():
            if not entry.path.endswith(b"/"):
                path = entry.path.decode("utf-8", "surrogateescape")
                yield {
                    "path": path,
                    "bytes": entry.size_bytes,
                    "mtime_ns": entry.mtime_ns,
                    "etag": entry.etag,
                }


@snapshot.command()
@click.argument("ref", type=SnapshotRef())
@click.argument("tag")
@click.option("--move", is_flag=True, help="Move the tag if it names another snapshot.")
@json_option
@pass_app
def tag(app: App, ref: str, tag: str, move: bool) -> None:
    """Give a snapshot one more name."""
    from datacache.api import check_tag, resolve

    check_tag(tag)
    with app.catalog() as catalog:
        record = resolve(catalog, ref)
        catalog.set_tag(record.dataset, tag, record.id, move=move)
        value = as_json(record, catalog.dataset(record.dataset))
    app.out.result(value, f"{record.dataset}@{tag} is {record.ref}")


@snapshot.command()
@click.argument("name", type=SnapshotRef())
@click.argument("tag", required=False)
@json_option
@pass_app
def untag(app: App, name: str, tag: str | None) -> None:
    """Remove a tag, NAME TAG or NAME@TAG; the snapshot stays."""
    from datacache.core.errors import SnapshotNotFoundError

    if ("@" in name) == (tag is not None):
        raise click.UsageError("which tag? Write NAME TAG, or NAME@TAG")
    if tag is None:
        name, _, tag = name.partition("@")
    with app.catalog() as catalog:
        if not catalog.remove_tag(name, tag):
            raise SnapshotNotFoundError(
                f"{name} has no tag {tag!r}", ref=f"{name}@{tag}", hint=f"See: dsctl snapshot list {name}"
            )
    app.out.result({"name": name, "removed_tag": tag}, f"removed the tag {name}@{tag}")


@snapshot.command()
@click.argument("ref", type=SnapshotRef())
@click.option("--all-tags", is_flag=True, help="Remove the snapshot with all tags that name it.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@pass_app
def rm(app: App, ref: str, all_tags: bool, yes: bool) -> None:
    """Remove a tag, and with the last one the snapshot. The objects in the bucket are not touched.

    By its id or as NAME@latest, a snapshot is removed that has no tags, or with --all-tags one with all of them. What
    is mounted stays readable until it is unmounted.
    """
    from datacache.api import carry_out as remove
    from datacache.api import plan_removal
    from datacache.core.errors import UsageError

    with app.catalog() as catalog:
        planned = plan_removal(catalog, ref, all_tags=all_tags)
        value = as_json(planned.record, catalog.dataset(planned.record.dataset))
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError(f"this must be confirmed: {_removal(planned, 'remove')}", hint="Add --yes.")
            click.confirm(f"{_removal(planned, 'Remove')}?", abort=True, err=True)
        if not remove(catalog, planned):
            raise UsageError(f"the tags of {planned.record.ref} were changed meanwhile", hint="Look, and try again.")
    value |= {
        "removed_tags": list(planned.tags),
        "removed_snapshot": planned.of_snapshot,
        "kept_tags": list(planned.kept_tags),
        "latest": planned.latest or None,
        "mounted_at": list(planned.mounted_at),
    }
    app.out.result(value, _removal(planned, "removed"))
    if planned.mounted_at and not app.out.json:
        places = ", ".join(map(printable, planned.mounted_at))
        app.out.line(f"It is mounted at {places}, and can be read there until it is unmounted.")


def _removal(planned: Removal, verb: str) -> str:
    """Return what goes and what stays, in words."""
    record = planned.record
    tags = [f"{record.dataset}@{tag}" for tag in planned.tags]
    named = f"the tag{'s' if len(tags) > 1 else ''} {', '.join(tags)}"
    if not planned.of_snapshot:
        kept = ", ".join(f"{record.dataset}@{tag}" for tag in planned.kept_tags)
        return f"{verb} {named}; the snapshot {record.ref} stays, as {kept}"
    text = f"{verb} the snapshot {record.ref} ({record.files:,} files)" + (f" with {named}" if tags else "")
    if not planned.latest:
        return f"{text}, the last one of {record.dataset}"
    return f"{text}; {record.dataset}@latest is {record.dataset}@{planned.latest[:12]}"
