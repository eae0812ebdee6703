"""The cache of this node: its daemon, what is pinned, and warm-ups.

The dictionaries are the daemon's answers, as `dsctl … --json` prints them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from datacache.cluster.members import DRAINED, DRAINING, IN_NO_CLUSTER, JOIN_A_CLUSTER, open_members
from datacache.cluster.peers import open_peers
from datacache.core.errors import (
    CacheError,
    DaemonError,
    DaemonSilentError,
    DaemonUnavailableError,
    SnapshotNotFoundError,
    UsageError,
)
from datacache.daemon.client import DaemonClient
from datacache.daemon.starting import DaemonProcess, StartFailure
from datacache.settings import Settings, load_settings

_POLL_S = 0.05
_DRAIN_POLL_S = 0.25
_DRAIN_SILENT_S = 15.0
"""A draining node that gets no further for so long is asked again."""
_RESTARTS = 5
_STILL_S = 5.0
"""How long nothing may come before a store is suspected."""
_SILENCE_S = 60.0
"""How long a daemon may be silent: a busy machine is no reason to give up a job that goes on."""


def connect(settings: Settings | None = None) -> DaemonClient:
    """Return the node's daemon, started if need be. `DaemonUnavailableError` says why it cannot be."""
    client = DaemonClient(settings or load_settings())
    client.ensure()
    return client


def running_daemon(settings: Settings | None = None) -> DaemonClient | None:
    """Return the node's daemon if one runs. `DaemonSilentError` for one that does not answer."""
    client = DaemonClient(settings or load_settings())
    if client.alive():
        return client
    silence = client.silence()
    if silence is not None:
        raise silence
    return None


def look_at_node(settings: Settings | None = None) -> dict[str, Any]:
    """Return what the node's daemon says of itself, of its cache and of its cluster: `{"daemon", "cache", "cluster",
    "error", "hint"}`, each None where there is none. `error` says why a daemon that is there does not answer. Starts
    nothing."""
    state: dict[str, Any] = dict.fromkeys(("daemon", "cache", "cluster", "error", "hint"))
    try:
        client = running_daemon(settings)
        if client is not None:
            state |= {"daemon": client.health(), "cache": client.cache_status()}
            state["cluster"] = client.cluster() if state["cache"].get("cluster") else None
    except DaemonError as exc:
        state |= {"error": exc.message, "hint": exc.hint}
    return state


def start_failure(settings: Settings | None = None) -> StartFailure | None:
    """Return why the last start of the node's daemon failed; None if it did not, or if nobody has tried."""
    return DaemonProcess(settings or load_settings()).failure()


def cache_status(settings: Settings | None = None) -> dict[str, Any]:
    """Return tiers, data sets, pins, jobs and the hit rate of this node."""
    return connect(settings).cache_status()


def cluster_status(settings: Settings | None = None) -> dict[str, Any]:
    """Return the members of this node's cluster, whether they let this one in now, and what came from them.
    `UsageError` where it is in none, `DaemonUnavailableError` if its daemon is stopped: then it is not among them."""
    return _member(settings).cluster(look=True)


def look_at_cluster(settings: Settings | None = None) -> dict[str, Any]:
    """Return what `cluster_status` does, also where the daemon is stopped: then this process looks at the other nodes,
    and joins nothing. `SettingsError` for settings with which no daemon of a cluster starts; the catalog's errors."""
    settings = settings or load_settings()
    if running_daemon(settings) is not None or (members := open_members(settings, holder="")) is None:
        return cluster_status(settings)
    with contextlib.closing(open_peers(settings, members)) as peers:
        members.read()
        peers.look()
        return peers.describe()


def _member(settings: Settings | None) -> DaemonClient:
    """Return the daemon of a node that is in its cluster now. Starts none: that would change the cluster."""
    settings = settings or load_settings()
    client = running_daemon(settings)
    if client is not None:
        return client
    if not settings.cluster:
        raise UsageError(IN_NO_CLUSTER, hint=JOIN_A_CLUSTER)
    failure = start_failure(settings)
    raise DaemonUnavailableError(
        f"no daemon runs for {settings.home}: this node is not in the cluster {settings.cluster!r} now",
        hint="Start it: dsctl daemon start"
        + (f". Its last start failed: {failure.message}. {failure.hint}".rstrip() if failure is not None else ""),
    )


def drain_node(node: str = "", settings: Settings | None = None) -> dict[str, Any]:
    """Have a node own no blocks of its cluster until its daemon ends, and hand over what it has; '' is this node. Does
    not wait: see `follow_drain`. `UsageError` where there is none of this name, or this node is in no cluster;
    `DaemonUnavailableError` if its daemon is stopped; `CacheError` if the other one cannot be told."""
    return _member(settings).drain(node)


