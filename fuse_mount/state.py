"""What a mount is made of and the files under `<home>/mounts/` that say so.

Used by `launch`, `supervisor` and `worker`. For each mount, named by a hash of its mount point: `.json` (this
state, replaced atomically), `.sock` (the supervisor's control socket, 0600), `.lock` (held while one takes
over), `.log`. The supervisor that serves a mount is the only writer of its state. No threads of its own;
reading is safe at any time.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from datacache.core import unix_sockets
from datacache.core.errors import MountError

DEFAULT_OPENER = "datacache.api:open_mounted"
SUBTYPE = "datacache"
MOUNT_TYPE = f"fuse.{SUBTYPE}"
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class MountConfig:
    """All that a supervisor needs to serve a mount, and to serve it again after a hand-over."""

    ref: str
    """As asked for at first; `dataset@id` from when the snapshot was opened, so that a moving tag changes
    nothing.
    """
    mountpoint: str
    home: str
    uid: int
    gid: int
    umask: int = 0o022
    allow_other: bool
    workers: int
    resend: bool = True
    """False: as on a kernel without FUSE_NOTIFY_RESEND."""
    clone: bool = True
    """False: as where FUSE_DEV_IOC_CLONE is refused; all workers share one queue."""
    opener: str = DEFAULT_OPENER
    """`module:function` called as `function(ref, settings=…)` in each worker."""

    def to_json(self) -> str:
        """The text `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> MountConfig:
        """The config that `to_json` wrote."""
        return MountConfig(**json.loads(text))

    def pinned(self, ref: str) -> MountConfig:
        """The same mount, of exactly this snapshot."""
        return replace(self, ref=ref)


@dataclass(frozen=True, kw_only=True)
class MountInfo:
    """One mount, as its supervisor last wrote it down."""

    mountpoint: Path
    ref: str
    """`dataset@id`."""
    dataset: str
    snapshot_id: str
    files: int
    total_bytes: int
    pid: int
    """The supervisor's."""
    workers: tuple[int, ...]
    device: int
    """st_dev of the mount."""
    log: Path
    started_at: float
    """Seconds since the epoch."""
    serving_since: float = 0.0
    """When this supervisor began to serve it, likewise: of two, the later one is the owner."""
    bypassed: bool = False
    """Workers kept dying over what lies on this node, so that is not used any more."""
    kept: bool = False
    """Whether the cache daemon holds a copy of the descriptor (`keeping`), so that the supervisor and all workers may
    be killed at once."""
    config: MountConfig = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Values that fit into JSON."""
        return asdict(self) | {"mountpoint": str(self.mountpoint), "log": str(self.log)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> MountInfo:
        """The value that `to_dict` took apart. What a newer version added is passed over."""
        known = {name: value for name, value in values.items() if name in MountInfo.__dataclass_fields__}
        config = {name: value for name, value in known["config"].items() if name in MountConfig.__dataclass_fields__}
        known |= {"mountpoint": Path(known["mountpoint"]), "log": Path(known["log"])}
        known |= {"workers": tuple(known["workers"]), "config": MountConfig(**config)}
        return MountInfo(**known)


class FilesOfMount:
    """The files of one mount under a home, whatever kind of mount it is."""

    suffix = ".json"
    """Of the state."""

    def __init__(self, home: str | Path, mountpoint: str | Path) -> None:
        self.folder = Path(home) / "mounts"
        self.mountpoint = str(mountpoint)
        self.key = blake2b(os.fsencode(mountpoint), digest_size=8).hexdigest()
        self.state = self.folder / f"{self.key}{self.suffix}"
        self.lock = self.folder / f"{self.key}.lock"
        self.log = self.folder / f"{self.key}.log"
        self.socket_name = f"{self.key}.sock"

    def make_folder(self) -> None:
        """The folder, for its owner only."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise MountError(
                f"the folder {self.folder} cannot be made: {exc.strerror}",
                hint="Set DATACACHE_HOME to a folder you can write to.",
            ) from exc

    def replace_state(self, values: dict[str, Any]) -> None:
        """Replace the state atomically."""
        new = self.state.with_name(f"{self.state.name}.new")
        new.write_text(json.dumps(values, indent=1), encoding="utf-8")
        new.replace(self.state)

    def remove(self) -> None:
        """Remove state and socket; the log stays for whoever wants to know why."""
        for path in (self.state, self.folder / self.socket_name, self.lock):
            path.unlink(missing_ok=True)

    def listen(self) -> socket.socket:
        """The control socket, in the place of an earlier one."""
        return unix_sockets.listen(self.folder / self.socket_name, backlog=8)

    def connect(self) -> socket.socket:
        """A connection to the supervisor. Raises `OSError` when there is none, or it lets nobody in."""
        return unix_sockets.connect(self.folder / self.socket_name, timeout_s=_CONNECT_TIMEOUT_S)


class MountFiles(FilesOfMount):
    """The files of a mounted snapshot."""

    def write(self, info: MountInfo) -> None:
        """Replace the state atomically."""
        self.replace_state(info.to_dict())

    def read(self) -> MountInfo | None:
        """The state, or None where there is none (or none of this version)."""
        return read_state(self.state)


def read_state(path: Path) -> MountInfo | None:
    """One state file, or None where it is missing, torn or of another version."""
    try:
        return MountInfo.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
