"""`dsctl ls`, `cat`, `cp` and `log`: look into a snapshot, and take files out of it, without a mount.

A file or folder is named `NAME@VERSION/PATH`; a path that is none is a pattern, whose `*`, `?` and `[…]` stand for
parts of one name, and `**` for any folders. With `--json`, `ls` prints an array of `{"path", "bytes", "mtime_ns",
"etag", "is_dir", "target"}` (`target` is that of a symbolic link), for datasets of `{"name", "latest", "tags"}`; `cp`
prints `{"files", "bytes", "written"}`, the paths on this machine; `log` prints snapshots as `dsctl snapshot list` has
them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from datacache import api
from datacache.core.counters import count
from datacache.core.errors import DatacacheError, PathNotFoundError, SnapshotNotFoundError, UsageError
from datacache.settings import format_bytes
from dataset_cli.app import App, SnapshotRef, command
from dataset_cli.commands.snapshot import as_json
from dataset_cli.output import format_time, printable

_COPY_BYTES = 1 << 20
_PATTERN = re.compile(r"[*?\[]")


class Located(NamedTuple):
    """A file or a folder of a snapshot. The path of the top folder is empty."""

    ref: str
    path: str

    def __str__(self) -> str:
        return f"{self.ref}/{self.path}"


class SnapshotPath(click.ParamType[Located]):
    """`NAME@VERSION/PATH`, completed from the catalog and the snapshot. Without a path: the top folder."""

    name = "ref/path"

    def convert(self, value: Any, _param: click.Parameter | None, _context: click.Context | None) -> Located:
        """Check the reference, before anything is opened."""
        if "://" in str(value):
            hint = f"Make a snapshot of it: dsctl snapshot create NAME --from {value}"
            raise UsageError(f"{value} is a URL, and not in a snapshot", hint=hint)
        if lock := api.find_lock(str(value)):
            return Located(lock.ref, "")
        name, at, rest = str(value).partition("@")
        version, _, path = rest.partition("/")
        ref = f"{name}@{version}" if at else name.rstrip("/")
        api.parse_ref(ref)
        return Located(ref, path.strip("/"))

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the references that begin so, and behind a reference the folder's names."""
        name, _, rest = incomplete.partition("@")
        if "/" not in rest:
            return SnapshotRef().shell_complete(context, param, incomplete)
        version, _, path = rest.partition("/")
        folder = path.rpartition("/")[0]
        try:
            with api.open_snapshot(f"{name}@{version}", App().settings) as snapshot:
                found = [f"{name}@{version}/{e.path}{'/' if e.is_dir else ''}" for e in snapshot.scan(folder)]
        except Exception:  # noqa: BLE001 - a shell that completes shows no errors
            return []
        return [CompletionItem(text) for text in found if text.startswith(incomplete)]


@command()
@click.argument("place", metavar="[REF[/FOLDER]]", type=SnapshotPath(), required=False)
@click.option("--long", "-l", "long", is_flag=True, help="With sizes and times (UTC).")
@click.option("--recursive", "-R", is_flag=True, help="All files below the folder.")
def ls(app: App, *, place: Located | None, long: bool, recursive: bool) -> None:
    """List a folder of a snapshot, or the datasets.

    \b
    dsctl ls                       datasets
    dsctl ls mask@v3               what is at the top
    dsctl ls -l mask@v3/images     a folder; its files with sizes
    dsctl ls 'mask@v3/**/*.xml'    what fits, in any folder
    """
    if place is None:
        _list_datasets(app)
        return
    with _opened(app, place) as snapshot:
        found = _expanded(snapshot, place.path)
        first = next(found)
        within = first.is_dir and first.path == place.path
        if recursive:
            found = (stat for top in chain([first], found) for stat in _below(snapshot, top) if not stat.is_dir)
        else:
            found = snapshot.scan(first.path) if within else chain([first], found)
        base = f"{place.path}/" if within and place.path else ""
        if app.out.json:
            app.out.array(json.dumps(_entry(stat)) for stat in found)
            return
        app.out.lines(_line(stat, stat.path.removeprefix(base), long=long) for stat in found)


def _list_datasets(app: App) -> None:
    with app.catalog() as catalog:
        datasets = catalog.datasets()
    app.out.listing(
        [{"name": each.name, "latest": each.latest, "tags": each.tags} for each in datasets],
        ["NAME", "LATEST", "TAGS"],
        [[each.name, each.latest[:12], ", ".join(sorted(each.tags))] for each in datasets],
        empty="There are no datasets yet. Make one: dsctl snapshot create NAME --from URL",
    )


