"""Talk to the node's daemon, and start it when there is none.

Used by readers for blocks that are not on the node, and by `dsctl`. One connection a thread, none across `fork()`. A
daemon that dies in the middle of a request is started again and asked again: every request is idempotent.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from datacache.core import unix_sockets
from datacache.core.concurrency import PerProcess
from datacache.core.errors import DaemonError, DaemonUnavailableError, DatacacheError, StoreError
from datacache.core.objects import ObjectRef
from datacache.daemon import paths, wire
from datacache.daemon.plan_file import PlanHeader
from datacache.settings import Settings

log = logging.getLogger(__name__)
_START_TIMEOUT_S = 20.0
_ALREADY_RUNNING = 3
_EXTERNAL_AWAY_S = 5.0
"""How long a daemon that something else starts is waited for, from when it was first missed."""


class _Connection(http.client.HTTPConnection):
    """HTTP over the Unix socket of a home, however long the path to it is."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("daemon", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = unix_sockets.connect(self._path, timeout_s=self.timeout)


class DaemonClient:
    """The daemon of one home. Safe from several threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._local: PerProcess[threading.local] = PerProcess(threading.local)
        # A get may take the store's whole patience, and wait behind others.
        self._timeout_s = 2 * settings.store_timeout_s + 10.0
        self._missed_at: float | None = None
        """When a daemon that something else starts was found missing; any thread may set it, and a lost update only has
        it waited for once more."""

    def block(self, ref: ObjectRef, number: int, dataset: str, snapshot: str, *, broken: bool = False) -> bytes:
        """The bytes of a block, fetched if need be. Raises the store's errors, `DaemonUnavailableError` if there is no
        daemon and none can be started."""
        body = {"ref": wire.encode_ref(ref), "number": number, "dataset": dataset, "snapshot": snapshot}
        if broken:
            body["broken"] = True
        try:
            return self._ask("POST", "/v1/block", body)
        except StoreError as exc:
            with contextlib.suppress(DatacacheError):
                self._explain(exc)
            raise

    def health(self) -> dict[str, Any]:
        """Who it is and how it is."""
        return self._json("GET", "/healthz")

    def cache_status(self) -> dict[str, Any]:
        """Tiers, data sets, pins, hit rate, jobs."""
        return self._json("GET", "/v1/cache")

    def warm(self, ref: str) -> str:
        """Start fetching all of a snapshot; the job's id."""
        return str(self._json("POST", "/v1/warm", {"ref": ref})["id"])

    def job(self, id: str) -> dict[str, Any]:
        """How a warm-up is getting on (`WarmJob`)."""
        return self._json("GET", f"/v1/jobs/{id}")

    def pin(self, ref: str) -> dict[str, Any]:
        """Never evict a snapshot's blocks."""
        return self._json("POST", "/v1/pin", {"ref": ref})

    def unpin(self, ref: str) -> dict[str, Any]:
        """Let the policy decide again."""
        return self._json("POST", "/v1/unpin", {"ref": ref})

    def evict(self, ref: str | None) -> dict[str, Any]:
        """Drop a data set's blocks, or all that is not pinned."""
        return self._json("POST", "/v1/evict", {"ref": ref})

    def lookahead(self, header: PlanHeader, items: Callable[[], Iterable[bytes]]) -> dict[str, Any]:
        """Publish an order (`loaders.lookahead`). `items()` gives its items from the beginning."""

        def send(connection: _Connection) -> None:
            head = header.encode()
            more = {"Content-Type": "application/octet-stream", "Content-Length": str(len(head) + header.body_bytes)}
            connection.request("POST", "/v1/lookahead", itertools.chain([head], items()), more)

        answer: dict[str, Any] = json.loads(self._retried(send))
        return answer

    def metrics(self) -> str:
        """Prometheus text."""
        return self._ask("GET", "/metrics").decode()

    def stop(self) -> None:
        """Stop the daemon and wait until it is gone."""
        pid = int(self._json("POST", "/v1/stop", {}, start=False)["pid"])
        end = time.monotonic() + _START_TIMEOUT_S
        while Path(f"/proc/{pid}").exists() and not _is_zombie(pid):
            if time.monotonic() > end:
                raise DaemonError(f"the daemon (pid {pid}) does not stop", hint=f"kill -9 {pid}")
            time.sleep(0.02)

    def alive(self) -> bool:
        """Whether a daemon answers now; none is started."""
        try:
            self._once(functools.partial(_request, "GET", "/healthz", None))
        except (OSError, http.client.HTTPException):
            return False
        return True

    def start_soon(self) -> None:
        """Start the daemon unless one answers, without waiting for it: whoever reads first will. Does nothing where
        something else starts it."""
        if self._settings.daemon != "external" and not self.alive():
            self._spawn()

    def ensure(self) -> None:
        """Start the daemon unless one answers. `DaemonUnavailableError` says why it cannot be started; or, where
        something else starts it, that it has been away for some seconds."""
        if self._settings.daemon == "external":
            self._wait_for_it()
            return
        end = time.monotonic() + _START_TIMEOUT_S
        while not self.alive():
            with self._turn_to_start() as mine:
                if mine:
                    self._start(end)
                    return
            if time.monotonic() > end:
                raise self._no_answer()
            time.sleep(0.02)

    def _wait_for_it(self) -> None:
        while not self.alive():
            now = time.monotonic()
            self._missed_at = missed_at = self._missed_at or now
            if now - missed_at > _EXTERNAL_AWAY_S:
                raise DaemonUnavailableError(
                    f"the cache daemon of {self._settings.home} does not answer, and it is not ours to start it",
                    hint="DATACACHE_DAEMON is external: look at the container or service that runs it.",
                )
            time.sleep(0.05)
        self._missed_at = None

    @contextlib.contextmanager
    def _turn_to_start(self) -> Iterator[bool]:
        """Whether this thread is the one of all threads and processes of the home that starts a daemon: sixteen readers
        that find none would start sixteen, of which fifteen come up to see that they are not needed."""
        path = paths.start_lock_path(self._settings.home)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # the home cannot be written: starting says what is wrong
            yield True
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        try:
            yield mine
        finally:
            os.close(fd)

    def _start(self, end: float) -> None:
        process: subprocess.Popen[bytes] | None = None
        lost_race_s = 0.1
        while not self.alive():
            if process is None:
                process = self._spawn()
            elif process.poll() == _ALREADY_RUNNING:
                # Another one holds the lock. It may die before it serves, so ours is tried again, ever less often.
                process = None
                time.sleep(lost_race_s)
                lost_race_s = min(2 * lost_race_s, 2.0)
            elif process.poll() is not None:
                raise DaemonUnavailableError(
                    f"the cache daemon cannot be started: {self._last_words()}",
                    hint=f"Its log: {paths.log_path(self._settings.home)}. See also: dsctl doctor",
                )
            if time.monotonic() > end:
                raise self._no_answer()
            time.sleep(0.02)

    def _no_answer(self) -> DaemonUnavailableError:
        return DaemonUnavailableError(
            f"the cache daemon of {self._settings.home} does not answer",
            hint=f"Its log: {paths.log_path(self._settings.home)}",
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        home = self._settings.home
        log_file = paths.log_path(home)
        package_root = str(Path(__file__).parents[2])
        environment = os.environ | self._settings.environment()
        # glibc gives freed blocks of 100 KB back to the kernel at once and faults them in again; the daemon takes and
        # frees thousands of them a second (mallopt(3)).
        environment |= {"MALLOC_TRIM_THRESHOLD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**28)}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH")) if p)
        try:
            log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with log_file.open("ab") as out:
                return subprocess.Popen(
                    [sys.executable, "-m", "datacache.daemon"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd="/",
                    env=environment,
                    start_new_session=True,
                )
        except OSError as exc:
            raise DaemonUnavailableError(
                f"the cache daemon cannot be started: {exc.strerror} ({exc.filename})",
                hint="Set DATACACHE_HOME to a folder you can write to.",
            ) from exc

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = paths.log_path(self._settings.home).read_text(errors="replace").splitlines()
            for line in reversed(lines[-20:]):
                if line.startswith("error: "):
                    return line.removeprefix("error: ")
            if lines:
                return lines[-1]
        return "it said nothing"

    def _json(self, method: str, path: str, body: object = None, *, start: bool = True) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._ask(method, path, body, start=start))
        return answer

    def _ask(self, method: str, path: str, body: object = None, *, start: bool = True) -> bytes:
        return self._retried(functools.partial(_request, method, path, body), start=start)

    def _retried(self, send: Callable[[_Connection], None], *, start: bool = True) -> bytes:
        """One request, asked again (and the daemon started again) while the daemon is away."""
        end = time.monotonic() + self._timeout_s
        delay = 0.01
        while True:
            try:
                return self._once(send)
            except (OSError, http.client.HTTPException) as exc:
                if isinstance(exc, DatacacheError):
                    raise
                if not start or time.monotonic() > end:
                    raise DaemonUnavailableError(
                        f"no daemon answers for {self._settings.home}", hint="Start one: dsctl daemon start"
                    ) from exc
            time.sleep(random.uniform(0, delay))
            delay = min(2 * delay, 0.5)
            self.ensure()

    def _once(self, send: Callable[[_Connection], None]) -> bytes:
        local = self._local.get()
        connection: _Connection | None = getattr(local, "connection", None)
        if connection is None:
            connection = _Connection(paths.socket_path(self._settings.home), self._timeout_s)
            local.connection = connection
        try:
            send(connection)
            response = connection.getresponse()
            answer = response.read()
        except BaseException:
            connection.close()
            local.connection = None
            raise
        if response.status == 200:
            return answer
        try:
            error = wire.decode_error(json.loads(answer))
        except ValueError:
            error = DaemonError(f"the daemon answered {response.status}: {answer[:200]!r}")
        raise error

    def _explain(self, exc: StoreError) -> None:
        if self._json("GET", "/healthz", start=False).get("stores") != wire.store_fingerprint():
            exc.hint = (
                "The daemon runs with other AWS_* (or GOOGLE_*, AZURE_*) variables than this process: "
                "dsctl daemon stop, then try again. " + exc.hint
            )


def _request(method: str, path: str, body: object, connection: _Connection) -> None:
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return True
