"""How mounts, and what they have left behind, are shown by `dsctl status`, `mount`, `flush` and the page."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import fuse_mount
from datacache.core.counters import count, format_seconds
from datacache.core.errors import DatacacheError
from datacache.settings import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from datacache.settings import Settings

_SHOWN = 10
"""Failures and conflicts for people; `--json` has up to a hundred."""
FORGET_LOST = "Write it again, if you still have it; then: dsctl flush --forget-lost {where}"


def state_of_mounts(settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """Return the mounts of a home, and what earlier ones have left behind, as `dsctl status --json` prints them."""
    return {
        "mounts": [
            mount_as_json(info) | {"lost": fuse_mount.is_lost(info, settings)}
            for info in fuse_mount.list_mounts(settings)
        ],
        "read_write": [read_write_state(info) for info in fuse_mount.list_bucket_mounts(settings, ending=True)],
        "staged": left_state(settings),
    }


def lines_of_mounts(state: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """Yield each of `state_of_mounts` for people: a line that names it, and those that tell of it."""
    for mount in state["mounts"]:
        yield [*_mount_lines(mount)]
    for mount in state["read_write"]:
        yield [*read_write_lines(mount)]
    for area in state["staged"]:
        yield [*left_lines(area)]


def _mount_lines(mount: dict[str, Any]) -> Iterator[str]:
    yield f"mount    {mount['mountpoint']}  {mount['ref']}  {mount['files']:,} files"
    if mount["lost"]:
        again = f"dsctl mount {mount['ref']} {shlex.quote(mount['mountpoint'])}"
        yield f"         error: its processes have died, nobody serves it → Mount it again: {again}"
    yield from error_lines(mount["errors"])


def mount_as_json(info: fuse_mount.MountInfo) -> dict[str, Any]:
    """Return the JSON shape of a mount."""
    return {
        "mountpoint": str(info.mountpoint),
        "ref": info.ref,
        "files": info.files,
        "bytes": info.total_bytes,
        "pid": info.pid,
        "workers": list(info.workers),
        "log": str(info.log),
        "errors": [failure.to_dict() for failure in info.failures],
    }


def rw_as_json(info: fuse_mount.BucketInfo) -> dict[str, Any]:
    """Return the JSON shape of a read-write mount."""
    return {
        "mountpoint": str(info.mountpoint),
        "url": info.url,
        "ack": info.ack,
        "staging": info.staging,
        "pid": info.pid,
        "supervisor": info.supervisor,
        "restarts": info.restarts,
        "notes": list(info.notes),
        "log": str(info.log),
    }


def read_write_state(info: fuse_mount.BucketInfo) -> dict[str, Any]:
    """Return a mount with the state of its live bucket; `error` says why there is none."""
    more = {
        "mounted": fuse_mount.is_mounted(info),
        "supervised": fuse_mount.is_supervised(info),
        "live": None,
        "error": None,
        "hint": "",
    }
    state: dict[str, Any] = rw_as_json(info) | more
    try:
        state["live"] = fuse_mount.bucket_status(info)
    except DatacacheError as exc:
        state |= {"error": exc.message, "hint": exc.hint}
    return state


def left_state(settings: Settings) -> list[dict[str, Any]]:
    """Return staging areas without a mount, with what is left in them (null: not counted since the last owner died)."""
    try:
        found = fuse_mount.left_areas(settings)
    except DatacacheError as exc:
        unknown: dict[str, Any] = {"files": None, "bytes": None, "problem": exc.message, "losses": []}
        return [{"folder": str(settings.staging_root), "url": ""} | unknown]
    return [area._asdict() | {"folder": str(area.folder), "losses": list(area.losses)} for area in found]


def read_write_lines(state: dict[str, Any]) -> Iterator[str]:
    """Yield a mount for people."""
    live = state["live"]
    yield f"rw mount {state['mountpoint']}  {state['url']}  (close waits until: {state['ack']})"
    if state["restarts"]:
        times = "once" if state["restarts"] == 1 else f"{state['restarts']} times"
        yield f"         its server died and was started again, {times} so far; see {state['log']}"
    if live is None:
        yield f"         {state['error']}"
        yield f"         → {state['hint']}"
        return
    if not state["mounted"]:
        yield "         it is unmounted; its server goes on for who has files open, and uploads"
    elif not state["supervised"]:
        yield "         its supervisor was killed: if its server dies, mount it again"
    if live["dirty_files"]:
        age = format_seconds(live["oldest_dirty_s"] or 0)
        rate = f"{format_bytes(live['upload_bytes_per_s'])}/s"
        amount = fuse_mount.counted(live["dirty_files"], live["dirty_bytes"])
        yield f"         {amount} to upload, the oldest for {age}; {rate}"
    else:
        yield "         everything is uploaded"
    if live["store_problem"]:
        yield f"         the store has not answered for {format_seconds(live['store_away_s'])}: {live['store_problem']}"
    if live["halted"]:
        yield f"         uploading has stopped: {live['halted']}"
    yield from replica_lines(live)
    staging = live["staging"]
    limit = f" of {format_bytes(staging['limit_bytes'])}" if staging["limit_bytes"] else ""
    used = f"{format_bytes(staging['used_bytes'])}{limit}, {staging['pressure']:.0%} full"
    yield f"         staged in {staging['folder']}: {used}"
    quota = live["quota"]
    if quota is not None:
        used = f"{format_bytes(quota['used_bytes'])} of {format_bytes(quota['quota_bytes'])}"
        yield f"         quota: {used} in use" + ("" if quota["is_known"] else " (still counting)")
    if live["hidden_names"]:
        hidden = f"{live['hidden_names']:,} keys of the bucket"
        yield f"         {hidden} cannot be files, and are not shown, such as {live['hidden'][0]}"
    losses = live.get("losses", [])  # a server of before does not say
    yield from _listed(losses, len(losses), _loss)
    if losses:
        yield f"         → {FORGET_LOST.format(where=state['mountpoint'])}"
    yield from _listed(live["failures"], live["failed_files"], _failure)
    yield from (f"         {line}" for line in conflict_lines(live["conflicts"]))
    yield from error_lines(live["errors"])


def replica_lines(live: dict[str, Any]) -> Iterator[str]:
    """Yield on which second node of the cluster is what is acknowledged, for people."""
    replica = live.get("replica")  # a server of before does not say
    if replica is None:
        return
    if replica["node"]:
        yield f"         what is acknowledged is on the node {replica['node']} as well"
    if replica["problem"]:
        yield f"         no second node has all that is written: {replica['problem']}"


def conflict_lines(conflicts: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the conflicts that nobody has seen to, for people."""
    for conflict in conflicts[-_SHOWN:]:
        kept = f"; ours is {conflict['kept_as']}" if conflict["kept_as"] else ""
        yield f"conflict {conflict['key']}: {conflict['reason']}{kept}"
    if len(conflicts) > _SHOWN:
        yield f"… and {len(conflicts) - _SHOWN:,} more (--json has up to a hundred)"
    if any(conflict["kept_as"] for conflict in conflicts):
        yield "→ Keep what you want under the name, and delete or rename the other."


