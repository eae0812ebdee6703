"""Checkpoints of a task queue: JSON text, small enough to go beside the model's.

Used by `tasks`; pure functions. What is done is a bitmap, so a checkpoint of 100,000 tasks has some kilobytes and the
positions of the tasks that are being done. Tasks of earlier epochs are in it that had failed, and that were put back
since and are not done; each with the latest of its errors. In the database it is kept packed.

    {"version": 1, "queue", "digest", "records", "tasks", "shuffle", "seed", "epoch", "done": base64 of a packed bitmap,
     "positions": {number: records}, "failed": [{"epoch", "number", "position", "errors"}],
     "put_back": [the same]}
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datacache.catalog.tasks.base import DONE, FAILED, TODO, NewTask, TaskState
from datacache.core.errors import TasksError
from datacache.loaders.tasks.plan import TaskParameters

_VERSION = 1
_LARGEST = 2**31


def encode_checkpoint(
    name: str,
    parameters: TaskParameters,
    epoch: int,
    tasks: Iterable[TaskState],
    *,
    failed: Iterable[TaskState],
    put_back: Iterable[TaskState],
) -> str:
    """Return as JSON text the epoch, which of its tasks are done, how far the others are, and of `failed` and
    `put_back` (seen at different moments; the former counts) the tasks of earlier epochs."""
    done = np.zeros(parameters.tasks, np.uint8)
    positions: dict[str, int] = {}
    for task in tasks:
        if task.state == DONE:
            done[task.number] = 1
        elif task.position:
            positions[str(task.number)] = task.position
    there = {(t.epoch, t.number): t for t in (*put_back, *failed) if t.epoch < epoch}
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
        "failed": [_earlier(task) for task in there.values() if task.state == FAILED],
        "put_back": [_earlier(task) for task in there.values() if task.state != FAILED],
    }
    return json.dumps(saved, separators=(",", ":"))


def check_checkpoint(text: str, parameters: TaskParameters) -> int:
    """Return the epoch of a checkpoint; raise `TasksError` if it is none, or of a queue that was cut or ordered in
    another way."""
    try:
        saved: dict[str, Any] = json.loads(text)
        version, epoch, count = saved["version"], saved["epoch"], saved["tasks"]
        there = {name: saved[name] for name in ("digest", "records", "tasks", "shuffle", "seed")}
        if version == _VERSION:
            _check_parts(saved, count)
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
    """Return the tasks of an epoch (all, by number) as they were when a checkpoint was written: done, or to do from
    their positions on; and those of earlier epochs that had failed. `text` is one that `check_checkpoint` has
    passed."""
    saved = json.loads(text)
    restored = list(tasks)
    for number in np.flatnonzero(_done(saved, len(tasks))).tolist():
        restored[number] = tasks[number]._replace(state=DONE, position=tasks[number].records)
    for number, position in ((int(key), value) for key, value in saved["positions"].items()):
        restored[number] = tasks[number]._replace(position=min(position, tasks[number].records - 1))
    for state, earlier in ((FAILED, saved["failed"]), (TODO, saved.get("put_back", []))):
        for there in earlier:
            if there["epoch"] < epoch:
                same = tasks[there["number"]]._replace(epoch=there["epoch"], place=there["number"], state=state)
                position = min(there["position"], same.records - 1)
                restored.append(same._replace(position=position, errors=tuple(there["errors"])))
    return restored


def _earlier(task: TaskState) -> dict[str, Any]:
    return {"epoch": task.epoch, "number": task.number, "position": task.position, "errors": list(task.errors[-1:])}


def _check_parts(saved: dict[str, Any], count: int) -> None:
    """Raise `ValueError` (or what else comes of it) unless tasks can be made of all of it."""
    done, most = _done(saved, count), saved["records"]
    positions = {int(number): position for number, position in saved["positions"].items()}
    earlier = [*saved["failed"], *saved.get("put_back", [])]
    fits = (
        _is_number(saved["epoch"], _LARGEST)
        and [str(number) for number in positions] == list(saved["positions"])
        and all(_is_number(number, count) and not done[number] for number in positions)
        and all(_is_number(position, most + 1) for position in positions.values())
        and all(
            _is_number(there["epoch"], _LARGEST)
            and _is_number(there["number"], count)
            and _is_number(there["position"], most + 1)
            and isinstance(there["errors"], list)
            and all(isinstance(error, str) for error in there["errors"])
            for there in earlier
        )
        and len({(there["epoch"], there["number"]) for there in earlier}) == len(earlier)
    )
    if not fits:
        raise ValueError("its parts do not fit")


def _done(saved: dict[str, Any], count: int) -> NDArray[np.uint8]:
    size = -(-count // 8)
    packed = zlib.decompressobj().decompress(base64.b64decode(saved["done"]), size + 1)
    if len(packed) != size:
        raise ValueError("its parts do not fit")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count)


def _is_number(value: object, end: int) -> bool:
    return type(value) is int and 0 <= value < end
