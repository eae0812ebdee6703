"""One process that writes to a mount for as long as it is let, and keeps a manifest of what it was told.

    python -m tests.fuse_mount.crash.writer FOLDER MANIFEST SEED LARGEST [plain]

FOLDER lies right in the mount (or, `plain`, in any directory), is there already and belongs to this writer alone. Every
operation that fails is settled: when the mount is back, what is there is read and synced, and must be what was before
the operation or what it was to bring; a file that was cut off in the middle is removed. SIGTERM ends it after that. The
last line of its output is JSON: operations tried and failed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.fuse_mount.crash.manifest import UNKNOWN, Ledger, State, content, holds

PATIENCE_S = 180.0
_PAUSE_S = 0.02
_MOMENT_S = 0.2
"""Mounting takes longer: two looks that see the mount and lie closer together had it there in between."""


class ImpatientError(RuntimeError):
    """The mount did not come back."""


class Writer:
    """The operations. Paths are relative to the folder."""

    def __init__(self, folder: Path, ledger: Ledger, seed: int, largest: int, *, plain: bool = False) -> None:
        self.folder, self.largest = folder, largest
        self.outside = -1 if plain else os.stat(folder.parent.parent).st_dev
        """The device that the mount point lies on."""
        self.name = folder.name
        self.ledger = ledger
        self.dice = random.Random(seed)
        self.handles: dict[str, int] = {}
        self.stopping = False
        self.tried: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.folders = 0

    # --- one operation after the other ---

    def run(self) -> None:
        """Until SIGTERM."""
        operations = [
            *[self.checkpoint] * 4, *[self.whole_file] * 5, *[self.append] * 6, *[self.rename] * 2, *[self.unlink] * 2,
            self.rename_folder, *[self.read_back] * 2,
        ]  # fmt: skip
        while not self.stopping:
            self.dice.choice(operations)()
        for handle in self.handles.values():
            with suppress(OSError):
                os.close(handle)

    def attempt(self, what: str, changes: dict[str, State], action: object, *arguments: object) -> bool:
        """Do an atomic operation. Whether it was acknowledged; if not, it is settled."""
        number = self.ledger.intend({self.key(path): state for path, state in changes.items()})
        self.tried[what] += 1
        start, device = time.monotonic(), self.device()
        try:
            action(*arguments)  # type: ignore[operator]
        except OSError as exc:
            self.failed[f"{what}: {exc.strerror}"] += 1
            steady = device == self.device() != self.outside and time.monotonic() - start < _MOMENT_S
            if isinstance(exc, FileNotFoundError) and steady:
                self.ledger.problem(f"{what} of {list(changes)}: {exc}")
            self.settle(what, number, list(changes))
            return False
        self.ledger.done(number)
        return True

    def key(self, path: str) -> str:
        """How the manifest calls a path: as the bucket does."""
        return f"{self.name}/{path}"

    def path(self, path: str) -> str:
        return f"{self.folder}/{path}"

    def state(self, path: str) -> State:
        return self.ledger.states.get(self.key(path))

    def there(self, folder: str = "") -> list[str]:
        """Paths of the writer's files whose state is known."""
        begin = self.key(folder)
        return [
            path.removeprefix(f"{self.name}/")
            for path, state in self.ledger.states.items()
            if state is not None and state != UNKNOWN and path.startswith(begin)
        ]

    def new_state(self) -> str:
        size = self.dice.choice([1, 100, 4096, self.dice.randrange(70_000), self.dice.randrange(self.largest)])
        return f"{self.name}-{self.ledger.count}-{self.dice.randrange(10**6)}:{size}"

    # --- operations ---

    def checkpoint(self) -> None:
        """As torch.save is made safe: a temporary file, synced, renamed over the last one."""
        state, name = self.new_state(), f"ckpt-{self.dice.randrange(3)}.pt"
        temporary = f"{name}.tmp"
        if self.attempt("checkpoint", {temporary: state}, self.put, temporary, state, True):
            self.attempt("publish", {temporary: None, name: state}, self.do_rename, temporary, name)

    def whole_file(self) -> None:
        """A new file, or the old one of the name truncated and written again; acknowledged by close alone."""
        name, state = f"file-{self.dice.randrange(12)}", self.new_state()
        self.attempt("write", {name: state}, self.put, name, state, False)

    def put(self, path: str, state: str, sync: bool) -> None:
        handle = os.open(self.path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            data = memoryview(content(state))
            while data:
                data = data[os.write(handle, data[: self.dice.choice([4096, 131_072, 1_000_000])]) :]
            if sync:
                os.fsync(handle)
        except OSError:
            with suppress(OSError):
                os.close(handle)
            raise
        os.close(handle)

    def rename(self) -> None:
        """Over a file that may be there."""
        files = [path for path in self.there() if "/" not in path]
        if files:
            old, new = self.dice.choice(files), f"file-{self.dice.randrange(12)}"
            if old != new:
                self.attempt("rename", {old: None, new: self.state(old)}, self.do_rename, old, new)

    def do_rename(self, old: str, new: str) -> None:
        os.rename(self.path(old), self.path(new))

    def unlink(self) -> None:
        files = self.there()
        if files:
            path = self.dice.choice(files)
            self.attempt("unlink", {path: None}, os.unlink, self.path(path))

    def rename_folder(self) -> None:
        """A folder of files, renamed in one step, and the one before removed."""
        self.folders += 1
        old, new = f"new-{self.folders}", f"run-{self.folders}"
        if not self.patiently(lambda: os.mkdir(self.path(old))):
            return
        for number in range(self.dice.randrange(1, 5)):
            state = self.new_state()
            self.attempt("write", {f"{old}/{number}": state}, self.put, f"{old}/{number}", state, False)
        changes: dict[str, State] = {}
        for path in self.there(f"{old}/"):
            changes |= {path: None, path.replace(old, new): self.state(path)}
        self.attempt("rename folder", changes, self.do_rename, old, new)
        for path in self.there(f"run-{self.folders - 1}/"):
            self.attempt("unlink", {path: None}, os.unlink, self.path(path))
        with suppress(OSError):
            os.rmdir(self.path(f"run-{self.folders - 1}"))

    def patiently(self, action: object) -> bool:
        """Do what may be done twice."""
        self.tried["mkdir"] += 1
        try:
            action()  # type: ignore[operator]
        except OSError as exc:
            self.failed[f"mkdir: {exc.strerror}"] += 1
            self.wait()
            return False
        return True

    def append(self) -> None:
        """Some records, and fsync once for them all."""
        path = f"log-{self.dice.randrange(2)}"
        log = self.ledger.logs.get(self.key(path))
        at = len(log.intended) if log is not None else 0
        self.tried["append"] += 1
        try:
            if path not in self.handles:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self.handles[path] = os.open(self.path(path), flags, 0o644)
            for _ in range(self.dice.randrange(1, 4)):
                state = f"{self.name}-log-{self.ledger.count}:{self.dice.choice([1, 60, 300, 9000])}"
                number = self.ledger.intend_append(self.key(path), at, state)
                data = content(state)
                at += len(data)
                written = os.write(self.handles[path], data)
                if written != len(data):
                    raise OSError(f"{written} of {len(data)} bytes written")
                self.ledger.done(number)
            os.fsync(self.handles[path])
            self.ledger.acknowledge_log(self.key(path))
            if self.dice.random() < 0.1:
                os.close(self.handles.pop(path))
        except OSError as exc:
            self.failed[f"append: {exc.strerror or exc}"] += 1
            with suppress(OSError, KeyError):
                os.close(self.handles.pop(path))
            self.settle_log(path)

    def read_back(self) -> None:
        """Check that what is told now is right, or fails."""
        files = self.there()
        if not files:
            return
        path = self.dice.choice(files)
        try:
            data: bytes | None = Path(self.path(path)).read_bytes()
        except FileNotFoundError:
            data = self.look(path, sync=False)  # believed only when the mount is there
        except OSError:
            return
        self.compare("read back", path, data, [self.state(path)])

    # --- after a failure ---

    def settle(self, what: str, number: int, paths: list[str]) -> None:
        """Find out what is there now, which must be all old or all new."""
        changes = self.ledger.pending[number]
        found = {self.key(path): data for path in paths if (data := self.look(path, sync=True)) is not None}
        old = {path: self.ledger.states.get(path) for path in changes}
        for states in (changes, old):
            if UNKNOWN not in states.values() and all(holds(found, *pair) for pair in states.items()):
                self.ledger.settle(number, states)
                return
        if len(paths) > 1:
            self.ledger.problem(f"{what} {number} was done by halves: {describe(found, changes)}")
        for path, state in changes.items():
            self.compare(f"failed {what}", path.removeprefix(f"{self.name}/"), found.get(path), [old[path]], state)
        self.ledger.settle(number, dict.fromkeys(changes, UNKNOWN))
        for path in paths:
            self.remove(path)

    def compare(self, what: str, path: str, data: bytes | None, states: list[State], partly: State = None) -> None:
        """Note a problem where a file is in none of the states. A new one may hold a part of what was to be written."""
        found = {} if data is None else {path: data}
        if any(holds(found, path, state) for state in [*states, partly]):
            return
        if states == [None] and partly is not None and data is not None and content(partly).startswith(data):
            return
        self.ledger.problem(f"{what}: {path} is {describe(found, {path: partly})}, but was {states}")

    def settle_log(self, path: str) -> None:
        log = self.ledger.logs.get(self.key(path))
        if log is None:
            self.wait()
            return
        data = self.look(path, sync=True)
        if not log.allows(data):
            self.ledger.problem(
                f"{path} has {None if data is None else len(data)} bytes, not {log.acknowledged} to {len(log.intended)}"
            )
        log.intended = data or b""  # as the next append will have it in the manifest

    def remove(self, path: str) -> None:
        """Until it is gone for sure."""
        number = self.ledger.intend({self.key(path): None})
        begin = time.monotonic()
        while self.look(path, sync=True) is not None:
            with suppress(OSError):
                os.unlink(self.path(path))
            self.check_patience(begin)
        self.ledger.settle(number, {self.key(path): None})

    def look(self, path: str, *, sync: bool) -> bytes | None:
        """Return what is there, durably if `sync`; waits for the mount to be back."""
        begin = time.monotonic()
        while True:
            self.check_patience(begin)
            start = time.monotonic()
            try:
                if self.mounted():
                    data = self.read(path, sync)
                    if data is not None or (self.mounted() and time.monotonic() - start < _MOMENT_S):
                        return data
            except OSError:
                pass
            time.sleep(_PAUSE_S)

    def read(self, path: str, sync: bool) -> bytes | None:
        """The content, or None where there is no file."""
        if sync:
            folder = os.open(os.path.dirname(self.path(path)), os.O_RDONLY) if "/" not in path else -1
            if folder >= 0:
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        try:
            handle = os.open(self.path(path), os.O_RDWR if sync else os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(handle, "rb", buffering=0) as file:
            if sync:
                os.fsync(handle)
            return file.readall()

    def wait(self) -> None:
        """Until the mount is there."""
        begin = time.monotonic()
        while True:
            with suppress(OSError):
                if self.mounted():
                    return
            self.check_patience(begin)
            time.sleep(_PAUSE_S)

    def mounted(self) -> bool:
        """Return whether the folder is that of the mount. (It is nowhere else, but its absence proves nothing.)"""
        found = os.stat(self.folder)
        return stat.S_ISDIR(found.st_mode) and found.st_dev != self.outside

    def device(self) -> int:
        """The device the folder is on; 0 while it cannot be said."""
        try:
            return os.stat(self.folder).st_dev
        except OSError:
            return 0

    def check_patience(self, begin: float) -> None:
        if time.monotonic() - begin > PATIENCE_S:
            raise ImpatientError(f"{self.folder} did not come back in {PATIENCE_S:.0f} s")


def describe(found: dict[str, bytes], wanted: dict[str, State]) -> str:
    """Return what is there and what was wanted, for people."""
    return ", ".join(
        f"{path}: {len(found[path]) if path in found else 'no'} bytes (to be {state})" for path, state in wanted.items()
    )


def main(folder: str, manifest: str, seed: str, largest: str, plain: str = "") -> None:
    """Run a writer."""
    writer = Writer(Path(folder), Ledger.create(Path(manifest)), int(seed), int(largest), plain=bool(plain))

    def stop(*_: object) -> None:
        writer.stopping = True

    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    writer.run()
    print(json.dumps({"tried": writer.tried, "failed": writer.failed}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
