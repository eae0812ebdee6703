"""`dsctl snapshot gc`: remove what no snapshot needs any more.

With `--json`: `{"dry_run", "grace_s", "blobs", "blob_bytes", "objects", "object_bytes", "young_blobs", "young_objects",
"derived", "documents", "storages": [{"url", "objects", "bytes", "young", "kept", "problem"}]}`. Exit code 1 if a place
with stored objects could not be looked through.
"""

from __future__ import annotations

import re
from typing import Any

import click

from datacache import api
from datacache.core.counters import count, format_seconds
from datacache.settings import format_bytes
from dataset_cli.app import App, command
from dataset_cli.output import printable

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Duration(click.ParamType[float]):
    """`90s`, `30m`, `24h`, `7d`; a bare number is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        """Return seconds."""
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(value).lower())
        if match is None or match[2] not in _SECONDS:
            self.fail(f"{value!r} is no duration; write 90s, 30m, 24h or 7d", param, context)
        return float(match[1]) * _SECONDS[match[2]]


@command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option(
    "--grace",
    type=Duration(),
    default="24h",
    show_default=True,
    help="Keep what was needed, or stored, a shorter time ago.",
)
def gc(app: App, *, dry_run: bool, grace: float) -> int:
    """Remove what no snapshot needs any more.

    That is parts of manifests, labels and annotations in the catalog, and the objects that datacache has stored itself
    (copies, images that conversions made). What lies in your buckets is never touched. Snapshots may be created
    at the same time: what was stored for one that is not finished stays. So does a removed snapshot that is mounted
    somewhere, until it is unmounted, or its node was not heard of for a week.
    """
    with app.out.progress("looking through the catalog") as bar:
        report = api.collect_garbage(grace_s=grace, dry_run=dry_run, settings=app.settings, progress=bar.update)
    value = _as_json(report)
    app.out.result(value)
    for problem in report.problems:
        app.out.warning(problem)
    done = "would remove" if report.dry_run else "removed"
    app.out.line(f"catalog: {done} {count(value['blobs'], 'blob')}, {format_bytes(value['blob_bytes'])}")
    for storage in report.storages:
        if not storage.problem:
            removed = f"{count(storage.objects, 'object')}, {format_bytes(storage.size_bytes)}"
            app.out.line(f"{printable(storage.url)}: {done} {removed}; {storage.kept:,} in use")
    if young := value["young_blobs"] + value["young_objects"]:
        since = format_seconds(report.grace_s)
        app.out.line(f"{young:,} more stay for now: needed or stored less than {since} ago, or mounted")
    if report.mounted:
        app.out.line(f"removed, and mounted still: {', '.join(map(printable, report.mounted))}")
    return 1 if report.problems else 0


def _as_json(report: api.GarbageReport) -> dict[str, Any]:
    catalog, storages = report.catalog, report.storages
    return {
        "dry_run": report.dry_run,
        "grace_s": report.grace_s,
        "blobs": catalog.blobs,
        "blob_bytes": catalog.size_bytes,
        "objects": sum(storage.objects for storage in storages),
        "object_bytes": sum(storage.size_bytes for storage in storages),
        "young_blobs": catalog.young,
        "young_objects": sum(storage.young for storage in storages),
        "derived": catalog.derived,
        "documents": catalog.documents,
        "mounted": list(report.mounted),
        "storages": [
            {
                "url": storage.url,
                "objects": storage.objects,
                "bytes": storage.size_bytes,
                "young": storage.young,
                "kept": storage.kept,
                "problem": storage.problem,
            }
            for storage in storages
        ],
    }
