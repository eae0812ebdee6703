"""Checkpoints of a task queue: JSON text, small enough to go beside the model's.

Used by `tasks`; pure functions. What is done is a bitmap, so a checkpoint of 100,000 tasks has some kilobytes and the
positions of the tasks that are being done.

    {"version": 1, "queue", "digest", "records", "tasks", "shuffle", "seed", "epoch", "done": base64 of a packed bitmap,
     "positions": {number: records}, "failed": [{"epoch", "number", "position", "errors"}]}
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from datacache.catalog.tasks import DONE, FAILED, NewTask, TaskState
from datacache.core.errors import TasksError
from datacache.loaders.task_plan import TaskParameters

_VERSION = 1


def encode_checkpoint(
    name: str, parameters: TaskParameters, epoch: int, tasks: Iterable[TaskState], failed: Iterable[TaskState]
) -> str:
    """JSON text: the epoch, which of its tasks are done, how far the others are, and what has failed before."""
    done = np.zeros(parameters.tasks, np.uint8)
    positions: dict[str, int] = {}
    for task in tasks:
        if task.state == DONE:
            done[task.number] = 1
        elif task.position:
            positions[str(task.number)] = task.position
    saved = {
        "version": _VERSION,
        "queue": name,
        "digest": parameters.digest,
        "records": parameters.records,
        "tasks": parameters.tasks,
        "shuffle": parameters.shuffle,
        "seed": parameters.seed,
        "epoch": epoch,
        "done": base64.b64encode(zlib.compress(np.packbits(done).tobytes())).decode(),
        "positions": positions,
        "failed": [
            {"epoch": t.epoch, "number": t.number, "position": t.position, "errors": list(t.errors)} for t in failed
        ],
    }
    return json.dumps(saved, separators=(",", ":"))


def check_checkpoint(text: str, parameters: TaskParameters) -> int:
    """The epoch of a checkpoint; `TasksError` if it is none, or of a queue that was cut or ordered in another way."""
    try:
        saved: dict[str, Any] = json.loads(text)
        version, epoch, count = saved["version"], saved["epoch"], saved["tasks"]
        there = {name: saved[name] for name in ("digest", "records", "tasks", "shuffle", "seed")}
        if version == _VERSION:
            bits = zlib.decompress(base64.b64decode(saved["done"]))
            whole = len(bits) == -(-count // 8) and isinstance(epoch, int) and epoch >= 0
            numbers = [int(number) for number in saved["positions"]] + [failed["number"] for failed in saved["failed"]]
            if not whole or not all(0 <= number < count for number in numbers):
                raise ValueError("its parts do not fit")
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as exc:
        raise TasksError(f"this is no checkpoint of a task queue, or a damaged one: {exc}") from exc
    if version != _VERSION:
        raise TasksError(f"the checkpoint is of version {version}, this datacache knows {_VERSION}")
    for name, value in there.items():
        if value != getattr(parameters, name):
            raise TasksError(
                f"the checkpoint is of another queue: {name} is {value!r} there and {getattr(parameters, name)!r} here",
                hint="Make the queue with the same data set, --records, --shuffle and --seed.",
            )
    if epoch >= parameters.epochs:
        raise TasksError(f"the checkpoint is in epoch {epoch}, and the queue has {parameters.epochs}")
    return int(epoch)


def with_checkpoint(tasks: Sequence[NewTask], epoch: int, text: str) -> list[NewTask]:
    """The tasks of an epoch (all, by number) as they were when a checkpoint was written: done, or to do from their
    positions on; and those of earlier epochs that had failed. `text` is one that `check_checkpoint` has passed."""
    saved = json.loads(text)
    restored = list(tasks)
    done = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(saved["done"])), np.uint8), count=len(tasks))
    for number in np.flatnonzero(done).tolist():
        restored[number] = tasks[number]._replace(state=DONE, position=tasks[number].records)
    for number, position in ((int(key), value) for key, value in saved["positions"].items()):
        restored[number] = tasks[number]._replace(position=max(0, min(position, tasks[number].records - 1)))
    for failed in saved["failed"]:
        if failed["epoch"] < epoch:
            same = tasks[failed["number"]]._replace(epoch=failed["epoch"], place=failed["number"], state=FAILED)
            restored.append(same._replace(position=failed["position"], errors=tuple(failed["errors"])))
    return restored