@contextmanager
def _opened(app: App, place: Located) -> Iterator[api.Snapshot]:
    """Open the snapshot of a place."""
    try:
        snapshot = api.open_snapshot(place.ref, app.settings)
    except SnapshotNotFoundError as exc:
        if Path(place.ref).exists():
            exc.hint = f"{place.ref} of this machine is in no snapshot: dsctl snapshot create makes them. {exc.hint}"
        raise
    with snapshot:
        yield snapshot


def _expanded(snapshot: api.Snapshot, path: str) -> Iterator[api.Stat]:
    """Yield the file or folder of this very name; where there is none, what fits the name as a pattern, at least one.
    `PathNotFoundError`."""
    try:
        yield snapshot.stat(path)
    except PathNotFoundError:
        if not _PATTERN.search(path):
            raise
        parts = re.sub(r"(\*\*/)+", "**/", path).split("/")
        fitting = _fitting(snapshot, "", parts)
        if parts.count("**") > 1:  # a path may fit in several ways
            fitting = iter({stat.path: stat for stat in fitting}.values())
        first = next(fitting, None)
        if first is None:
            raise
        yield first
        yield from fitting


def _fitting(snapshot: api.Snapshot, folder: str, parts: Sequence[str]) -> Iterator[api.Stat]:
    """Yield what is in a folder and fits the parts of a pattern."""
    part, *rest = parts
    deep = part == "**" and bool(rest)
    if deep:
        yield from _fitting(snapshot, folder, rest)
    for stat in snapshot.scan(folder):
        if rest and stat.is_dir and (deep or fnmatchcase(_name(stat), part)):
            yield from _fitting(snapshot, stat.path, parts if deep else rest)
        elif not rest and fnmatchcase(_name(stat), part):
            yield stat


def _name(stat: api.Stat) -> str:
    return stat.path.rpartition("/")[2]


def _below(snapshot: api.Snapshot, top: api.Stat) -> Iterator[api.Stat]:
    """Yield a file; of a folder itself, and all that is in it."""
    yield top
    for stat in snapshot.scan(top.path) if top.is_dir else ():
        yield from _below(snapshot, stat)


def _entry(stat: api.Stat) -> dict[str, Any]:
    return {
        "path": stat.path,
        "bytes": stat.size_bytes,
        "mtime_ns": stat.mtime_ns,
        "etag": stat.etag,
        "is_dir": stat.is_dir,
        "target": stat.target or None,
    }


