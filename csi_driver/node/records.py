"""This node's records of its volumes: one small file each, written before anything is mounted for it.

    <home>/csi/volumes/<hash>.json   a volume: what it is, where it is staged and published
    <home>/csi/locks/<hash>.lock     held by whoever works on the volume, or on the mount that it shares
    <home>/csi/mounts/<key>/         where the shared mounts are (`mounts`)

Files are the only truth: two drivers may work here at a time (an upgrade), and either can be killed at any moment.
Secrets are in none of them. Any thread may call; who changes a volume's record holds its lock.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from csi_driver.node import binds
from csi_driver.status import RequestError, aborted, unavailable
from csi_driver.volumes import VolumeSpec, parse_context
from datacache.core import lockfile
from datacache.core.disk import replace_file

_ASK_AGAIN_S = 0.02
_log = logging.getLogger("csi_driver")


@dataclass(frozen=True, kw_only=True)
class SharedMount:
    """One mount that volumes share: a snapshot, or a bucket prefix with these options."""

    source: str
    """`dataset@id`, or the bucket's URL."""
    bucket: bool
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `mount_bucket`."""

    @property
    def key(self) -> str:
        """Return the mount's name on this node."""
        return _hash(json.dumps([self.source, sorted(self.options.items())]))

    def options_unlike(self, other: SharedMount) -> str:
        """Return the options in which another mount differs, as `NAME=VALUE, …` of this one."""
        mine, theirs = self.options, other.options
        return ", ".join(f"{name}={mine[name]}" for name in theirs if mine[name] != theirs[name])


@dataclass(frozen=True, kw_only=True)
class PublishedTarget:
    """One place where a volume is published."""

    path: str
    read_only: bool
    noexec: bool = False
    mended: str = ""
    """A problem since it was published; '' for none."""
    told: bool = False
    """True if an Event on the pod says so."""
    pod: dict[str, str] = field(default_factory=dict)
    """The pod's namespace, name and uid. Empty where nobody said."""


@dataclass(frozen=True, kw_only=True)
class NodeVolume:
    """A volume on this node."""

    volume_id: str
    context: dict[str, str]
    """Of the resolved volume."""
    mount: SharedMount
    mode: int
    """The access mode it was staged with."""
    read_only: bool = False
    noexec: bool = False
    inline: bool = False
    staging: str = ""
    """Where it is staged; '' for nowhere."""
    targets: tuple[PublishedTarget, ...] = ()
    credentials: bool = False
    """True if it brought store credentials along."""
    pinned: bool = False
    """True if its snapshot was pinned for it."""
    quota_bytes: int = 0
    resting: bool = False
    """True if its mount was ended while it is staged: no pod has it, and another mount was in need of the bucket."""

    @property
    def spec(self) -> VolumeSpec:
        """Return the volume's specification."""
        return parse_context(self.context)

    @property
    def namespaces(self) -> set[str]:
        """Return the namespaces that have it: the one it was provisioned for, else those of its pods."""
        owner = "" if self.inline else self.spec.namespace  # whoever writes a pod could claim anything
        return {owner} if owner else {target.pod["namespace"] for target in self.targets if target.pod}

    @property
    def used(self) -> bool:
        """Tell whether anything of it is mounted, or was about to be."""
        return bool(self.staging or self.targets)

    @property
    def shown(self) -> bool:
        """Tell whether a pod has it: something is mounted where it was published."""
        return not binds.tops().keys().isdisjoint(target.path for target in self.targets)

    def target(self, path: str) -> PublishedTarget | None:
        """Return the target at a path."""
        return next((target for target in self.targets if target.path == path), None)

    def with_target(self, target: PublishedTarget) -> NodeVolume:
        """Return a copy with a target added or replaced."""
        return replace(self.without_target(target.path), targets=(*self.without_target(target.path).targets, target))

    def without_target(self, path: str) -> NodeVolume:
        """Return a copy without a target."""
        return replace(self, targets=tuple(target for target in self.targets if target.path != path))


class Records:
    """The records of one home."""

    def __init__(self, folder: Path) -> None:
        self._volumes, self._locks = folder / "volumes", folder / "locks"
        for path in (folder, self._volumes, self._locks):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, volume_id: str) -> NodeVolume | None:
        """Return the record of a volume, or None."""
        return _read(self._path(volume_id))

    def has(self, volume_id: str) -> bool:
        """Tell whether a volume has a record, even an unreadable one."""
        return self._path(volume_id).exists()

    def all(self) -> list[NodeVolume]:
        """Return every volume. A file that cannot be read is passed over, and stays."""
        found = (_read(path) for path in sorted(self._volumes.glob("*.json")))
        return [record for record in found if record is not None]

    def of(self, mount: SharedMount) -> list[NodeVolume]:
        """Return the volumes of a shared mount."""
        return [record for record in self.all() if record.mount == mount]

    def complete(self) -> bool:
        """Tell whether every file can be read. A newer driver's may not be."""
        return all(_read(path) is not None or not path.exists() for path in self._volumes.glob("*.json"))

    def put(self, record: NodeVolume) -> NodeVolume:
        """Replace a volume's record durably, and return it."""
        replace_file(self._path(record.volume_id), json.dumps(asdict(record)).encode())
        return record

    def remove(self, volume_id: str) -> None:
        """Forget a volume."""
        self._path(volume_id).unlink(missing_ok=True)

    def lock(self, volume_id: str, *, timeout_s: float) -> AbstractContextManager[None]:
        """Hold the lock of a volume. ABORTED where somebody else holds it for longer than the time."""
        busy = aborted(f"another call on the volume {volume_id!r} is under way")
        return self._held(f"volume-{_hash(volume_id)}", busy, timeout_s)

    def lock_mount(self, key: str, *, timeout_s: float, source: str = "") -> AbstractContextManager[None]:
        """Hold the lock of a shared mount by its key, to make it or take it away. UNAVAILABLE after the time."""
        words = f"{source or f'the mount {key}'} is being mounted or unmounted on this node"
        return self._held(f"mount-{key}", unavailable(words), timeout_s)

    def lock_work(self, name: str) -> AbstractContextManager[None]:
        """Hold a lock for work on all volumes. ABORTED where another driver of the home holds it."""
        return self._held(name, aborted("another driver does it"), 0.0)

    @contextmanager
    def _held(self, name: str, busy: RequestError, timeout_s: float) -> Iterator[None]:
        path, deadline = self._locks / f"{name}.lock", time.monotonic() + timeout_s
        while (descriptor := lockfile.open_locked(path)) is None:
            if time.monotonic() >= deadline:
                raise busy
            time.sleep(_ASK_AGAIN_S)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # names of inline volumes never come again
            os.close(descriptor)

    def _path(self, volume_id: str) -> Path:
        return self._volumes / f"{_hash(volume_id)}.json"


def _read(path: Path) -> NodeVolume | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values["mount"] = SharedMount(**_known(SharedMount, values["mount"]))
        values["targets"] = tuple(PublishedTarget(**_known(PublishedTarget, target)) for target in values["targets"])
        return NodeVolume(**_known(NodeVolume, values))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        _log.warning("the record %s cannot be read: %s", path, exc)
        return None


def _known(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Leave out fields that a newer driver has added: this driver can still take its volumes away."""
    return {name: value for name, value in values.items() if name in kind.__dataclass_fields__}


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=12).hexdigest()