def follow_drain(node: str, settings: Settings | None = None) -> Iterator[dict[str, Any]]:
    """Yield the member again and again while it drains; the last one has drained, or is gone (`state` is ''), or was
    started again and drains no more. `CacheError` if it gets no further and does not answer."""
    client, drains = _member(settings), False
    last, ask_at_s = None, 0.0
    while True:
        view = client.cluster()
        found = [member for member in view["members"] if member["node"] == node]
        member = found[0] if found else {"node": node, "state": "", "left": 0}
        yield member
        if member["state"] in ("", DRAINED) or (drains and member["state"] != DRAINING):
            return
        drains = drains or member["state"] == DRAINING  # the view may not say so yet
        now_s, reached = time.monotonic(), (member["state"], member["left"])
        if reached != last:
            last, ask_at_s = reached, now_s + _DRAIN_SILENT_S
        elif now_s >= ask_at_s:
            if view["problem"]:
                hint = "It drains once that is mended; dsctl cluster status shows how far it is."
                raise CacheError(f"the other nodes do not know yet that {node} drains: {view['problem']}", hint=hint)
            client.drain(node)  # a list keeps a node that was killed
            ask_at_s = now_s + _DRAIN_SILENT_S
        time.sleep(_DRAIN_POLL_S)


def pin(ref: str, settings: Settings | None = None) -> dict[str, Any]:
    """Keep what this node has of a snapshot, and what comes, from being evicted. Idempotent."""
    return connect(settings).pin(ref)


def unpin(ref: str, settings: Settings | None = None) -> dict[str, Any]:
    """Let the eviction policy decide on a snapshot again. Idempotent."""
    return connect(settings).unpin(ref)


def evict(ref: str | None = None, settings: Settings | None = None) -> dict[str, Any]:
    """Drop what this node has of a data set, or of all that is not pinned; `freed_bytes` says how much."""
    return connect(settings).evict(ref)


def jobs(settings: Settings | None = None) -> list[dict[str, Any]]:
    """Return the warm-ups of this node's daemon; none where no daemon runs."""
    client = running_daemon(settings)
    return client.jobs() if client is not None else []


def cancel_job(id: str, settings: Settings | None = None) -> dict[str, Any]:
    """End a warm-up. What it has fetched stays. `SnapshotNotFoundError` where there is no such job."""
    client = running_daemon(settings)
    if client is None:
        raise SnapshotNotFoundError("there is no such job: no daemon runs")
    return client.cancel(id)


def warm(ref: str, *, wait: bool = True, settings: Settings | None = None) -> dict[str, Any]:
    """Fetch all of a snapshot that is not on this node yet, and return the job.

    With `wait` `CacheError` unless every byte is here in the end: a part of it is not called warm.
    """
    if not wait:
        client = connect(settings)
        return client.job(client.warm(ref))
    job: dict[str, Any] = {}
    for job in follow_warm_up(ref, settings=settings):  # noqa: B007 - the last one counts
        pass
    if job["state"] != "done":
        raise CacheError(f"{job['ref']} is not warm: {job['error']}", hint=job.get("hint", ""))
    return job


def follow_warm_up(
    ref: str,
    *,
    settings: Settings | None = None,
    on_still: Callable[[float, list[dict[str, Any]]], None] = lambda _seconds, _stores: None,
    on_silence: Callable[[DaemonSilentError], None] = lambda _error: None,
) -> Iterator[dict[str, Any]]:
    """Yield the job of a warm-up again and again; the last one has ended (`state` is not `running`).

    The warm-up is asked for again if the daemon was restarted, which costs nothing. `on_still(seconds, stores)` is
    called when nothing has come for so long, with the stores that do not answer; `on_silence` when the daemon does not
    answer, which is waited for. Leaving the iteration does not end the job.
    """
    client = connect(settings)
    id = client.warm(ref)
    restarts = 0
    silent_since: float | None = None
    last_bytes, came_at = -1, time.monotonic()
    while True:
        try:
            job = client.job(id)
            silent_since = None
            yield job
            if job["state"] != "running":
                return
            if job["bytes_done"] != last_bytes:
                last_bytes, came_at = job["bytes_done"], time.monotonic()
            elif time.monotonic() - came_at > _STILL_S:
                came_at = math.inf  # told once, until something comes again
                on_still(_STILL_S, client.silent_stores())
            time.sleep(_POLL_S)
        except DaemonSilentError as exc:
            now = time.monotonic()
            if silent_since is None:
                silent_since = now
                on_silence(exc)
            if now - silent_since > _SILENCE_S:
                raise
            time.sleep(10 * _POLL_S)
        except SnapshotNotFoundError:
            restarts += 1
            if restarts > _RESTARTS:
                raise
            id = client.warm(ref)
