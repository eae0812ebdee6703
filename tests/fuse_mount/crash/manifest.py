"""Record what a writer was told, in a file that outlives everything: before each operation what it is to do, and
after it that it was acknowledged. From this the checker knows what every file may hold.

The files' contents follow from a token and a size, so the manifest stays small. A file's state is `TOKEN:SIZE`, None
where there is none, or UNKNOWN where an operation failed in the middle and nobody has tidied up yet. Logs are kept
apart: they have the acknowledged bytes, and after them only what was meant to follow.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNKNOWN = "?"
State = str | None


def content(state: str) -> bytes:
    """The bytes that a state stands for."""
    token, _, size = state.rpartition(":")
    return random.Random(token).randbytes(int(size))


@dataclass
class Log:
    """An appended file."""

    intended: bytes = b""
    acknowledged: int = 0
    """How many of the bytes were acknowledged."""

    def allows(self, data: bytes | None) -> bool:
        """Return whether the file may hold this. None: it is not there."""
        found = data or b""
        return len(found) >= self.acknowledged and self.intended.startswith(found)


@dataclass
class Ledger:
    """The state of one writer's files by what it was told; every change is on the disk when a method returns."""

    file: int | None = None
    """Where lines are written; None when only reading."""
    states: dict[str, State] = field(default_factory=dict)
    logs: dict[str, Log] = field(default_factory=dict)
    pending: dict[int, dict[str, State]] = field(default_factory=dict)
    """Operations that were begun and neither acknowledged nor settled."""
    problems: list[str] = field(default_factory=list)
    """What the writer itself saw that may not be."""
    count: int = 0

    @staticmethod
    def create(path: Path) -> Ledger:
        """A new manifest."""
        return Ledger(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644))

    @staticmethod
    def read(path: Path) -> Ledger:
        """Return what a manifest says."""
        ledger = Ledger()
        for line in path.read_text(encoding="utf-8").splitlines():
            ledger._apply(json.loads(line))
        return ledger

    def intend(self, changes: Mapping[str, State]) -> int:
        """An operation that brings all of these states or none is about to be tried: its number."""
        return self._say({"changes": dict(changes)})

    def intend_append(self, path: str, at: int, state: str) -> int:
        """The content of a state is about to be appended to a log of `at` bytes."""
        return self._say({"log": path, "at": at, "append": state})

    def done(self, number: int) -> None:
        """The operation was acknowledged."""
        self._say({"done": number})

    def settle(self, number: int, states: Mapping[str, State]) -> None:
        """The operation failed, and what is there was looked up and made durable."""
        self._say({"settled": number, "states": dict(states)})

    def problem(self, text: str) -> None:
        """Something was seen that may not be."""
        self._say({"problem": text})

    def _say(self, line: dict[str, Any]) -> int:
        assert self.file is not None
        os.write(self.file, json.dumps(line | {"at_s": round(time.time(), 3)}).encode() + b"\n")
        os.fdatasync(self.file)
        self._apply(line)
        return self.count

    def _apply(self, line: dict[str, Any]) -> None:
        match line:
            case {"changes": changes}:
                self.count += 1
                self.pending[self.count] = changes
            case {"log": path, "at": at, "append": state}:
                self.count += 1
                log = self.logs.setdefault(path, Log())
                log.intended = log.intended[:at] + content(state)
                self.pending[self.count] = {}
            case {"done": number}:
                self.states.update(self.pending.pop(number))
            case {"settled": number, "states": states}:
                self.pending.pop(number)
                self.states.update(states)
            case {"problem": text}:
                self.problems.append(text)
            case {"acknowledged": path, "length": length}:
                self.logs[path].acknowledged = length

    def acknowledge_log(self, path: str) -> None:
        """All that was intended for a log is durable."""
        self._say({"acknowledged": path, "length": len(self.logs[path].intended)})


def problems_of(ledger: Ledger, found: Mapping[str, bytes]) -> list[str]:
    """Return what is lost, torn or back from the dead in the files of one writer. `found` is everything there is."""
    problems = list(ledger.problems)
    uncertain = {path for changes in ledger.pending.values() for path in changes}
    for path, state in ledger.states.items():
        if path not in uncertain and not holds(found, path, state):
            problems.append(f"{path}: {told(found, path)}, not {state}")
    for number, changes in ledger.pending.items():
        old = all(holds(found, path, ledger.states.get(path)) for path in changes)
        if not old and not all(holds(found, path, state) for path, state in changes.items()):
            problems.append(f"operation {number} was done by halves: {changes}")
    for path, log in ledger.logs.items():
        if not log.allows(found.get(path)):
            problems.append(
                f"{path}: {told(found, path)}, of which {_common(log.intended, found.get(path, b''))} are right; "
                f"{log.acknowledged} were acknowledged and {len(log.intended)} intended"
            )
    known = ledger.states.keys() | ledger.logs.keys() | uncertain
    problems += [f"{path}: {told(found, path)}, and nobody wrote it" for path in found if path not in known]
    return problems


def holds(found: Mapping[str, bytes], path: str, state: State) -> bool:
    """Return whether a path is in a state."""
    if state == UNKNOWN:
        return True
    data = found.get(path)
    if state is None or data is None:
        return state is None and data is None
    return len(data) == int(state.rpartition(":")[2]) and data == content(state)


def told(found: Mapping[str, bytes], path: str) -> str:
    """Return what is there, for people."""
    return f"{len(found[path])} bytes {found[path][:8].hex()}…" if path in found else "nothing"


def _common(one: bytes, other: bytes) -> int:
    """Length of the common beginning."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
