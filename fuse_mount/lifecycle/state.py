"""What a mount is made of and the files under `<home>/mounts/` that say so.

Used by `launch`, `supervisor` and `worker`. For each mount, named by a hash of its mount point: `.json` (this
state, replaced atomically), `.sock` (the supervisor's control socket, 0600), `.lock` (held while one takes
over, and never removed), `.log`. The supervisor that serves a mount is the only writer of its state. No threads of its
own; reading is safe at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from datacache.core import ipc, lockfile
from datacache.core.disk import replace_file
from datacache.core.errors import MountError, UploadError
from fuse_mount.errno_map import Failure

DEFAULT_OPENER = "datacache.api:open_snapshot"
REVIVER = "datacache.api:open_mounted"
"""Opens what was mounted before by its whole id, also when the snapshot was removed from the catalog meanwhile."""
SUBTYPE = "datacache"
MOUNT_TYPE = f"fuse.{SUBTYPE}"
_CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 120.0
"""How long a flush or an unmount of a bucket may take from one message to the next."""

Progress = Callable[[dict[str, Any]], None]


class NoAnswerError(MountError):
    """No process answers for a mount, or it ended before it had answered."""


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
        return MountConfig.from_dict(json.loads(text))

    @staticmethod
    def from_dict(values: dict[str, Any]) -> MountConfig:
        """The config of these fields. What a newer version added is passed over."""
        return MountConfig(
            **{name: value for name, value in values.items() if name in MountConfig.__dataclass_fields__}
        )

    def fixed_to(self, ref: str) -> MountConfig:
        """Return the config of the same mount for exactly this snapshot, which was found in the catalog: from now on it
        goes on when it is removed there."""
        return replace(self, ref=ref, opener=REVIVER if self.opener == DEFAULT_OPENER else self.opener)


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
    """The supervisor's, which may serve other mounts as well."""
    born: int = 0
    """The start of that process, in ticks since the machine's start: its id may be given again."""
    boot: str = ""
    """In which boot of the machine it was written down: what an earlier one left is mounted no more."""
    pool: str = ""
    """The name under which its worker processes can be asked for descriptors."""
    workers: tuple[int, ...]
    catalog: str = field(default="", repr=False)
    """The URL, password and all, of the catalog that it was opened from; '' where an older version wrote the state."""
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
    failures: tuple[Failure, ...] = ()
    """The last errors that readers got, the newest first."""
    config: MountConfig = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Values that fit into JSON."""
        return asdict(self) | {"mountpoint": str(self.mountpoint), "log": str(self.log)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> MountInfo:
        """The value that `to_dict` took apart. What a newer version added is passed over."""
        known = {name: value for name, value in values.items() if name in MountInfo.__dataclass_fields__}
        known |= {"mountpoint": Path(known["mountpoint"]), "log": Path(known["log"])}
        known |= {"workers": tuple(known["workers"]), "config": MountConfig.from_dict(known["config"])}
        known |= {"failures": tuple(map(Failure.from_dict, known.get("failures", ())))}
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
        """Replace the state atomically. Only its owner can read it: it says which bucket or data set is where."""
        replace_file(self.state, json.dumps(values, indent=1).encode(), durable=False)

    def remove(self) -> None:
        """Remove state and socket. The log stays for whoever wants to know why. So does the lock: whoever waits for a
        file that lost its name holds nothing that the next one would see.
        """
        for path in (self.state, self.folder / self.socket_name):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the mount's lock: one process at a time becomes its supervisor, or changes what its state says of one.
        Waits for it. Raises `MountError` where the folder cannot be made, `OSError` where the lock cannot.
        """
        self.make_folder()
        with lockfile.held(self.lock):
            yield

    def listen(self) -> socket.socket:
        """The control socket, in the place of an earlier one."""
        return ipc.listen(self.folder / self.socket_name, backlog=8)

    def connect(self) -> socket.socket:
        """Connect to the process that serves the mount. `OSError` where there is none, or it lets nobody in."""
        return ipc.connect(self.folder / self.socket_name, timeout_s=_CONNECT_TIMEOUT_S)

    def ask(self, request: ipc.Message, progress: Progress | None = None, *, timeout_s: float = ipc.TIMEOUT_S) -> Any:
        """Ask the process that serves the mount, and return what it answers.

        `progress` gets what it sends before that; each message may take `timeout_s`. Raises `NoAnswerError` where no
        process answers, else what is in the answer (`MountError`, `UploadError`).
        """
        for answer in self._answers(request, timeout_s):
            if "progress" in answer:
                if progress is not None:
                    progress(answer["progress"])
                continue
            try:
                return ipc.result_of(answer)
            except MountError as exc:
                if exc.kind == UploadError.__name__:
                    raise UploadError(exc.message, hint=exc.hint) from None
                raise
        raise NoAnswerError("the server ended before it had answered", hint="dsctl status shows what is left.")

    def _answers(self, request: ipc.Message, timeout_s: float) -> Iterator[ipc.Message]:
        try:
            with self.connect() as connection:
                ipc.send(connection, request)
                yield from ipc.answers(connection, timeout_s=timeout_s)
        except (OSError, ValueError) as exc:
            raise NoAnswerError(
                f"no process answers for the mount at {self.mountpoint}: {getattr(exc, 'strerror', None) or exc}",
                hint=f"Its log: {self.log}",
            ) from exc


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
