"""Writers on a mount, and what comes between: starting and stopping them, killing at random, comparing at the end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.fuse_mount.crash.manifest import Ledger, problems_of

ROOT = Path(__file__).resolve().parents[3]


class Writers:
    """Writer processes, each in its own folder of a directory."""

    def __init__(
        self, folder: Path, manifests: Path, count: int, seed: int, *, largest: int = 3_000_000, plain: bool = False
    ) -> None:
        self._manifests = {f"w{number}": manifests / f"w{number}.jsonl" for number in range(count)}
        self._processes = []
        for number, (name, manifest) in enumerate(self._manifests.items()):
            (folder / name).mkdir()
            command = [sys.executable, "-m", "tests.fuse_mount.crash.writer", str(folder / name), str(manifest)]
            command += [str(seed * 100 + number), str(largest), *(["plain"] if plain else [])]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def finish(self) -> dict[str, dict[str, int]]:
        """Let each end what it has begun. How often what was tried, and what failed."""
        total: dict[str, Counter[str]] = {"tried": Counter(), "failed": Counter()}
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, f"a writer ended with {process.returncode}: {said}"
            for what, counts in json.loads(said).items():
                total[what].update(counts)
        return {what: dict(counts) for what, counts in total.items()}

    def kill(self) -> None:
        """For when the test has failed."""
        for process in self._processes:
            process.kill()
            process.wait()

    def problems(self, found: Mapping[str, bytes]) -> list[str]:
        """Return what is wrong with everything that was found: keys begin with a writer's folder."""
        problems = []
        for name, manifest in self._manifests.items():
            ours = {path: data for path, data in found.items() if path.startswith(f"{name}/")}
            problems += problems_of(Ledger.read(manifest), ours)
        return problems + [f"{path}: nobody's" for path in found if path.partition("/")[0] not in self._manifests]

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


def files_below(folder: Path, *, within_s: float = 60.0) -> dict[str, bytes]:
    """Everything in a directory by its relative path. A mount that just had no store may refuse for a while."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return _read_all(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _read_all(folder: Path) -> dict[str, bytes]:
    def fail(exc: OSError) -> None:
        raise exc

    return {
        os.path.relpath(os.path.join(top, name), folder): Path(top, name).read_bytes()
        for top, _, names in os.walk(folder, onerror=fail)
        for name in names
    }


def without_markers(objects: Mapping[str, bytes]) -> dict[str, bytes]:
    """A bucket's objects without those that stand for folders."""
    return {key: data for key, data in objects.items() if key and not key.endswith("/")}


def disturb(times: int, dice: random.Random, ways: Mapping[str, Callable[[], Any]], *, apart_s: float) -> Counter[str]:
    """Do one of the ways at random moments, `apart_s` apart on average. How often which."""
    done: Counter[str] = Counter()
    for _ in range(times):
        time.sleep(dice.uniform(0, 2 * apart_s))  # the moment is the experiment
        way = dice.choice(sorted(ways))
        ways[way]()
        done[way] += 1
    return done
