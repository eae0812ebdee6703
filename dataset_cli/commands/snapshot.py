"""`dsctl snapshot`: make, list, show, compare, check, tag and remove snapshots.

With `--json` a snapshot is `{"name", "id", "ref", "files", "bytes", "tags", "created_at", "origin",
"message", "parent", "lineage", "warnings", "held"}`, its lineage `{"command", "parameters", "inputs"}` or null, held
`{"copied", "versioned", "referenced"}`, numbers of files, or null; `list` prints an array of them, `show --files` adds
`"entries"`, and `create --from` `"links_left_out"` and `"entries_passed_over"`, both numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.core.errors import CorruptManifestError, UsageError
from datacache.settings import format_bytes
from dataset_cli.app import App, DatasetName, SnapshotRef, command, confirm, naming_options
from dataset_cli.commands.diff import diff
from dataset_cli.commands.gc import gc
from dataset_cli.commands.imports import import_options, import_snapshot
from dataset_cli.commands.travel import pull, push
from dataset_cli.commands.verify import verify
from dataset_cli.output import format_time, printable


@click.group()
def snapshot() -> None:
    """Make, list, show, compare, check, tag and remove snapshots."""


snapshot.add_command(diff)
snapshot.add_command(gc)
snapshot.add_command(pull)
snapshot.add_command(push)
snapshot.add_command(verify)


def as_json(
    record: api.SnapshotRecord, dataset: api.DatasetRecord | None, held: api.Held | None = None
) -> dict[str, Any]:
    """Return the JSON shape of a snapshot. `held` is for a record that does not say it."""
    held = record.held or held
    return {
        "name": record.dataset,
        "id": record.id,
        "ref": record.ref,
        "files": record.files,
        "bytes": record.total_bytes,
        "tags": sorted(tag for tag, id in dataset.tags.items() if id == record.id) if dataset else [],
        "created_at": record.created_at,
        "origin": record.origin,
        "message": record.message,
        "parent": record.parent,
        "lineage": record.lineage._asdict() if record.lineage else None,
        "warnings": list(record.warnings),
        "held": held._asdict() if held else None,
    }


def described(app: App, record: api.SnapshotRecord) -> dict[str, Any]:
    """Return the JSON shape of a snapshot that was made or tagged, with the tags it has in the catalog. Its reference
    goes where `--output-ref` asks for it."""
    app.write_ref(record)
    with app.catalog() as catalog:
        return as_json(record, catalog.dataset(record.dataset))


def summary(value: dict[str, Any]) -> str:
    """Return the line about a snapshot that was made, out of its JSON shape."""
    tags = f"  tags: {', '.join(value['tags'])}" if value["tags"] else ""
    return f"{value['ref']}  {value['files']:,} files, {format_bytes(value['bytes'])}{tags}"


def _short(input: str) -> str:
    name, _, id = input.partition("@")
    return f"{name}@{id[:12]}"


@command(snapshot)
@click.argument("name", type=DatasetName())
@click.option("--from", "url", metavar="URL", help="s3://bucket/prefix, a folder, any fsspec URL.")
@naming_options()
@click.option("--copy", is_flag=True, help="Copy all objects, so that the snapshot outlives the bucket.")
@click.option("--pin", is_flag=True, hidden=True)  # its former name
@click.option("--objects", metavar="URL", help="Where copies go (default: DATACACHE_OBJECTS).")
@click.option("--check-copies", is_flag=True, help="With --copy: ask for each copy that earlier snapshots have, too.")
@click.option("--follow-links", is_flag=True, help="Of a folder: take along what links out of it lead to.")
@click.option("--attributes", is_flag=True, help="Keep permissions and buckets' links; asks for each object.")
@click.option("--inventory", metavar="URL", help="Read this manifest.json of an S3 Inventory in place of a listing.")
@import_options
def create(
    app: App,
    /,
    *,
    name: str,
    url: str | None,
    copy: bool,
    pin: bool,
    objects: str | None,
    check_copies: bool,
    follow_links: bool,
    attributes: bool,
    inventory: str | None,
    **imports: Any,
) -> None:
    """Give a name and a version to all that lies under URL, to what JSON lines name, or to an annotation tool's export.

    Of stores nothing is copied, unless --copy asks for it. With --frames, the videos under URL are decoded, and their
    frames stored as images. The same input gives the same snapshot again.
    """
    copy |= pin
    of_a_url = {"--check-copies": check_copies, "--follow-links": follow_links, "--attributes": attributes}
    of_a_url["--inventory"] = bool(inventory)
    for option, given in of_a_url.items():
        if given and (url is None or imports["frames"] is not None):
            raise click.UsageError(f"{option} is for --from" + (" without --frames" if url else ""))
    options: dict[str, Any] = {"objects": objects or "", "settings": app.settings}
    options |= api.take(imports, api.NamingOptions)
    imported = import_snapshot(app, name, url=url, copy=copy, imports=imports, options=options)
    if imported is not None:
        _print_created(app, imported.record, {"import": imported.value}, imported.notes)
        return
    assert url is not None
    if not copy and (objects or check_copies):
        raise click.UsageError("--objects and --check-copies are for --copy")
    before, links = api.unchecked_objects(), api.Links()
    done = "copied " if copy else ""
    doing = "copying" if copy else "reading the inventory of" if inventory else "listing"
    with app.out.progress(f"{doing} {url}") as bar:
        record = api.create_snapshot(
            name,
            url,
            copy=copy,
            check_copies=check_copies,
            follow_links=follow_links,
            attributes=attributes,
            inventory=inventory or "",
            links=links,
            progress=lambda files, size: bar.update(f"{done}{files:,} objects, {format_bytes(size)}"),
            **options,
        )
    unchecked = api.unchecked_objects() - before
    notes = [f"{count(unchecked, 'object')} could not be checked: the store has no checksum"] if unchecked else []
    value = {"links_left_out": links.left_out, "entries_passed_over": links.passed_over}
    _print_created(app, record, value | ({"unchecked": unchecked} if copy else {}), notes)


def _print_created(app: App, record: api.SnapshotRecord, value: dict[str, Any], notes: Sequence[str]) -> None:
    value = described(app, record) | value
    for warning in record.warnings:
        app.out.warning(warning)
    app.out.result(value, "\n".join([summary(value), *(f"  {printable(note)}" for note in notes)]))


@command(snapshot, "list")
@click.argument("name", type=DatasetName(), required=False)
def list_(app: App, name: str | None) -> None:
    """List the snapshots of a dataset, or of all.

    HELD says whether the bytes stay: 'copied' by datacache, as 'bucket versions', or 'not held', so that a change in
    the bucket breaks the snapshot (make it with --copy to keep it).
    """
    values, rows = [], []
    with app.catalog() as catalog:
        datasets = catalog.datasets() if name is None else [catalog.dataset(name)]
        if datasets == [None]:
            api.resolve(catalog, name or "")  # raises, saying what there is
        for dataset in filter(None, datasets):
            for record in catalog.snapshots(dataset.name):
                held = _held(record, catalog)
                value = as_json(record, dataset, held)
                values.append(value)
                made_from = record.origin
                if record.lineage is not None and record.lineage.inputs:
                    made_from = f"{record.lineage.command} {', '.join(map(_short, record.lineage.inputs))}"
                rows.append(
                    [
                        record.ref,
                        ", ".join(value["tags"] + (["latest"] if dataset.latest == record.id else [])),
                        f"{record.files:,}",
                        format_bytes(record.total_bytes),
                        api.held_in_words(held) if held else "?",
                        format_time(record.created_at),
                        made_from,
                        record.message,
                    ]
                )
    app.out.listing(
        values,
        ["REF", "TAGS", "FILES", "SIZE", "HELD", "CREATED (UTC)", "ORIGIN", "MESSAGE"],
        rows,
        right=(2, 3),
        empty="There are no snapshots yet. Make one: dsctl snapshot create NAME --from URL",
    )


def _held(record: api.SnapshotRecord, catalog: api.Catalog) -> api.Held | None:
    """Return how a snapshot's files are held; None where it cannot be read, which is no reason not to list it."""
    try:
        return api.held_of(record, catalog.get_blobs)
    except CorruptManifestError:
        return None


