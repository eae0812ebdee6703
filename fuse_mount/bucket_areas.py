"""Staging areas that no mount holds: what is left in them, and bringing it to the bucket.

Used by `bucket_server`, which notes what it leaves behind, and by `dsctl flush` and `dsctl status`. No state; any
thread may call.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from datacache.core.errors import StagingBusyError

if TYPE_CHECKING:
    from datacache.settings import Settings

_LEFT = "left.json"


class LeftArea(NamedTuple):
    """A staging area without a mount."""

    folder: Path
    url: str
    files: int | None
    """How many files are not uploaded; None where its last owner died and nobody has counted since."""
    bytes: int | None
    problem: str
    """Why it cannot be used; '' for nothing."""


def counted(files: int, size_bytes: int) -> str:
    """`3 files, 1.2 MB`."""
    size, units = float(size_bytes), ["B", "KB", "MB", "GB", "TB", "PB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    amount = f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
    return f"{files:,} file{'' if files == 1 else 's'}, {amount}"


def left_of(status: dict[str, Any]) -> dict[str, Any]:
    """What a live bucket has not uploaded, in short."""
    return {
        "files": status["dirty_files"],
        "bytes": status["dirty_bytes"],
        "url": status["url"],
        "staging": status["staging"]["folder"],
    }


def left_notes(status: dict[str, Any]) -> list[str]:
    """What a live bucket that was just opened has still to upload, in words."""
    files = status["dirty_files"]
    if not files:
        return []
    verb = "is" if files == 1 else "are"
    return [f"{counted(files, status['dirty_bytes'])} written earlier {verb} being uploaded"]


def note_left(folder: Path, left: dict[str, Any]) -> None:
    """Write down what an area's owner leaves behind, while it still owns it."""
    with contextlib.suppress(OSError):  # it is for people only
        new = folder / f"{_LEFT}.new"
        new.write_text(json.dumps({"files": left["files"], "bytes": left["bytes"]}), encoding="utf-8")
        new.replace(folder / _LEFT)


def left_areas(settings: Settings) -> list[LeftArea]:
    """The areas under the staging folder that nobody works on and that may have something left."""
    from datacache.writeback.staging import areas

    found = []
    for area in areas(settings.staging_root):
        if area.locked:
            continue
        files, size_bytes = (None, None) if area.owner is not None else _read_left(area.folder)
        if files != 0 or area.problem:
            found.append(LeftArea(area.folder, area.bucket_url, files, size_bytes, area.problem))
    return found


def flush_area(
    area: LeftArea, settings: Settings, *, timeout_s: float | None, progress: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """Upload what is in an area; the bucket's last status. None if somebody else has taken it meanwhile. `UploadError`
    if something could not be uploaded."""
    from datacache import api

    try:
        live = api.open_bucket(area.url, settings, who="dsctl flush", ack="staged", ttl_s=5.0, upload_every_s=30.0)
    except StagingBusyError:
        return None
    try:
        live.flush(timeout_s=timeout_s, progress=progress)
        done: dict[str, Any] = live.status()
        return done
    finally:
        note_left(area.folder, left_of(live.status()))
        live.close()


def _read_left(folder: Path) -> tuple[int | None, int | None]:
    try:
        table = json.loads((folder / _LEFT).read_text(encoding="utf-8"))
        return int(table["files"]), int(table["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
