"""Mounts of both kinds as values, and the files under `<home>/mounts/` that say what is mounted.

For each mount, named by a hash of its mount point: its state (`.json` of a snapshot's mount, `.rw.json` of a bucket's;
replaced atomically), `.sock` (the control socket of the process that serves it, 0600), `.lock` (held while one becomes
its supervisor, and never removed), `.log`, and `.passed-…`, the table of a mount of large files. The process that
serves a mount is the only writer of its state, but for the last word of a bucket's supervisor when it gives up. No
threads of its own; reading is safe at any time.
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
from typing import Any, ClassVar, Generic, Self, TypeVar

from datacache.core import ipc, lockfile
from datacache.core.disk import replace_file
from datacache.core.errors import MountError, UploadError

DEFAULT_OPENER = "datacache.api:open_snapshot"
REVIVER = "datacache.api:open_mounted"
"""Opens what was mounted before by its whole id, also when the snapshot was removed from the catalog meanwhile."""
ACKS = ("staged", "replicated", "uploaded")
_CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 120.0
"""How long a flush or an unmount of a bucket may take from one message to the next."""
_MOST_FAILURES = 10
"""Of one mount, that are told."""

Progress = Callable[[dict[str, Any]], None]
Makers = dict[str, Callable[[Any], Any]]


class NoAnswerError(MountError):
    """No process answers for a mount, or it ended before it had answered."""


class _InJson:
    """A dataclass that is written as JSON, also for other versions: fields that a reader does not know are dropped."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    _made_by: ClassVar[Makers] = {}
    """Makers of those fields that are no plain JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return values that fit into JSON."""
        values = asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the value that `to_dict` took apart. `TypeError` where a field is missing."""
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        return cls(**known | {name: make(known[name]) for name, make in cls._made_by.items() if name in known})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the value of a text that `to_json` wrote."""
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Failure(_InJson):
    """An error that a reader or writer of a mount got."""

    path: str
    """Below the mount point; '' where it was no one file's."""
    reason: str
    hint: str
    """Advice what to do about it; may be empty."""
    errno: str
    """Its name, as ESTALE."""
    at: float
    """The time when it happened last, in seconds since the epoch."""
    count: int = 1
    """The number of times, as far as it was told: the same one counts once in a minute."""


def with_failure(known: tuple[Failure, ...], new: Failure) -> tuple[Failure, ...]:
    """Return the last failures with one more, the newest first: of each path and reason one, with its count."""
    same = [old for old in known if (old.path, old.reason) == (new.path, new.reason)]
    others = [old for old in known if (old.path, old.reason) != (new.path, new.reason)]
    return (replace(new, count=new.count + sum(old.count for old in same)), *others)[:_MOST_FAILURES]


@dataclass(frozen=True, kw_only=True)
class _Config(_InJson):
    mountpoint: str
    home: str
    uid: int
    gid: int
    umask: int = 0o022
    allow_other: bool


@dataclass(frozen=True, kw_only=True)
class MountConfig(_Config):
    """All that a supervisor needs to serve a snapshot, and to serve it again after a hand-over."""

    ref: str
    """As asked for at first; `dataset@id` from when the snapshot was opened, so that a moving tag changes nothing."""
    workers: int
    resend: bool = True
    """False: as on a kernel without FUSE_NOTIFY_RESEND."""
    clone: bool = True
    """False: as where FUSE_DEV_IOC_CLONE is refused; all workers share one queue."""
    opener: str = DEFAULT_OPENER
    """`module:function` called as `function(ref, settings=…)` in each worker."""
    large_files: bool = False
    """Have the kernel read large files from the SSD tier itself, where it allows that (`snapshot.passthrough`)."""
    passed: str = ""
    """The name of the table of these files, of this connection; '' where it does not allow that, or was not asked."""

    def fixed_to(self, ref: str) -> MountConfig:
        """Return the config of the same mount for exactly this snapshot, which was found in the catalog: from now on it
        goes on when it is removed there."""
        return replace(self, ref=ref, opener=REVIVER if self.opener == DEFAULT_OPENER else self.opener)


@dataclass(frozen=True, kw_only=True)
class BucketConfig(_Config):
    """All that a supervisor and its servers need to serve a bucket, again and again."""

    url: str
    staging: str = ""
    """The folder that staging areas lie in; '' for the settings'."""
    ack: str = "staged"
    """When close and fsync return: once the bytes are `staged`, `replicated` on a second node, or `uploaded`."""
    ttl_s: float = 5.0
    """How long a listing of the bucket is believed."""
    upload_every_s: float = 30.0
    """How often what stays open is uploaded."""
    quota_bytes: int = 0
    """How much there may be under the prefix when it is mounted (0: no quota); `set_quota` says something else later.
    A server that follows another one keeps what was set last."""
    credentials: str = ""
    """The folder of the only store credentials that it may use beside this process's own; '' for the settings'."""
    direct: bool = False
    """Read past the node's cache, which has other credentials than this mount."""
    stop_flush_s: float = 20.0
    """How long a server that is told to end (SIGTERM, Ctrl-C, an unmount by hand) still uploads."""