@command(snapshot)
@click.argument("ref", type=SnapshotRef())
@click.option("--files", "with_files", is_flag=True, help="List its files, too.")
@click.option("--stats", "with_stats", is_flag=True, help="Count its classes, boxes and sizes, too (dsctl stats).")
@click.option("--outputs", "with_outputs", is_flag=True, help="Say what was made from it, looking at all data sets.")
def show(app: App, ref: str, with_files: bool, with_stats: bool, with_outputs: bool) -> None:
    """Show one snapshot."""
    from dataset_cli.commands.stats import collect, print_statistics

    with app.catalog() as catalog:
        record = api.resolve(catalog, ref)
        dataset = catalog.dataset(record.dataset)
        held = _held(record, catalog)
        exact = f"{record.dataset}@{record.id}"
        outputs = api.descendants(catalog).by_input.get(exact, []) if with_outputs else []
    value = as_json(record, dataset, held)
    if with_outputs:
        value["outputs"] = [{"ref": each.ref, "command": _command(each)} for each in outputs]
    if app.out.json:
        if with_files:
            value["entries"] = list(_entries(app, exact))
        if with_stats:
            value["stats"] = collect(app, exact)[1].as_json()
        app.out.result(value)
        return
    held_text = api.held_in_words(held) if held else ""
    if held and held.referenced:
        held_text += " (a change in the bucket breaks it; --copy copies)"
    made_by = ""
    if record.lineage is not None:
        command, parameters, inputs = record.lineage
        values = (f"{key}={text if isinstance(text, str) else json.dumps(text)}" for key, text in parameters.items())
        made_by = " ".join([command, *map(_short, inputs), *values])
    app.out.fields(
        {
            "snapshot": exact,
            "tags": ", ".join(value["tags"] + (["latest"] if dataset and dataset.latest == record.id else [])),
            "files": f"{record.files:,}",
            "size": f"{format_bytes(record.total_bytes)} ({record.total_bytes:,} bytes)",
            "held": held_text,
            "created": f"{format_time(record.created_at)} UTC",
            "origin": record.origin,
            "made by": made_by,
            "message": record.message,
            "parent": record.parent or "",
            "outputs": ", ".join(f"{each.ref} ({_command(each)})" for each in outputs)
            or ("none" if with_outputs else ""),
        }
    )
    for warning in record.warnings:
        app.out.fields({"warning": warning})
    if with_stats:
        app.out.line()
        name, found = collect(app, exact)
        print_statistics(app, found, name)
    if with_files:
        app.out.line()
        app.out.lines(f"{entry['bytes']:>14,}  {printable(entry['path'])}" for entry in _entries(app, exact))


