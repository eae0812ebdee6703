"""What a read-write mount is made of, and the state file under `<home>/mounts/` that says so.

Used by everything named `bucket_*` here. Beside the state (`.rw.json`) lie the same files as for a snapshot's mount
(`state`). The server that serves a mount is the only writer of its state, but for its supervisor's last word when it
gives up. No threads of its own; reading is safe at any time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datacache.store.urls import split_url
from fuse_mount.lifecycle.state import FilesOfMount

ACKS = ("staged", "uploaded")


@dataclass(frozen=True, kw_only=True)
class BucketConfig:
    """All that a supervisor and its servers need, again and again."""

    url: str
    mountpoint: str
    home: str
    staging: str = ""
    """The folder that staging areas lie in; '' for the settings'."""
    ack: str = "staged"
    """When close and fsync return: once the bytes are `staged`, or once they are `uploaded`."""
    ttl_s: float = 5.0
    """How long a listing of the bucket is believed."""
    upload_every_s: float = 30.0
    """How often what stays open is uploaded."""
    uid: int
    gid: int
    umask: int = 0o022
    allow_other: bool
    quota_bytes: int = 0
    """How much there may be under the prefix when it is mounted (0: no quota); `set_quota` says something else later.
    A server that follows another one keeps what was set last."""
    credentials: str = ""
    """The folder of the only store credentials that it may use beside this process's own; '' for the settings'."""
    direct: bool = False
    """Read past the node's cache, which has other credentials than this mount."""
    stop_flush_s: float = 20.0
    """How long a server that is told to end (SIGTERM, Ctrl-C, an unmount by hand) still uploads."""

    def to_json(self) -> str:
        """The text `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> BucketConfig:
        """The config that `to_json` wrote."""
        return BucketConfig(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class BucketInfo:
    """One read-write mount, as its server last wrote it down."""

    mountpoint: Path
    url: str
    ack: str
    pid: int
    """The server's."""
    supervisor: int
    device: int
    """st_dev of the mount."""
    staging: str
    """The staging area's folder."""
    log: Path
    started_at: float
    """When this server started, in seconds since the epoch."""
    restarts: int = 0
    """How many servers died before this one."""
    notes: tuple[str, ...] = ()
    """What whoever mounts should know."""
    problem: str = ""
    """Why there is no server any more."""
    config: BucketConfig = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Values that fit into JSON."""
        return asdict(self) | {"mountpoint": str(self.mountpoint), "log": str(self.log)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> BucketInfo:
        """The value that `to_dict` took apart."""
        known = dict(values)
        known |= {"mountpoint": Path(known["mountpoint"]), "log": Path(known["log"])}
        known |= {"notes": tuple(known["notes"]), "config": BucketConfig(**known["config"])}
        return BucketInfo(**known)


class BucketFiles(FilesOfMount):
    """The files of a read-write mount."""

    suffix = ".rw.json"

    def write(self, info: BucketInfo) -> None:
        """Replace the state atomically."""
        self.replace_state(info.to_dict())

    def read(self) -> BucketInfo | None:
        """The state, or None where there is none (or none of this version)."""
        return read_bucket_state(self.state)

    def remove_of(self, pid: int) -> None:
        """Remove them unless they are of another mount by now: `pid` is the server's or the supervisor's."""
        info = self.read()
        if info is None or pid in (info.pid, info.supervisor):
            self.remove()


def read_bucket_state(path: Path) -> BucketInfo | None:
    """One state file, or None where it is missing, torn or of another version."""
    try:
        return BucketInfo.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def normal_url(url: str) -> str:
    """The URL of a prefix as it is written down: aliases resolved, absolute, with a slash at its end."""
    store, prefix = split_url(url)
    return f"{store}/{prefix}"
