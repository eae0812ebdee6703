"""Trains with a parameter server: workers come for the model when they like, and bring gradients when they have them.

python examples/elastic_training/parameter_server.py --out ./elastic --name run1 --workers 3

The server is a process for each worker, as PostgreSQL has one for each client. These share the model and what the
optimizer knows. Each makes a group of two with its worker, by torch.distributed.rpc: nobody can join a larger group in
which somebody was killed. So a worker's death ends no process but the server's for it, and another pair comes instead.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import train
from torch import Tensor
from torch.distributed import rpc
from torch.nn import functional

from datacache import DatacacheError, open_tasks
from datacache.torch import ElasticDataset

PROCESSES = multiprocessing.get_context("fork")  # from a process that has one thread


class Parameters:
    """The model, in memory that the server's processes share. A lock guards all of it."""

    def __init__(self, options: argparse.Namespace, planned: int) -> None:
        torch.manual_seed(options.seed)
        self.model = train.network().share_memory()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), train.RATE)
        for parameter in self.model.parameters():
            state = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.zeros(()), **state}
            for tensor in self.optimizer.state[parameter].values():
                tensor.share_memory_()
        self.planned, self.used, self.lock = planned, PROCESSES.Value("q", 0, lock=False), PROCESSES.Lock()
        self.closed = False
        self.log = options.out / f"{options.name}-server.jsonl"
        self.log.write_text("")

    @contextmanager
    def held(self) -> Iterator[None]:
        with self.lock:
            if self.closed:
                raise RuntimeError("the worker has ended")
            yield

    def values(self) -> list[Tensor]:
        with self.held():
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def apply(self, gradients: list[Tensor], epoch: int, records: list[int]) -> None:
        """Take a step with a worker's gradients, which may be of a model that is some steps old."""
        with self.held():
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            for group in self.optimizer.param_groups:
                group["lr"] = train.rate(min(self.used.value / self.planned, 1.0))
            self.optimizer.step()
            self.used.value += len(records)
            with self.log.open("a") as file:
                file.write(json.dumps({"epoch": epoch, "records": records}) + "\n")


SERVED: list[Parameters] = []
"""The model, in the processes of the server."""


def values() -> list[Tensor]:
    """Return the model. A worker calls this, in the server."""
    return SERVED[0].values()


def apply(gradients: list[Tensor], epoch: int, records: list[int]) -> list[Tensor]:
    """Take a step, and return the model after it. A worker calls this, in the server."""
    SERVED[0].apply(gradients, epoch, records)
    return SERVED[0].values()


def serve(meeting: Path, worker: int) -> None:
    """Answer one worker until it ends, in a process of its own."""
    threading.Thread(target=train.end_with, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=join, args=("server", meeting), daemon=True).start()
    select.select([os.pidfd_open(worker)], [], [])
    with SERVED[0].held():
        SERVED[0].closed = True  # no step begins, and none is in progress
    os._exit(0)


def work(meeting: Path, options: argparse.Namespace) -> None:
    """Compute gradients until the queue is finished, in a process of its own."""
    threading.Thread(target=train.end_with, args=(os.getppid(),), daemon=True).start()
    join("worker", meeting)
    model, newest = train.network(), rpc.rpc_sync("server", values)
    dataset = train.Numbered(options.out / "train")
    with ElasticDataset(dataset, open_tasks(options.name), batch_size=options.batch_size) as batches:
        for numbers, images, labels in batches:
            for parameter, value in zip(model.parameters(), newest, strict=True):
                parameter.data = value
            loss = functional.cross_entropy(model(images), labels)
            gradients = list(torch.autograd.grad(loss, list(model.parameters())))
            newest = rpc.rpc_sync("server", apply, args=(gradients, batches.epoch, numbers.tolist()))
    os._exit(0)  # rpc.shutdown would wait for the server


def join(name: str, meeting: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}",
        rpc_timeout=60,
        _transports=["uv"],  # the other one, of shared memory, keeps a core busy while it waits
    )
    rpc.init_rpc(name, rank=("server", "worker").index(name), world_size=2, rpc_backend_options=options)


def main(options: argparse.Namespace, folder: Path) -> int:
    torch.set_num_threads(1)
    queue = open_tasks(options.name)
    parameters = Parameters(options, queue.parameters.samples * queue.parameters.epochs)
    SERVED.append(parameters)
    done, started, kills = Counter[tuple[int, int]](), 0, 0
    workers: list[multiprocessing.process.BaseProcess] = []
    while any(worker.exitcode is None for worker in workers) or not started:
        workers = [worker for worker in workers if not worker.exitcode]  # without those that were killed
        while len(workers) < options.workers:
            started += 1
            meeting = folder / f"{started}"
            workers.append(PROCESSES.Process(target=work, args=(meeting, options)))
            workers[-1].start()
            PROCESSES.Process(target=serve, args=(meeting, workers[-1].pid), daemon=True).start()
        if kills < options.kills and parameters.used.value > (kills + 1) / (options.kills + 1) * parameters.planned:
            workers[kills % options.workers].kill()
            kills += 1
        time.sleep(0.05)
    for line in map(json.loads, parameters.log.read_text().splitlines()):
        done.update((line["epoch"], number) for number in line["records"])
    loss, accuracy = train.evaluate(parameters.model, options.out / "test", torch.device("cpu"))
    missed, again = parameters.planned - len(done), done.total() - len(done)
    print(f"{kills} workers killed, {started} started; {missed} records missed, {again} used again")
    print(f"done: {parameters.used.value:,} records; test loss {loss:.4f}, accuracy {accuracy:.3f}")
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with a parameter server.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("elastic"), help="where prepare.py has put the shards (default: %(default)s)")
    add("--name", default="run1", help="of the queue (default: %(default)s)")
    add("--workers", type=int, default=2, help="(default: %(default)s)")
    add("--batch-size", type=int, default=64, help="records of a step of one worker (default: %(default)s)")
    add("--kills", type=int, default=0, help="how many workers to kill on the way (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the model's weights at the beginning")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        with TemporaryDirectory() as folder:
            sys.exit(main(arguments(), Path(folder)))
    except DatacacheError as error:
        sys.exit(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
