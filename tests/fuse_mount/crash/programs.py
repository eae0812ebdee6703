"""Four programs that write as people's do, without knowing of mounts, until they are told to end; and what they wrote.

    python -m tests.fuse_mount.crash.programs NAME FOLDER

Each ends with an error at the first call that fails. What was acknowledged is counted and printed at SIGTERM, as JSON,
with the longest time that one round took. `problems_in` compares a folder with these counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

CHECKPOINTS_KEPT = 3
_PAUSE_S = 0.01
"""Between rounds, so that what is killed gets the processor, too."""


def database(folder: Path) -> Iterator[None]:
    """Commit rows to an SQLite database with a write-ahead log."""
    with sqlite3.connect(folder / "rows.db", isolation_level=None) as connection:
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute("PRAGMA synchronous = full")
        connection.execute("PRAGMA wal_autocheckpoint = 20")
        connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, content BLOB)")
        number = 0
        while True:
            connection.execute("INSERT INTO rows VALUES (?, ?)", (number, content(number)))
            number += 1
            yield


def repository(folder: Path) -> Iterator[None]:
    """Commit files to a git repository."""

    def git(*words: str) -> None:
        command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", "-c", "gc.auto=0", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    git("init", "--quiet")
    number = 0
    while True:
        (folder / f"file-{number % 7}").write_bytes(content(number))
        git("add", "--all")
        git("commit", "--quiet", "--message", str(number))
        number += 1
        yield


def checkpoints(folder: Path) -> Iterator[None]:
    """Save tensors beside, sync them, and rename them into place; the last few stay."""
    import torch

    number = 0
    while True:
        beside = folder / "beside.pt"
        with beside.open("wb") as file:
            torch.save({"number": number, "weights": torch.full((100_000,), float(number))}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(folder / f"{number}.pt")
        if number >= CHECKPOINTS_KEPT:
            (folder / f"{number - CHECKPOINTS_KEPT}.pt").unlink()
        number += 1
        yield


def log(folder: Path) -> Iterator[None]:
    """Append lines to one file that stays open; sync every tenth."""
    with (folder / "log").open("a", buffering=1, encoding="ascii") as file:
        number = 0
        while True:
            file.write(line(number))
            if number % 10 == 0:
                os.fsync(file.fileno())
            number += 1
            yield


def content(number: int) -> bytes:
    """The parts that belong to a number."""
    return hashlib.sha256(b"%d" % number).digest() * (1 + number % 50)


def line(number: int) -> str:
    """The line of a number."""
    return f"{number} {hashlib.sha256(b'%d' % number).hexdigest()}\n"


def problems_in(folder: Path, name: str, rounds: int) -> list[str]:
    """Tell the problems with what a program wrote in so many rounds."""
    found = list(CHECKS[name](folder, rounds))
    return [f"{name}: {problem}" for problem in found]


def _wrong_rows(folder: Path, rounds: int) -> Iterator[str]:
    with closing(sqlite3.connect(f"file:{folder}/rows.db?mode=ro", uri=True)) as connection:
        [[verdict]] = connection.execute("PRAGMA integrity_check")
        rows = dict(connection.execute("SELECT number, content FROM rows"))
    if verdict != "ok":
        yield verdict
    if rows != {number: content(number) for number in range(rounds)}:
        yield f"{len(rows)} rows, not {rounds}, or others"


def _wrong_commits(folder: Path, rounds: int) -> Iterator[str]:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-c", "safe.directory=*", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    checked = git("fsck", "--full", "--strict")
    if checked.returncode:
        yield checked.stderr
    if (count := git("rev-list", "--count", "HEAD").stdout.strip()) != str(rounds):
        yield f"{count} commits, not {rounds}"
    for number in range(max(0, rounds - 7), rounds):
        if (folder / f"file-{number % 7}").read_bytes() != content(number):
            yield f"file-{number % 7} is another one"


def _wrong_checkpoints(folder: Path, rounds: int) -> Iterator[str]:
    import torch

    for number in range(max(0, rounds - CHECKPOINTS_KEPT), rounds):
        saved = torch.load(folder / f"{number}.pt")
        if saved["number"] != number or not bool((saved["weights"] == number).all()):
            yield f"{number}.pt is another one"
    if len(os.listdir(folder)) != min(rounds, CHECKPOINTS_KEPT):
        yield f"there are {os.listdir(folder)}"


def _wrong_lines(folder: Path, rounds: int) -> Iterator[str]:
    lines = (folder / "log").read_text(encoding="ascii").splitlines(keepends=True)
    if lines != [line(number) for number in range(rounds)]:
        yield f"{len(lines)} lines, not {rounds}, or others"


PROGRAMS: dict[str, Callable[[Path], Iterator[None]]] = {
    program.__name__: program for program in (database, repository, checkpoints, log)
}
CHECKS = {
    "database": _wrong_rows,
    "repository": _wrong_commits,
    "checkpoints": _wrong_checkpoints,
    "log": _wrong_lines,
}


class Running:
    """All programs, each in its own folder of a directory."""

    def __init__(self, folder: Path) -> None:
        self._processes = {}
        for name in PROGRAMS:
            (folder / name).mkdir()
            command = [sys.executable, "-m", "tests.fuse_mount.crash.programs", name, str(folder / name)]
            pipe = subprocess.PIPE
            self._processes[name] = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=pipe, text=True)
        for process in self._processes.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def finish(self) -> dict[str, dict[str, Any]]:
        """Have each end; what each says."""
        said = {}
        for name, process in self._processes.items():
            process.send_signal(signal.SIGTERM)
            text, _ = process.communicate(timeout=120)
            assert process.returncode == 0, f"{name} ended with {process.returncode}"
            said[name] = json.loads(text)
        return said

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def main() -> None:
    """Run one."""
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    name, folder = sys.argv[1], Path(sys.argv[2])
    rounds, longest_s, began = 0, 0.0, time.monotonic()
    program = PROGRAMS[name](folder)
    for _ in program:
        now = time.monotonic()
        if not rounds:
            print("ready", flush=True)  # the first round imports
        else:
            longest_s = max(longest_s, now - began)
        rounds += 1
        if ending:
            break
        time.sleep(_PAUSE_S)
        began = time.monotonic()
    program.close()  # type: ignore[attr-defined]
    print(json.dumps({"rounds": rounds, "longest_s": round(longest_s, 2)}))


if __name__ == "__main__":
    main()
