"""Find what a volume asks for: the snapshot behind a reference, the folder behind a subpath; and who may know.

Used by the controller, once for each volume, and by `preparation`. What does not exist is an `INVALID_ARGUMENT` that
says what does, for the people who read it in an Event. Which buckets may be had with the driver's own credentials is
said by `BucketRules`. Any thread.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from itertools import islice

from csi_driver.status import RequestError, denied, invalid
from csi_driver.volumes import PLACE, VolumeSpec
from datacache.catalog.access import access_of, check_access, open_to
from datacache.catalog.base import Catalog
from datacache.catalog.refs import Ref, resolve
from datacache.core import errors
from datacache.manifest.model import PACKS, SnapshotRecord
from datacache.manifest.reader import Manifest
from datacache.manifest.view import Tree
from datacache.settings import Settings
from datacache.store.sources import source_rules
from datacache.store.urls import split_url

_REMOTE = ("s3", "gs", "az", "abfs", "abfss")
_NAMED = 8
"""How many of what there is are named."""


def check_open(catalog: Catalog, dataset: str, namespace: str, *, default: str, unknown: str) -> None:
    """Raise `AccessDeniedError`, with the hint `unknown`, unless a data set is open to the namespace ('': not known,
    then to everybody)."""
    if namespace:
        check_access(catalog, dataset, namespace, default=default)
    elif not access_of(catalog, dataset, default=default).without_exception:
        raise errors.AccessDeniedError(
            f"data set {dataset} is not open to everybody, and which namespace asks for it is not known", hint=unknown
        )


def find_snapshot(catalog: Catalog, ref: Ref, namespace: str, *, default: str) -> SnapshotRecord:
    """Return the snapshot of this data set that a reference names now. `namespace` decides what the error about a
    missing one may tell; see `check_open`."""
    try:
        return resolve(catalog, ref)
    except errors.SnapshotNotFoundError as exc:
        if not namespace and not access_of(catalog, ref.dataset, default=default).without_exception:
            raise invalid(f"there is no snapshot {ref}") from exc  # what there is, is not for everybody
        known = open_to(catalog, namespace, default=default) if namespace else []
        raise _what_there_is(catalog, ref, exc, known) from exc


def check_sources(catalog: Catalog, id: str, ref: Ref, settings: Settings) -> None:
    """Raise PERMISSION_DENIED for a snapshot in a store that nodes do not read: pods would only see that its files
    cannot be read. Each read asks again by itself."""
    rules = source_rules(settings)
    if rules is None:
        return
    for source in Manifest.open(id, catalog.get_blobs).root.sources:
        if source != PACKS and not rules.allow_some(source.store, copies=source.content_addressed):
            try:
                rules.refuse(source.store)
            except errors.SourceNotAllowedError as exc:
                words = f"{ref}: {exc.message}. {exc.hint}"
                raise denied(words) from exc


def check_subpath(catalog: Catalog, record: SnapshotRecord, spec: VolumeSpec) -> None:
    """Raise unless a snapshot has the folder `spec.subpath`."""
    if not spec.subpath:
        return
    tree = Tree(Manifest.open(record.id, catalog.get_blobs))
    prefix = b""
    for part in os.fsencode(spec.subpath).split(b"/"):
        child = tree.child(prefix, part)
        path = os.fsdecode(prefix + part)
        if child is None:
            folders = (os.fsdecode(other.name) for other in tree.children(prefix) if other.is_dir)
            there = f"{os.fsdecode(prefix)[:-1] if prefix else 'it'} has {_some(folders)}"
            raise invalid(f"subpath {spec.subpath!r}: {spec.dataset} has no folder {path}; {there}")
        if not child.is_dir:
            raise invalid(f"subpath {spec.subpath!r}: {path} in {spec.dataset} is a file, not a folder")
        prefix += part + b"/"


def _what_there_is(catalog: Catalog, ref: Ref, error: errors.SnapshotNotFoundError, known: list[str]) -> RequestError:
    dataset = catalog.dataset(ref.dataset)
    if dataset is None:
        near = difflib.get_close_matches(ref.dataset, known, n=1, cutoff=0.7)
        there = (
            f"did you mean {near[0]}?" if near else f"there are {_some(known)}" if known else "see: dsctl dataset list"
        )
        return invalid(f"there is no data set {ref.dataset}; {there}")
    if error.ambiguous:
        return invalid(f"{error.message}. {error.hint}")
    tags = _some(_by_age(catalog, ref.dataset, dataset.tags))
    kind = "snapshot" if ref.is_whole_id else "tag"
    return invalid(f"{ref.dataset} has no {kind} {ref.version}; it has {tags}")


def _by_age(catalog: Catalog, dataset: str, tags: dict[str, str]) -> list[str]:
    """Return tags by name, those of the newest snapshots if there are many."""
    if len(tags) <= _NAMED:
        return sorted(tags)
    age = {record.id: number for number, record in enumerate(catalog.snapshots(dataset))}
    newest = sorted(tags, key=lambda tag: (age.get(tags[tag], -1), tag))[-_NAMED:]
    return [*sorted(newest), "…"]


def _some(names: Iterable[str]) -> str:
    given = list(islice(names, _NAMED + 1))
    return ", ".join([*given[:_NAMED], *(["…"] if len(given) > _NAMED else [])]) or "none"


def check_pin(settings: Settings, namespace: str) -> None:
    """Raise PERMISSION_DENIED unless claims and pods of a namespace ('': not known) may pin. A pinned volume takes its
    room from the cache of all others on the node, for as long as a pod has it."""
    if "*" not in settings.pins and namespace not in settings.pins:
        raise denied(
            f"pin: {f'namespace {namespace}' if namespace else 'who is not known'} may not pin data on nodes. Leave it "
            "out, use a StorageClass with pin: true, or have it allowed (DATACACHE_PINS)"
        )


class BucketRules:
    """The buckets that anybody who makes a PVC or a pod may have with the driver's own credentials."""

    def __init__(self, prefixes: Iterable[str] = ()) -> None:
        """Take URL prefixes, in which `${pvc.namespace}` stands for the namespace. `*` is every bucket of an object
        store; a node's folder (`file://`), or anything else a URL can lead to, must be named. `SettingsError`."""
        self._prefixes = tuple(prefixes)
        for prefix in self._prefixes:
            self._place(prefix, "any")

    def allow(self, url: str, namespace: str) -> bool:
        """Tell whether this namespace may have this bucket: a prefix names it, or a place above it."""
        store, prefix = split_url(url)
        places = [self._place(text, namespace) for text in self._prefixes if namespace or "${" not in text]
        anywhere = "*" in places and store.partition("://")[0] in _REMOTE
        if {".", ".."} & set(prefix.split("/")):  # a key for us, and a way out for a server or a proxy
            return anywhere
        return anywhere or any(f"{store}/{prefix}".startswith(place) for place in places)

    def describe(self, namespace: str) -> str:
        """Return the open buckets, for an error's text."""
        places = [self._place(text, namespace or "NAMESPACE") for text in self._prefixes]
        return f"open to this namespace: {', '.join(places)}" if places else "none is open"

    @staticmethod
    def _place(prefix: str, namespace: str) -> str:
        if prefix == "*":
            return prefix
        unknown = set(PLACE.findall(prefix)) - {"pvc.namespace"}
        if unknown:
            raise errors.SettingsError(
                f"allowed bucket {prefix!r}: there is no ${{{sorted(unknown)[0]}}}", hint="There is ${pvc.namespace}."
            )
        try:
            store, rest = split_url(prefix.replace("${pvc.namespace}", namespace))
        except errors.DatacacheError as exc:
            raise errors.SettingsError(f"allowed bucket {prefix!r}: {exc.message}", hint=exc.hint) from exc
        return f"{store}/{rest}"