def _command(record: api.SnapshotRecord) -> str:
    return record.lineage.command if record.lineage else ""


def _entries(app: App, ref: str) -> Iterator[dict[str, Any]]:
    with api.open_snapshot(ref, app.settings) as opened:
        for entry in opened.manifest.entries():
            if not entry.is_marker:
                path = entry.path.decode("utf-8", "surrogateescape")
                yield {"path": path, "bytes": entry.size_bytes, "mtime_ns": entry.mtime_ns, "etag": entry.etag}


@command(snapshot)
@click.argument("ref", type=SnapshotRef())
@click.argument("tag")
@click.option("--move", is_flag=True, help="Move the tag if it names another snapshot.")
def tag(app: App, ref: str, tag: str, move: bool) -> None:
    """Give a snapshot one more name."""
    record = api.tag_snapshot(ref, tag, move=move, settings=app.settings)
    app.out.result(described(app, record), f"{record.dataset}@{tag} is {record.ref}")


@command(snapshot)
@click.argument("name", type=SnapshotRef())
@click.argument("tag", required=False)
def untag(app: App, name: str, tag: str | None) -> None:
    """Remove a tag, NAME TAG or NAME@TAG; the snapshot stays."""
    if ("@" in name) == (tag is not None):
        raise click.UsageError("which tag? Write NAME TAG, or NAME@TAG")
    if tag is None:
        name, _, tag = name.partition("@")
    api.untag_snapshot(name, tag, settings=app.settings)
    app.out.result({"name": name, "removed_tag": tag}, f"removed the tag {name}@{tag}")


@command(snapshot)
@click.argument("ref", type=SnapshotRef())
@click.option("--all-tags", is_flag=True, help="Remove the snapshot with all tags that name it.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(app: App, ref: str, all_tags: bool, yes: bool) -> None:
    """Remove a tag, and with the last one the snapshot. The objects in the bucket are not touched.

    By its id or as NAME@latest, a snapshot is removed that has no tags, or with --all-tags one with all of them. What
    is mounted stays readable until it is unmounted.
    """
    with app.catalog() as catalog:
        planned = api.plan_removal(catalog, ref, all_tags=all_tags)
        value = as_json(planned.record, catalog.dataset(planned.record.dataset))
        confirm(yes, _removal(planned, "remove"), f"{_removal(planned, 'Remove')}?")
        if not api.carry_out(catalog, planned):
            raise UsageError(f"the tags of {planned.record.ref} were changed meanwhile", hint="Look, and try again.")
    value |= {
        "removed_tags": list(planned.tags),
        "removed_snapshot": planned.of_snapshot,
        "kept_tags": list(planned.kept_tags),
        "latest": planned.latest or None,
        "mounted_at": list(planned.mounted_at),
    }
    app.out.result(value, _removal(planned, "removed"))
    if planned.mounted_at:
        places = ", ".join(map(printable, planned.mounted_at))
        app.out.line(f"It is mounted at {places}, and can be read there until it is unmounted.")


def _removal(planned: api.Removal, verb: str) -> str:
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
