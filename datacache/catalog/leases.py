"""Leases keep garbage collection off snapshots that no data set lists: mounted ones, those being made, and those that
were removed a short while ago.

They are documents of the catalog, with times by the clock that all its users share (`Catalog.now_s`), never a node's:

    mount-lease   holder → until when, on which host, and which snapshots are mounted where
    creation      token → since when objects are being stored for a snapshot that is not committed yet
    removed       snapshot id → when it was removed: the grace period counts from then
    holding       node → until when what it says of its cache counts (`holdings`)
    quota-use     node → until when what it says of its namespaces counts (`quotas`)
    sweep         `objects` → how often a collection has begun, or ended, to delete stored objects

A lease ends by itself, so a node that died keeps nothing for ever; not even where the clock was set back, and the end
of its lease is years ahead. Any thread and process may call.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.core.concurrency import PerProcess
from datacache.manifest.model import BlobId

MOUNTS = "mount-lease"
CREATIONS = "creation"
REMOVED = "removed"
HOLDINGS = "holding"
QUOTA_USES = "quota-use"
SWEEPS = "sweep"

MOUNT_LEASE_S = 7 * 86_400.0
"""From the last renewal: a laptop may sleep, and a node be cut off from the catalog, for so long."""
RENEW_EVERY_S = 3600.0
CREATION_S = 3 * 86_400.0
"""A creation that takes longer looks for its objects before it commits."""
REPORT_LEASE_S = 900.0
"""Of `holding` and `quota-use`, from the last writing: a node that says nothing for so long is gone."""
REUSE_S = 3600.0
"""A creation may rely on objects stored this long before it began, without storing them again."""

_NO_DOCUMENT = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_LATEST_S = 1e11
"""In the year 5138. Later times, and those before 1970, do not count as times."""
_SLACK_S = 300.0
"""A time that is later than one written now by more than this was written before the clock was set back."""
_VERSION = 1
_OBJECTS = "objects"
_IS_ID = re.compile(r"[0-9a-f]{32}")


class MountLease(NamedTuple):
    """The snapshots that one home on one node has mounted."""

    holder: str
    host: str
    until_s: float
    snapshots: Mapping[str, Sequence[str]]
    """Snapshot id → the mount points, each as `HOST:DIR`."""


def lasts(until_s: float, now_s: float, lease_s: float) -> bool:
    """Tell whether a lease counts, which was given for `lease_s` and is renewed soon where its holder lives: whether
    its end is yet to come, and no later than the clock can have it."""
    return now_s < until_s <= now_s + lease_s + _SLACK_S


def write_mounts(catalog: Catalog, holder: str, host: str, mounts: Iterable[tuple[str, str]]) -> None:
    """Take, renew or end the lease of `holder`, so that it covers exactly these mounts (snapshot id, mount point)."""
    wanted: dict[str, list[str]] = {}
    for id, where in mounts:
        wanted.setdefault(id, []).append(f"{host}:{where}")
    if not wanted:
        catalog.remove_document(MOUNTS, holder)
        return
    until_s = catalog.now_s() + MOUNT_LEASE_S
    text = json.dumps({"version": _VERSION, "host": host, "until_s": until_s, "snapshots": wanted})
    while True:
        old = _stored(catalog, MOUNTS, holder)
        if old == text or catalog.set_document(MOUNTS, holder, text, old=old):
            return


def mount_leases(catalog: Catalog) -> list[MountLease]:
    """Return the leases that have not ended."""
    now_s = catalog.now_s()
    found = [_mount_lease(key, text) for key, text in _all(catalog, MOUNTS)]
    return [lease for lease in found if lease is not None and lease.until_s > now_s]


def mounted_at(catalog: Catalog, id: str) -> list[str]:
    """Return where a snapshot is mounted, as `HOST:DIR`, as far as the catalog knows."""
    return sorted(where for lease in mount_leases(catalog) for where in lease.snapshots.get(id, ()))


def removed_text(now_s: float) -> str:
    """Return the document that says when a snapshot was removed."""
    return json.dumps({"version": _VERSION, "at_s": int(now_s)})


def held_roots(
    mounts: Iterable[str], removed: Iterable[tuple[str, str]], *, now_s: float, cutoff_s: float
) -> frozenset[BlobId]:
    """Return the unlisted snapshots that stay, from the texts of leases and of removals: mounted ones, and those
    removed after `cutoff_s`."""
    ids = _held(mounts, removed, now_s=now_s, cutoff_s=cutoff_s)
    return frozenset(BlobId(bytes.fromhex(id)) for id in ids)


def held_now(catalog: Catalog, *, now_s: float, cutoff_s: float) -> set[str]:
    """Return the ids of the unlisted snapshots that stay."""
    mounts = [text for _key, text in _all(catalog, MOUNTS)]
    return _held(mounts, _all(catalog, REMOVED), now_s=now_s, cutoff_s=cutoff_s)


def _held(mounts: Iterable[str], removed: Iterable[tuple[str, str]], *, now_s: float, cutoff_s: float) -> set[str]:
    leases = (_mount_lease("", text) for text in mounts)
    ids = {id for lease in leases if lease is not None and lease.until_s > now_s for id in lease.snapshots}
    ids |= {id for id, text in removed if _number(text, "at_s") > cutoff_s}
    return set(filter(_IS_ID.fullmatch, ids))


def forget_ended(catalog: Catalog, *, now_s: float, cutoff_s: float) -> None:
    """Remove documents without effect: ended leases, and removals at `cutoff_s` or before. Where one that keeps
    something has an impossibly late time, it gets the latest that it can have."""
    for kind, field, end_s, latest_s in (
        (MOUNTS, "until_s", now_s, now_s + MOUNT_LEASE_S),
        (CREATIONS, "until_s", now_s, now_s + CREATION_S),
        (REMOVED, "at_s", cutoff_s, now_s),
    ):
        for key, text in _all(catalog, kind):  # one that is renewed meanwhile has another text
            if (at_s := _number(text, field)) <= end_s:
                catalog.remove_document(kind, key, old=text)
            elif at_s > latest_s + _SLACK_S:
                catalog.set_document(kind, key, json.dumps(json.loads(text) | {field: latest_s}), old=text)
    for kind in (HOLDINGS, QUOTA_USES):
        for key, text in _all(catalog, kind):
            if not lasts(_number(text, "until_s"), now_s, REPORT_LEASE_S):
                catalog.remove_document(kind, key, old=text)


def oldest_creation_age_s(catalog: Catalog, now_s: float) -> float:
    """Return how long ago the oldest creation under way may have stored, or relied on, an object; 0 without any."""
    begun = [_number(text, "since_s") for _key, text in _all(catalog, CREATIONS) if _number(text, "until_s") > now_s]
    ages = (now_s - since_s if since_s <= now_s + _SLACK_S else CREATION_S for since_s in begun)
    return max((age_s + REUSE_S for age_s in ages), default=0.0)


def all_documents(listed: Callable[..., list[tuple[str, str]]], kind: str) -> Iterator[tuple[str, str]]:
    """Yield all keys and texts of a kind, read page by page with `listed(kind, after=…)`."""
    after = ""
    while page := listed(kind, after=after):
        yield from page
        after = page[-1][0]


def note_sweep(catalog: Catalog) -> None:
    """Note that a collection begins or ends to delete stored objects, so that creations under way look for theirs."""
    while True:
        old = _stored(catalog, SWEEPS, _OBJECTS)
        if catalog.set_document(SWEEPS, _OBJECTS, str(int(old or 0) + 1), old=old):
            return


class Creation:
    """The lease of a creation that stores objects: none of them goes before it has committed or was given up.

    Safe from several threads, after `fork()` and pickled: copies are the same creation, and only the process that made
    it ends it.
    """

    def __init__(self, catalog: Catalog, key: str = "", *, resumes: bool = False) -> None:
        """With `resumes` it reaches back to the beginning of the oldest creation whose lease holds, be that under way
        or killed: what that one has stored is spared as well."""
        self._catalog, self._resumes = catalog, resumes
        self.resumed_s = 0.0
        """How far it reaches back behind its own beginning."""
        self._owner = 0 if key else os.getpid()
        self.key = key or secrets.token_hex(16)
        self._sweeps: str | None = None
        self._begun = False
        self._beginning = PerProcess(threading.Lock)

    def begin(self) -> None:
        """Take the lease, unless it was taken. Call this before storing anything."""
        with self._beginning.get():
            if self._begun:
                return
            self._sweeps = _stored(self._catalog, SWEEPS, _OBJECTS)
            now_s = self._catalog.now_s()
            if self._resumes:
                self.resumed_s = min(max(0.0, oldest_creation_age_s(self._catalog, now_s) - REUSE_S), CREATION_S)
            values = {"version": _VERSION, "since_s": now_s - self.resumed_s, "until_s": now_s + CREATION_S}
            self._catalog.set_document(CREATIONS, self.key, json.dumps(values), old=None)
            self._begun = True

    def is_undisturbed(self) -> bool:
        """Tell whether all that was stored since `begin` must still be there: the lease holds, and no collection has
        deleted objects meanwhile."""
        if not self._begun:
            return True
        now_s = self._catalog.now_s()
        until_s = _number(_stored(self._catalog, CREATIONS, self.key) or "", "until_s")
        return until_s > now_s and _stored(self._catalog, SWEEPS, _OBJECTS) == self._sweeps

    def end(self) -> None:
        if self._begun and self._owner == os.getpid():
            self._begun = False
            self._catalog.remove_document(CREATIONS, self.key)


def _stored(catalog: Catalog, kind: str, key: str) -> str | None:
    return dict(_all(catalog, kind)).get(key)


def _all(catalog: Catalog, kind: str) -> Iterator[tuple[str, str]]:
    # From the catalog itself: `Catalog.document` may answer from the memory of a node.
    return all_documents(catalog.documents, kind)


def _mount_lease(holder: str, text: str) -> MountLease | None:
    try:
        found = json.loads(text)
        snapshots = {str(id): tuple(map(str, places)) for id, places in found["snapshots"].items()}
        return MountLease(holder, str(found["host"]), _number(text, "until_s"), snapshots)
    except (*_NO_DOCUMENT, AttributeError):
        return None


def _number(text: str, name: str) -> float:
    """Return a time of a document, or 0 where it names no possible one: a document of others ends no collection."""
    try:
        number = float(json.loads(text)[name])
    except _NO_DOCUMENT:
        return 0.0
    return number if 0 <= number < _LATEST_S else 0.0