def error_lines(errors: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the last errors that a mount gave to readers and writers: of those with one way out, the newest."""
    alike = Counter((error["errno"], error["hint"] or error["reason"]) for error in errors[:_SHOWN])
    for error in errors[:_SHOWN]:
        others = alike.pop((error["errno"], error["hint"] or error["reason"]), 0) - 1
        if others < 0:
            continue
        often = "once" if error["count"] == 1 else f"{error['count']} times"
        ago = format_seconds(max(time.time() - error["at"], 0))
        yield f"         error    {error['path']}: {error['reason']} ({error['errno']}, {often}, {ago} ago)"
        if others:
            yield f"         and {count(others, 'other file')} with such an error"
        if error["hint"]:
            yield f"         → {error['hint']}"


def left_lines(area: dict[str, Any]) -> Iterator[str]:
    """Yield a staging area without a mount, for people."""
    yield f"staged   {area['folder']}  {area['url']}"
    if area["problem"]:
        yield f"         {area['problem']}"
        return
    yield from _listed(area["losses"], len(area["losses"]), _loss)
    if area["files"] == 0:
        yield "         → When you have seen to it: dsctl flush --forget-lost"
        return
    amount = "some files" if area["files"] is None else fuse_mount.counted(area["files"], area["bytes"] or 0)
    doubt = "may wait" if area["files"] is None else "wait"
    yield f"         {amount} {doubt} here, and no mount uploads them: dsctl flush"


def _loss(loss: dict[str, Any]) -> Iterator[str]:
    yield from (f"lost     {line}" for line in fuse_mount.lost_lines([loss]))


def _failure(failure: dict[str, Any]) -> Iterator[str]:
    tries = "once" if failure["tries"] == 1 else f"{failure['tries']} times"
    left_s = failure["retry_at"] - time.time()
    again = f"in {format_seconds(left_s)}" if left_s > 0 else "when it is its turn"
    yield f"failed   {failure['key']}: {failure['reason']} (tried {tries}, again {again})"
    if failure["hint"]:
        yield f"         → {failure['hint']}"


def _listed(found: list[dict[str, Any]], count: int, lines: Callable[[dict[str, Any]], Iterator[str]]) -> Iterator[str]:
    for one in found[:_SHOWN]:
        yield from (f"         {line}" for line in lines(one))
    if count > _SHOWN:
        yield f"         … and {count - min(len(found), _SHOWN):,} more (--json has up to a hundred)"
