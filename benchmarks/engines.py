"""Do the same work by processes of this machine and on engines: `dsctl convert --resize`, then `dsctl shard`.

A Dask with a process for each worker, a Ray, and workers of the queue run on this machine. Each run has a home of its
own, so annotations are read, images decoded and stored, and shards written each time. CPU seconds are those of the
command and of the engine's processes. With `--kill` two workers are killed in each conversion on an engine (Dask gets
two more before, Ray and the queue start others), and the result is compared as ever.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.harness import DSCTL, Home, ResultTable, Workspace, benchmark, ratio, rounds_of
from benchmarks.usage import measured
from dataset_cli.demo.faces import draw_faces
from tests.servers import DaskCluster, QueueWorkers, RayCluster

Cost = tuple[float, float]
"""Seconds, and those of the processors."""
_KILL_AFTER_S = 3.0


class _Contestants:
    """Does the work anywhere, and expects the same snapshot and shards each time."""

    def __init__(self, work: Workspace, images: Path, processes: int, kill: bool) -> None:
        self._work, self._images, self._processes, self._kill = work, images, processes, kill
        self._runs = 0
        self._made: set[str] = set()

    def here(self) -> list[Cost]:
        return self._run(["--processes", str(self._processes)], list, list)

    def on(self, url: str, pids: Callable[[], list[int]], workers: Callable[[], list[int]]) -> list[Cost]:
        return self._run(["--on", url], pids, workers)

    def on_queue(self) -> list[Cost]:
        home = self._home()
        with QueueWorkers(self._work.folder(f"queue-{self._runs}"), home.env, workers=self._processes) as queue:
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
            before = sum(map(_cpu_s, pids()))
            used = measured(command, env=home.env)
            costs.append((used.seconds, used.cpu_s + sum(map(_cpu_s, pids())) - before))
        made = json.loads((out / "shards.json").read_text())["shards"]
        self._made.add(json.dumps([shard["digest"] for shard in made]))  # ids of snapshots name where objects are
        if len(self._made) > 1:
            raise RuntimeError("the shards differ")
        home.close()
        return costs


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with its children that have ended


def main() -> None:
    """Run it."""
    with (
        benchmark(__doc__, images=(20_000, 200), rounds=(3, 1), processes=(2, 2), kill=False) as (args, work),
        ExitStack() as started,
    ):
        images = work.folder("images")
        draw_faces(images, count=args.images, width=160, height=120)
        dask = started.enter_context(DaskCluster(work.folder("dask"), workers=args.processes + 2 * args.kill))
        ray = started.enter_context(RayCluster(work.folder("ray"), cpus=args.processes))
        ways = _Contestants(work, images, args.processes, args.kill)
        found = rounds_of(
            {
                "local": ways.here,
                "dask": lambda: ways.on(dask.url, dask.all_pids, lambda: dask.pids[1:]),
                "queue": ways.on_queue,
                "ray": lambda: ways.on(ray.url, ray.all_pids, ray.workers),
            },
            args.rounds,
        )
        table = ResultTable(
            f"{args.images:,} images of 160x120, {args.processes} processes",
            *("where", "convert s", "times local", "CPU s", "shard s", "times local", "CPU s"),
        )
        local = _medians(found["local"])
        for name, costs in found.items():
            (convert_s, convert_cpu), (shard_s, shard_cpu) = _medians(costs)
            table.row(
                *(name, convert_s, ratio(convert_s, local[0][0]), convert_cpu),
                *(shard_s, ratio(shard_s, local[1][0]), shard_cpu),
            )
        table.print()


def _medians(runs: list[list[Cost]]) -> list[Cost]:
    return [(median(run[n][0] for run in runs), median(run[n][1] for run in runs)) for n in range(2)]


if __name__ == "__main__":
    main()
