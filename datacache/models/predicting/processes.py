"""Processes with a model: started, given batches, and watched.

A model's process is a Python of its own: one that was forked could not use PyTorch where its parent has. It asks its
parent for each batch of images and sends what came out of it, so a fast device gets more of them. Both go through one
pair of sockets, in which nothing but its job and short messages lies:

    ("ready", classes)    the model is loaded          ("next",)             answered by a range of images, or None
    ("outcome", BatchOutcome)  a batch is done              ("failed", error)     and then the process ends
    ("end",)              there was no batch left

No message waits for a lock, so whichever process is killed, the others see the end of a socket; and a model's process
ends with its parent, its decoders with it (docs/CONCURRENCY.md). One thread.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NamedTuple, cast

from datacache.core.errors import DatacacheError, PredictError
from datacache.core.parallel import end_with
from datacache.loaders.source import SnapshotSource
from datacache.models.predicting.results import BatchOutcome, Size

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 1.0
_KEPT = "What is done stays done: run it again."


class ModelJob(NamedTuple):
    """The work of one process with a model."""

    source: SnapshotSource
    model: str
    weights: Path | None
    device: str
    """'' for a GPU where there is one, else the processor."""
    classes: Sequence[str] | None
    size: Size | None
    decoders: int
    threads: int | None
    """On the processor; see `load_detector`."""


def run_in_processes(
    jobs: Sequence[ModelJob], batches: Iterator[range], *, ready: Callable[[Sequence[str]], None]
) -> Iterator[BatchOutcome]:
    """Yield the outcome of each batch as it comes, from a process for each job. `ready` is told the classes of each
    model that is loaded.

    `PredictError` where a process ended before its time, or a model failed; then, and when the caller stops early, all
    of them are killed. What the model raises as `UsageError` is raised here.
    """
    running: dict[Connection, subprocess.Popen[bytes]] = {}
    try:
        for job in jobs:
            _start(job, running)
        while running:
            for connection in _speaking(running):
                try:
                    kind, *content = connection.recv()
                    if kind == "next":
                        connection.send(next(batches, None))
                except (EOFError, OSError) as exc:
                    raise _ended(running[connection]) from exc
                if kind == "outcome":
                    yield content[0]
                elif kind == "ready":
                    ready(content[0])
                elif kind == "failed":
                    raise content[0]
                elif kind == "end":
                    running.pop(connection).wait()
                    connection.close()
    finally:
        for connection, process in running.items():
            process.kill()
            process.wait()
            connection.close()


def _start(job: ModelJob, running: dict[Connection, subprocess.Popen[bytes]]) -> None:
    mine, its = Pipe()
    with its:
        code = f"from {__name__} import serve; serve({its.fileno()}, {os.getpid()})"
        running[mine] = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a model prints must not get into the command's result
        )
    with suppress(OSError):  # it has ended, as whoever listens to it will see
        mine.send(sys.path)
        mine.send(job)


def _speaking(running: dict[Connection, subprocess.Popen[bytes]]) -> list[Connection]:
    """Return those that have sent something, or have ended; none of them for a while."""
    gone = [process for process in running.values() if process.poll() is not None]
    speaking = wait(list(running), 0 if gone else _LOOK_EVERY_S)
    if gone and not speaking:  # what it has started holds its end
        raise _ended(gone[0])
    return cast("list[Connection]", speaking)


def _ended(process: subprocess.Popen[bytes]) -> PredictError:
    try:
        code = process.wait(_LOOK_EVERY_S)
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
    except subprocess.TimeoutExpired:
        how = "closed its end"
    return PredictError(f"the model's process (pid {process.pid}) {how}", hint=f"Was memory short? (dmesg) {_KEPT}")


# --- in a model's process --------------------------------------------------------------------------------------------


def serve(fd: int, parent: int) -> None:
    """Do a job, as the module says."""
    end_with(parent)
    os.set_inheritable(fd, False)  # a model may start processes, too
    with Connection(fd) as connection:
        try:
            sys.path[:] = connection.recv()
            _predict(connection.recv(), connection)
            connection.send(("end",))
        except DatacacheError as exc:
            with suppress(OSError):
                connection.send(("failed", exc))
        except EOFError:
            pass
        except Exception as exc:
            log.info("a model's process fails", exc_info=True)
            error = PredictError(f"the model's process failed: {type(exc).__name__}: {exc}", hint=_KEPT)
            with suppress(OSError):
                connection.send(("failed", error))


def _predict(job: ModelJob, connection: Connection) -> None:
    from datacache.models.detectors import load_detector
    from datacache.models.predicting.stages import device_for, run_model

    device = job.device or device_for(job.model)
    detector = load_detector(
        job.model, weights=job.weights, device=device, classes=job.classes, size=job.size, threads=job.threads
    )
    connection.send(("ready", detector.classes))

    def batches() -> Iterator[range]:
        connection.send(("next",))
        while (batch := cast("range | None", connection.recv())) is not None:
            connection.send(("next",))  # ahead of its need: the parent may be at its log, and the model would wait
            yield batch

    for outcome in run_model(detector, job.source, batches(), decoders=job.decoders):
        connection.send(("outcome", outcome))
