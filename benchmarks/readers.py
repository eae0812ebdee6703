"""Readers in processes of their own, for what happens to them beside others (`fairness`, `outages`, `cluster`).

A child is `python -m benchmarks.readers WAY DATASET COMPARED FIRST STEP THREADS PAUSE_S SEED`: it says that it is
ready, begins when it is told, and prints its processor time and the seconds of each of its reads.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore

from benchmarks.harness import Home, ToldProcess, timed
from benchmarks.peers import bare_store
from datacache import api


class Readers:
    """Processes that read a part of a snapshot each: all of it once, or with pauses (of 0 s: none) until `end`, each
    thread then all of the part.

    A way is "api", "bare" for obstore and the bucket of the data set's name, or the folder of a mount.
    """

    def __init__(
        self,
        home: Home,
        dataset: str,
        ways: Sequence[str],
        *,
        threads: int = 1,
        pause_s: float | None = None,
        seed: int = 0,
        compared: Path | str = "",
    ) -> None:
        """With `compared`, each read is compared with the file of this folder, and wrong bytes end the benchmark."""
        numbers = [str(number) for number in (len(ways), threads, -1.0 if pause_s is None else pause_s, seed)]
        command = (sys.executable, "-m", "benchmarks.readers")
        self._children = [
            ToldProcess(*home.enter, *command, way, dataset, compared, str(first), *numbers, env=home.env)
            for first, way in enumerate(ways)
        ]
        self.cpu_s = 0.0
        """The processor time of all from the beginning to the end, once they have come to it."""

    def __enter__(self) -> Readers:
        for child in self._children:  # until all have opened the snapshot
            child.answer()
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children:
            child.close()

    def begin(self) -> None:
        """Have all begin."""
        for child in self._children:
            child.say("begin")

    def expect_alive(self) -> None:
        """End the benchmark if one of them has failed."""
        if any(child.ended for child in self._children):
            raise SystemExit("a reader has failed")

    def end(self) -> list[list[float]]:
        """Return the seconds of each one's reads, when it has come to an end."""
        for child in self._children:
            child.hang_up()
        cpu_s, took = zip(*(json.loads(child.answer()) for child in self._children), strict=True)
        self.cpu_s = sum(cpu_s)
        return list(took)


def main() -> None:
    way, dataset, compared, *numbers = sys.argv[1:]
    first, step, threads = map(int, numbers[:3])
    pause_s, seed, ended = float(numbers[3]), int(numbers[4]), threading.Event()
    with api.open_snapshot(dataset) as snapshot:
        names = sorted(snapshot.paths())[first::step]
        read: Callable[[str], object] = snapshot.read
        if way == "bare":
            store = bare_store(dataset)
            read = lambda name: obstore.get(store, name).bytes()  # noqa: E731
        elif way != "api":
            read = lambda name: Path(way, name).read_bytes()  # noqa: E731
        print("ready", flush=True)
        sys.stdin.readline()
        begun_s = time.process_time()
        if pause_s >= 0:
            threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()

        def read_one(name: str) -> None:
            got = read(name)
            if compared and got != Path(compared, name).read_bytes():
                raise SystemExit(f"wrong bytes of {name}")

        def read_all(number: int) -> list[float]:
            mine, took = names if pause_s >= 0 else names[number::threads], []
            order = random.Random(1_000_000 * seed + 1000 * first + number).sample(mine, len(mine))
            for name in itertools.cycle(order) if pause_s >= 0 else order:
                took.append(timed(lambda name=name: read_one(name)))
                if pause_s >= 0 and ended.wait(pause_s):
                    break
            return took

        with ThreadPoolExecutor(threads) as pool:
            reads = [seconds for took in pool.map(read_all, range(threads)) for seconds in took]
            print(json.dumps([time.process_time() - begun_s, reads]))


if __name__ == "__main__":
    main()
