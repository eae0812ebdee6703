"""Staging areas that no mount holds: what is left in them, and bringing it to the bucket.

Used by a mount's server, which notes what it leaves behind, and by `dsctl flush` and `dsctl status`. No state; any
thread may call.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from datacache.core.disk import replace_file
from datacache.core.errors import StagingBusyError, UploadError
from datacache.settings import Settings, format_bytes

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
    endpoint: str | None = None
    """Of the server that the URL's bucket is on; '' where the URL alone says it, None where it is not known."""
    losses: tuple[dict[str, Any], ...] = ()
    """Losses of what was written, as in a mount's status."""


def counted(files: int, size_bytes: int) -> str:
    """Write a number of files and their amount as `3 files, 1.2 MB`."""
    return f"{files:,} file{'' if files == 1 else 's'}, {format_bytes(size_bytes)}"


def left_of(status: dict[str, Any]) -> dict[str, Any]:
    """Return what a live bucket has not uploaded, in short."""
    return {
        "files": status["dirty_files"],
        "bytes": status["dirty_bytes"],
        "url": status["url"],
        "staging": status["staging"]["folder"],
    }


def lost_lines(losses: Iterable[dict[str, Any]]) -> list[str]:
    """Return what was lost of what was written, in words."""
    lines = []
    for loss in losses:
        amount = f"up to {loss['size_bytes']:,} bytes" if loss["size_bytes"] != 1 else "1 byte"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(loss["at"]))
        lines.append(f"{amount} written to {loss['key']} were lost at {when}: {loss['reason']}")
    return lines


def note_left(folder: Path, left: dict[str, Any]) -> None:
    """Write down what an area's owner leaves behind, while it still owns it."""
    with contextlib.suppress(OSError):  # it is for people only
        note = json.dumps({"files": left["files"], "bytes": left["bytes"]})
        replace_file(folder / _LEFT, note.encode(), durable=False)


def left_areas(settings: Settings) -> list[LeftArea]:
    """Find the areas under the staging folder that nobody works on and that may have something left."""
    from datacache.writeback.staging.area import areas
    from datacache.writeback.staging.losses import LOSSES, LossLog

    found = []
    for area in areas(settings.staging_root):
        if area.locked:
            continue
        files, size_bytes = (None, None) if area.owner is not None else _read_left(area.folder)
        losses = tuple(loss._asdict() for loss in LossLog(area.folder / LOSSES).all())
        if files != 0 or area.problem or losses:
            left = LeftArea(area.folder, area.bucket_url, files, size_bytes, area.problem, area.endpoint, losses)
            found.append(left)
    return found


def flush_area(
    area: LeftArea,
    settings: Settings,
    *,
    timeout_s: float | None,
    progress: Callable[[dict[str, Any]], None],
    forget_lost: bool = False,
) -> dict[str, Any] | None:
    """Upload what is in an area; the bucket's last status. None if somebody else has taken it meanwhile. `UploadError`
    if something could not be uploaded. With `forget_lost` its `losses` are what was forgotten."""
    from datacache import api

    settings = _at_its_endpoint(area, settings)
    try:
        live = api.open_bucket(
            area.url, settings, who="dsctl flush", ack="staged", ttl_s=5.0, upload_every_s=30.0, keep_quota=True
        )
    except StagingBusyError:
        return None
    try:
        live.flush(timeout_s=timeout_s, progress=progress)
        done: dict[str, Any] = live.status()
        if forget_lost:
            done["losses"] = [loss._asdict() for loss in live.engine.losses.forget()]
        return done
    finally:
        note_left(area.folder, left_of(live.status()))
        live.close()


def _at_its_endpoint(area: LeftArea, settings: Settings) -> Settings:
    """Return settings with which the area's URL means the bucket that it was written for."""
    from datacache.settings import StoreOptions
    from datacache.store.open import endpoint_of
    from datacache.store.s3.access import store_options
    from datacache.store.urls import split_url

    store_url, _ = split_url(area.url)
    now = endpoint_of(store_url, settings)
    if area.endpoint in (None, now):
        return settings
    if not area.endpoint:
        raise UploadError(
            f"what is left in {area.folder} is for {area.url} at Amazon, and now that means {now}",
            hint="Unset AWS_ENDPOINT_URL and try again.",
        )
    options = store_options(store_url, settings) or StoreOptions(name="", url=store_url)
    others = [each for each in settings.stores if each is not options]
    return replace(settings, stores=(*others, replace(options, url=store_url, endpoint_url=area.endpoint)))


def _read_left(folder: Path) -> tuple[int | None, int | None]:
    try:
        table = json.loads((folder / _LEFT).read_text(encoding="utf-8"))
        return int(table["files"]), int(table["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