@dataclass(frozen=True, kw_only=True)
class _Info(_InJson):
    mountpoint: Path
    pid: int
    """Of the process that answers on the control socket: a snapshot's supervisor, which may serve other mounts as well,
    or a bucket's server."""
    device: int
    """st_dev of the mount."""
    log: Path
    started_at: float
    """When a snapshot's mount was made, or this server of a bucket started, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class MountInfo(_Info):
    """One mount of a snapshot, as its supervisor last wrote it down."""

    _made_by: ClassVar[Makers] = {
        "mountpoint": Path,
        "log": Path,
        "workers": tuple,
        "config": MountConfig.from_dict,
        "failures": lambda failures: tuple(map(Failure.from_dict, failures)),
    }

    ref: str
    """`dataset@id`."""
    dataset: str
    snapshot_id: str
    files: int
    total_bytes: int
    born: int = 0
    """The start of process `pid`, in ticks since the machine's start: its id may be given again."""
    boot: str = ""
    """In which boot of the machine it was written down: what an earlier one left is mounted no more."""
    pool: str = ""
    """The name under which its worker processes can be asked for descriptors."""
    workers: tuple[int, ...]
    catalog: str = field(default="", repr=False)
    """The URL, password and all, of the catalog that it was opened from; '' where an older version wrote the state."""
    serving_since: float = 0.0
    """When this supervisor began to serve it, in seconds since the epoch: of two, the later one is the owner."""
    bypassed: bool = False
    """Workers kept dying over what lies on this node, so that is not used any more."""
    kept: bool = False
    """True while the cache daemon holds a copy of the descriptor (`keeping`), so that supervisor and all workers may
    be killed at once."""
    failures: tuple[Failure, ...] = ()
    """The last errors that readers got, the newest first."""
    config: MountConfig = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class BucketInfo(_Info):
    """One read-write mount, as its server last wrote it down."""

    _made_by: ClassVar[Makers] = {"mountpoint": Path, "log": Path, "notes": tuple, "config": BucketConfig.from_dict}

    url: str
    ack: str
    supervisor: int
    staging: str
    """The staging area's folder."""
    restarts: int = 0
    """How many servers died before this one."""
    notes: tuple[str, ...] = ()
    """Advice for whoever mounts."""
    problem: str = ""
    """Why there is no server any more."""
    config: BucketConfig = field(repr=False)


AnyInfo = TypeVar("AnyInfo", MountInfo, BucketInfo)


class FilesOfMount(Generic[AnyInfo]):
    """The files of one mount under a home."""

    kind: type[AnyInfo]
    suffix: str
    """Of the state."""

    def __init__(self, home: str | Path, mountpoint: str | Path) -> None:
        self.folder = Path(home) / "mounts"
        self.mountpoint = str(mountpoint)
        self.key = blake2b(os.fsencode(mountpoint), digest_size=8).hexdigest()
        self.state = self.folder / f"{self.key}{self.suffix}"
        self.lock = self.folder / f"{self.key}.lock"
        self.log = self.folder / f"{self.key}.log"
        self.socket_name = f"{self.key}.sock"

    @classmethod
    def all_states(cls, home: str | Path) -> list[AnyInfo]:
        """Return the states of all mounts of this kind in a home."""
        paths = sorted((Path(home) / "mounts").glob(f"*{cls.suffix}"))
        return [info for path in paths if (info := cls._read(path)) is not None]

    def read(self) -> AnyInfo | None:
        """Return the state, or None where it is missing, torn or of another version."""
        return self._read(self.state)

    @classmethod
    def _read(cls, path: Path) -> AnyInfo | None:
        try:
            return cls.kind.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, info: AnyInfo) -> None:
        """Replace the state atomically. Only its owner can read it: it says which bucket or data set is where."""
        replace_file(self.state, json.dumps(info.to_dict(), indent=1).encode(), durable=False)

    def remove(self) -> None:
        """Remove state and socket. The log stays for whoever wants to know why. So does the lock: whoever waits for a
        file that lost its name holds nothing that the next one would see."""
        for path in (self.state, self.folder / self.socket_name):
            path.unlink(missing_ok=True)

    def make_folder(self) -> None:
        """Make the folder, for its owner only. Raises `MountError`."""
        make_private(self.folder)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the mount's lock: one process at a time becomes its supervisor, or changes what its state says of one.
        Waits for it. Raises `MountError` where the folder cannot be made, `OSError` where the lock cannot."""
        self.make_folder()
        with lockfile.held(self.lock):
            yield

    def listen(self) -> socket.socket:
        """Return the control socket, in the place of an earlier one."""
        return ipc.listen(self.folder / self.socket_name, backlog=8)

    def connect(self) -> socket.socket:
        """Connect to the process that serves the mount. `OSError` where there is none, or it lets nobody in."""
        return ipc.connect(self.folder / self.socket_name, timeout_s=_CONNECT_TIMEOUT_S)

    def ask(self, request: ipc.Message, progress: Progress | None = None, *, timeout_s: float = ipc.TIMEOUT_S) -> Any:
        """Ask the process that serves the mount, and return what it answers.

        `progress` gets what it sends before that; each message may take `timeout_s`. Raises `NoAnswerError` where no
        process answers, else what is in the answer (`MountError`, `UploadError`)."""
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


class MountFiles(FilesOfMount[MountInfo]):
    """The files of a mounted snapshot."""

    kind, suffix = MountInfo, ".json"


class BucketFiles(FilesOfMount[BucketInfo]):
    """The files of a read-write mount."""

    kind, suffix = BucketInfo, ".rw.json"

    def remove_of(self, pid: int) -> None:
        """Remove them unless they are of another mount by now: `pid` is the server's or the supervisor's."""
        info = self.read()
        if info is None or pid in (info.pid, info.supervisor):
            self.remove()


def files_of(info: MountInfo | BucketInfo) -> FilesOfMount[Any]:
    """Return the files of a mount."""
    return (BucketFiles if isinstance(info, BucketInfo) else MountFiles)(info.config.home, info.mountpoint)


def make_private(folder: Path) -> None:
    """Make a folder of the home, for its owner only. Raises `MountError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise MountError(
            f"the folder {folder} cannot be made: {exc.strerror}",
            hint="Set DATACACHE_HOME to a folder you can write to.",
        ) from exc