def _line(stat: api.Stat, name: str, *, long: bool) -> str:
    text = printable(name) + ("/" if stat.is_dir else "")
    if not long:
        return text
    text += f" -> {printable(stat.target)}" if stat.target else ""
    time = "" if stat.is_dir else datetime.fromtimestamp(stat.mtime_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M")
    return f"{'' if stat.is_dir else f'{stat.size_bytes:,}':>15}  {time:16}  {text}"


@command(has_json=False)
@click.argument("places", metavar="REF/PATH...", type=SnapshotPath(), nargs=-1, required=True)
def cat(app: App, *, places: tuple[Located, ...]) -> None:
    """Write files of snapshots to the standard output, one behind the other."""
    for place in places:
        with _opened(app, place) as snapshot:
            for stat in _expanded(snapshot, place.path):
                if stat.is_dir:
                    folder = Located(place.ref, stat.path)
                    raise UsageError(f"{folder} is a folder", hint=f"See its files: dsctl ls {folder}")
                with snapshot.open(stat.path) as file:
                    shutil.copyfileobj(file, sys.stdout.buffer, _COPY_BYTES)
    sys.stdout.buffer.flush()


@command()
@click.argument("places", metavar="REF/PATH...", type=SnapshotPath(), nargs=-1, required=True)
@click.argument("destination", metavar="DEST")
@click.option("--recursive", "-r", is_flag=True, help="Copy folders with all that is in them.")
@click.option("--force", "-f", is_flag=True, help="Replace files that are there.")
def cp(app: App, *, places: tuple[Located, ...], destination: str, recursive: bool, force: bool) -> None:
    """Copy files of snapshots into a folder of this machine.

    \b
    dsctl cp mask@v3/classes.txt .
    dsctl cp -r mask@v3/images pictures
    dsctl cp 'mask@v3/labels/00*.txt' labels/

    DEST is a folder that is there or ends with a slash, or for one file or folder its new path. A file appears under
    its name when all its bytes are there. A whole snapshot is better written by dsctl export, which goes on where it
    was.
    """
    if "://" in destination:
        hint = "Copy to a folder, or to the bucket's mount: dsctl mount --rw URL DIR"
        raise UsageError(f"{destination} is no path of this machine", hint=hint)
    into = destination.endswith("/") or Path(destination).is_dir()
    written: dict[str, None] = {}
    size = 0
    with app.out.progress(f"copying to {destination}") as bar:
        for place in places:
            with _opened(app, place) as snapshot:
                chosen = list(_expanded(snapshot, place.path))
                if not into and (len(places) > 1 or len(chosen) > 1):
                    hint = f"Several files go into a folder: {destination}/"
                    raise UsageError(f"{destination} is no folder", hint=hint)
                for stat, path in _targets(snapshot, chosen, Path(destination), into=into, recursive=recursive):
                    if str(path) in written:
                        raise UsageError(f"{path} was just written, from another file", hint="Copy them into folders.")
                    _copy(snapshot, stat, path, force=force)
                    if stat.is_dir:
                        continue
                    written[str(path)] = None
                    size += stat.size_bytes
                    bar.update(f"{count(len(written), 'file')}, {format_bytes(size)}", size)
    text = f"copied {count(len(written), 'file')}, {format_bytes(size)}, to {printable(destination)}"
    app.out.result({"files": len(written), "bytes": size, "written": list(written)}, text)


def _targets(
    snapshot: api.Snapshot, chosen: Sequence[api.Stat], destination: Path, *, into: bool, recursive: bool
) -> Iterator[tuple[api.Stat, Path]]:
    """Yield what is copied, folders before what is in them, and to which path."""
    for top in chosen:
        if top.is_dir and not recursive:
            folder = Located(snapshot.record.ref, top.path)
            raise UsageError(f"{folder} is a folder", hint="Give --recursive to copy all that is in it.")
        place = destination / _name(top) if into else destination
        for stat in _below(snapshot, top):
            yield stat, place / stat.path[len(top.path) :].lstrip("/")


def _copy(snapshot: api.Snapshot, stat: api.Stat, path: Path, *, force: bool) -> None:
    if not force and not stat.is_dir and (path.is_symlink() or path.exists()):
        raise UsageError(f"{path} is there already", hint="Give --force to replace it.")
    temporary = None
    try:
        if stat.is_dir:
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".dsctl-", delete=False) as file:
            temporary = Path(file.name)
            with snapshot.open(stat.path) as source:
                shutil.copyfileobj(source, file, _COPY_BYTES)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod((stat.mode & 0o777 or 0o666) & ~umask)
        os.utime(temporary, ns=(stat.mtime_ns, stat.mtime_ns))
        temporary.replace(path)
        temporary = None
    except OSError as exc:
        if isinstance(exc, DatacacheError):  # of reading
            raise
        raise UsageError(f"{path} cannot be written: {exc.strerror}") from exc
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("-n", "most", type=click.IntRange(1), metavar="N", help="At most N snapshots.")
def log(app: App, *, ref: str, most: int | None) -> None:
    """Show a snapshot and those before it, the newest first.

    Each with its tags, its size, what it was made from, and its message.
    """
    values, texts = [], []
    with app.catalog() as catalog:
        record = api.resolve(catalog, ref)
        dataset = catalog.dataset(record.dataset)
        while True:
            value = as_json(record, dataset)
            values.append(value)
            texts.append(_log_text(record, value, latest=dataset is not None and dataset.latest == record.id))
            before = catalog.snapshot(record.dataset, record.parent) if record.parent else None
            if before is None or len(values) == most:
                break
            record = before
    if record.parent and before is None:
        texts.append(f"{record.dataset}@{record.parent[:12]}  was removed")
    app.out.result(values, "\n\n".join(texts))


def _log_text(record: api.SnapshotRecord, value: dict[str, Any], *, latest: bool) -> str:
    names = ", ".join([*value["tags"], *(["latest"] if latest else [])])
    lines = [
        f"{record.ref}{f'  ({names})' if names else ''}",
        f"    {format_time(record.created_at)} UTC  {count(record.files, 'file')}, {format_bytes(record.total_bytes)}",
    ]
    if record.lineage is not None:
        inputs = " ".join(
            f"{name}@{id[:12]}" for name, _, id in (each.partition("@") for each in record.lineage.inputs)
        )
        lines.append(f"    {record.lineage.command} {inputs or f'from {record.origin}'}")
    else:
        lines.append(f"    from {record.origin}")
    if record.message:
        lines.append(f"    {record.message}")
    return "\n".join(map(printable, lines))
