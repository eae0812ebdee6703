"""Do the same work by processes of this machine and on engines: `dsctl convert --resize`, then `dsctl shard`.

A Dask with a process for each worker, a Ray, and workers of the queue run on this machine, each only while it is
measured. Each run has a home of its own, which the engine's processes share, so annotations are read, images decoded
and stored, and shards written each time. CPU seconds are those of the command, the engine's processes and the daemon.
With `--kill` two workers are killed in each conversion on an engine (Dask gets two more before, Ray and the queue start
others), and the result is compared as ever.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.harness import DSCTL, Home, ResultTable, Workspace, benchmark, ratio, rounds_of
from benchmarks.usage import measured
from dataset_cli.demo.faces import draw_faces
from tests.servers import DaskCluster, QueueWorkers, RayCluster

Cost = tuple[float, float, float]
"""Seconds, those of the processors, and those of the command's alone."""
_KILL_AFTER_S = 3.0
_LOOK_S = 0.5
_RESTS, _REST_CPU_S = 3, 0.3


class _Contestants:
    """Does the work anywhere, and expects the same snapshot and shards each time."""

    def __init__(self, work: Workspace, images: Path, processes: int, kill: bool) -> None:
        self._work, self._images, self._processes, self._kill = work, images, processes, kill
        self._runs = 0
        self._made: set[str] = set()

    def here(self) -> list[Cost]:
        return self._run(["--processes", str(self._processes)], list, list)

    def on_dask(self) -> list[Cost]:
        home, workers = self._home(), self._processes + 2 * self._kill
        with DaskCluster(self._work.folder(f"dask-{self._runs}"), workers=workers, settings=_settings(home)) as dask:
            _settle(dask.all_pids)
            return self._run(["--on", dask.url], dask.all_pids, lambda: dask.pids[1:], home)

    def on_ray(self) -> list[Cost]:
        home = self._home()
        with RayCluster(self._work.folder(f"ray-{self._runs}"), cpus=self._processes, settings=_settings(home)) as ray:
            _settle(ray.all_pids)
            return self._run(["--on", ray.url], ray.all_pids, ray.workers, home)

    def on_queue(self) -> list[Cost]:
        home = self._home()
        with QueueWorkers(self._work.folder(f"queue-{self._runs}"), home.env, workers=self._processes) as queue:
            _settle(queue.all_pids)
            return self._run(["--on", "queue"], queue.all_pids, queue.workers, home)

    def _home(self) -> Home:
        self._runs += 1
        home = self._work.home(f"home-{self._runs}")
        home.snapshot("faces", self._images)
        return home

    def _run(
        self,
        how: list[str],
        pids: Callable[[], list[int]],
        workers: Callable[[], list[int]],
        home: Home | None = None,
    ) -> list[Cost]:
        home = home or self._home()
        out = self._work.folder(f"shards-{self._runs}")
        converted = [DSCTL, "convert", "faces", "--to", "yolo", "--resize", "128x96", "--as", "small", *how]
        sharded = [DSCTL, "shard", "small", "--to", out, "--max-size", "2MB", *how]
        costs = []
        for command in (converted, sharded):
            if self._kill and command is converted:
                threading.Timer(_KILL_AFTER_S, lambda: [os.kill(pid, signal.SIGKILL) for pid in workers()[:2]]).start()
            before = {pid: _cpu_s(pid) for pid in home.processes()}
            with _Meter(pids) as meter:
                used = measured(command, env=home.env)
            daemons = set(home.processes()) - set(pids())
            daemon_s = sum(_cpu_s(pid) - before.get(pid, 0.0) for pid in daemons)
            costs.append((used.seconds, used.cpu_s + meter.cpu_s + daemon_s, used.cpu_s))
        made = json.loads((out / "shards.json").read_text())["shards"]
        self._made.add(json.dumps([shard["digest"] for shard in made]))  # ids of snapshots name where objects are
        if len(self._made) > 1:
            raise RuntimeError("the shards differ")
        home.close()
        return costs


def _settings(home: Home) -> dict[str, str]:
    return {name: value for name, value in home.env.items() if name.startswith("DATACACHE_")}


class _Meter:
    """CPU seconds of processes that come and go. What one takes after it was looked at last is missing."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids, self._ended = pids, threading.Event()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch)

    @property
    def cpu_s(self) -> float:
        return sum(seconds - self._first[pid] for pid, seconds in self._last.items())

    def __enter__(self) -> _Meter:
        self._first = {pid: _cpu_s(pid) for pid in self._pids()}
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        for pid in self._pids():
            self._first.setdefault(pid, 0.0)
            self._last[pid] = max(_cpu_s(pid), self._last.get(pid, 0.0))  # one that has just ended has none


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _settle(pids: Callable[[], list[int]]) -> None:
    """Wait until an engine that has just started rests."""
    rests = 0
    while rests < _RESTS:
        with _Meter(pids) as meter:
            time.sleep(1)
        rests = rests + 1 if meter.cpu_s < _REST_CPU_S else 0


def main() -> None:
    """Run it."""
    with benchmark(__doc__, images=(20_000, 200), rounds=(3, 1), processes=(2, 2), kill=False) as (args, work):
        images = work.folder("images")
        draw_faces(images, count=args.images, width=160, height=120)
        ways = _Contestants(work, images, args.processes, args.kill)
        found = rounds_of(
            {"local": ways.here, "dask": ways.on_dask, "queue": ways.on_queue, "ray": ways.on_ray}, args.rounds
        )
        table = ResultTable(
            f"{args.images:,} images of 160x120, {args.processes} processes",
            *("where", "convert s", "times local", "CPU s", "command's"),
            *("shard s", "times local", "CPU s", "command's"),
        )
        local = _medians(found["local"])
        for name, costs in found.items():
            row: list[float | str | None] = []
            for (seconds, cpu_s, command_s), (local_s, _, _) in zip(_medians(costs), local, strict=True):
                row += [seconds, ratio(seconds, local_s), cpu_s, command_s]
            table.row(name, *row)
        table.print()


def _medians(runs: list[list[Cost]]) -> list[Cost]:
    """Return the cost of each command."""
    commands = zip(*runs, strict=True)
    return [
        (median(s for s, _, _ in one), median(s for _, s, _ in one), median(s for _, _, s in one)) for one in commands
    ]


if __name__ == "__main__":
    main()
