"""`dsctl` in a process that is forked from one that has imported it already: the same as a new Python, for a tenth of
its time. `multiprocessing`'s fork server is the process that is forked from.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any

from dataset_cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
_context = multiprocessing.get_context("forkserver")


_ROOMS = ("annotations", "api", "catalog", "conversion", "imports", "manifest", "shards", "store", "loaders/tasks")
"""Modules that commands import when they need them."""


def start() -> None:
    """Start the process that is forked from. It keeps the environment of this moment for all to see (`/proc`), so that
    it should be nobody's home.
    """
    files = [path for room in _ROOMS for path in (ROOT / "datacache" / room).rglob("*.py")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    modules += ["fuse_mount.bucket.areas", "fuse_mount.lifecycle.launch", *COMMANDS.values()]
    forkserver.set_forkserver_preload([__name__, *modules])
    forkserver.ensure_running()


def run(arguments: Sequence[str], environment: Mapping[str, str], *, timeout_s: float) -> tuple[int, bytes, bytes]:
    """Exit code, output and error output; they end when the last process has closed them."""
    with ThreadPoolExecutor(2) as pool:
        outputs, ends = [], []
        for _ in range(2):
            reading, writing = os.pipe()
            outputs.append(pool.submit(_read_all, reading))
            ends.append(writing)
        # In the child the context is its own.
        process: Any = _context.Process(
            target=_run, args=(list(arguments), dict(environment), os.getcwd(), _Ends(ends))
        )
        try:
            process.start()
        finally:
            for end in ends:
                os.close(end)
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
        out, err = (output.result() for output in outputs)
    assert process.exitcode is not None, f"dsctl {' '.join(arguments)} does not end; {err!r}"
    return process.exitcode, out, err


class _Ends:
    """Descriptors on their way to a child."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers: list[Any] = numbers

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": [reduction.DupFd(number) for number in self.numbers]}


def _run(arguments: list[str], environment: dict[str, str], folder: str, ends: _Ends) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, end in enumerate(ends.numbers, start=1):
        given = end.detach()
        os.dup2(given, number)
        os.close(given)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["dsctl", *arguments]
    main()


def _read_all(number: int) -> bytes:
    with open(number, "rb") as file:
        return file.read()
