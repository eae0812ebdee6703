"""A job of workers that are killed and stopped at random, and the check of what they wrote down.

Each worker takes tasks, writes down what it does with them, and reports; a line is on the disk before the next step is
taken. From the lines it can be told exactly whether what task queues promise was held (`check`). Used by
`tests/conformance/tasks.py`; workers are made by `fork()`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datacache.catalog.open import open_task_store
from datacache.core.errors import LeaseLostError
from datacache.loaders.tasks.queue import Span, TaskParameters, TaskQueue

_fork = multiprocessing.get_context("fork")
_END_S = 120.0
_BATCH_S = 0.04
"""The longest a batch is worked on: the job must not be through before enough has gone wrong."""


class Done(NamedTuple):
    """Record what happened in a job."""

    kills: int
    stops: int
    lines: list[dict[str, Any]]

    def count(self, what: str) -> int:
        """How many lines of this kind there are."""
        return sum(line["what"] == what for line in self.lines)


def run_job(
    url: str,
    folder: Path,
    spans: Sequence[Span],
    parameters: TaskParameters,
    *,
    workers: int,
    kills: int,
    stops: int,
    seed: int,
) -> Done:
    """Run workers until the queue `job` is through; at random they are killed (-9) and made anew, or stopped for
    longer than a lease, until that happened `kills` and `stops` times at least."""
    chance = random.Random(seed)
    store = open_task_store(url)
    TaskQueue.create(store, "job", spans, parameters)
    store.close()
    numbers = iter(range(1_000_000))

    def start() -> Any:
        process = _fork.Process(target=_work, args=(url, folder / f"{next(numbers):06}.log"))
        process.start()
        return process

    running = [start() for _worker in range(workers)]
    stopped: dict[int, float] = {}
    killed = paused = 0
    deadline = time.monotonic() + _END_S
    try:
        while any(process.is_alive() for process in running):
            time.sleep(chance.uniform(0.01, 0.06))
            now = time.monotonic()
            assert now < deadline, "the job does not come to its end"
            for pid in [pid for pid, until in stopped.items() if until < now]:
                del stopped[pid]
                with contextlib.suppress(ProcessLookupError):  # it was ending when it was stopped
                    os.kill(pid, signal.SIGCONT)
            if killed >= kills and paused >= stops:
                continue
            at = chance.randrange(workers)
            victim = running[at]
            if victim.pid in stopped or not victim.is_alive():
                continue
            if chance.random() < 0.4:
                os.kill(victim.pid, signal.SIGSTOP)
                stopped[victim.pid] = now + parameters.lease_s * chance.uniform(1.2, 2.0)
                paused += 1
            else:
                victim.kill()
                victim.join()
                killed += 1
                running[at] = start()
        assert {process.exitcode for process in running} == {0}
    finally:
        for process in running:
            process.kill()
            process.join()
    lines = [json.loads(line) for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines()]
    return Done(killed, paused, lines)


def _work(url: str, log: Path) -> None:
    queue = TaskQueue(open_task_store(url), "job")
    chance = random.Random(log.name)
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def note(what: str, **values: Any) -> None:
        # One write: a kill leaves the whole line or none of it.
        os.write(descriptor, f"{json.dumps({'what': what, **values})}\n".encode())
        os.fsync(descriptor)

    while (task := queue.fetch_shard(log.stem)) is not None:
        lease = {"epoch": task.epoch, "task": task.number, "token": task.token}
        note("leased", **lease, position=task.position)
        try:
            for batch in _batches(task.left().tolist(), chance):
                time.sleep(chance.uniform(0, _BATCH_S))
                note("used", **lease, records=[[task.name, record] for record in batch])
                queue.report_batch_done(task, len(batch))
                note("accepted", **lease, position=task.position)
        except LeaseLostError:
            note("refused", **lease, position=task.position)


def _batches(records: list[int], chance: random.Random) -> list[list[int]]:
    batches = []
    while records:
        size = chance.randint(1, 4)
        batches.append(records[:size])
        records = records[size:]
    return batches


def check(done: Done, spans: Sequence[Span], epochs: int) -> int:
    """Every record seen at least once; repeats only within leases that were lost; nothing accepted from a lost lease.
    How many records were repeated."""
    last_token: dict[tuple[int, int], int] = defaultdict(int)
    leases: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for line in done.lines:
        task = (line["epoch"], line["task"])
        last_token[task] = max(last_token[task], line["token"])
        if line["what"] == "leased":
            leases[task].append((line["token"], line["position"]))
    used: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    accepted: dict[tuple[int, int, int], int] = defaultdict(int)
    for line in done.lines:
        task = (line["epoch"], line["task"])
        if line["what"] == "used":
            for name, record in line["records"]:
                used[line["epoch"], name, record].append(line["token"])
        elif line["what"] == "accepted":
            key = (*task, line["token"])
            accepted[key] = max(accepted[key], line["position"])
    wanted = {(epoch, span.name, record) for epoch in range(epochs) for span in spans for record in range(span.count)}
    assert set(used) == wanted, "every record is seen"
    for given in leases.values():
        numbers = [token for token, _position in given]
        assert len(set(numbers)) == len(numbers), "no two leases of a task have one token"
    task_of = {
        (line["epoch"], name, record): (line["epoch"], line["task"])
        for line in done.lines
        if line["what"] == "used"
        for name, record in line["records"]
    }
    for record, tokens in used.items():
        assert len(set(tokens)) == len(tokens), "a lease uses no record twice"
        lost = [token for token in tokens if token < last_token[task_of[record]]]
        assert len(lost) >= len(tokens) - 1, "a record is repeated only if the leases it was used in were lost"
    for (epoch, number, token), position in accepted.items():
        for later, begun in leases[epoch, number]:
            # A lease that was given later begins at what was accepted until then: had a report of the earlier one been
            # accepted afterwards, it would say more.
            assert later <= token or position <= begun, "nothing is accepted from a lease that was lost"
    return sum(len(tokens) - 1 for tokens in used.values())
