"""Trains on a queue of tasks with as many workers as there are. Started by torchrun; see README.md beside this file.

torchrun --standalone --nproc-per-node=2 --max-restarts=100 examples/elastic_training/train.py --out ./elastic

torchrun starts all workers again whenever one dies, or one comes or goes. Then the first of them loads the last
checkpoint, in which model and queue belong together, and puts the queue back to it. So in the training that the model
has had, each record of each epoch was used once, whatever happened; the steps since the last checkpoint were done for
nothing, and are done again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from datacache import DatacacheError, open_tasks
from datacache.core.errors import TasksError
from datacache.loaders.tasks.queue import Span, TaskQueue
from datacache.torch import ElasticDataset, ShardDataset

RATE, WARM_UP = 5e-3, 0.05


class Numbered:
    """A data set whose samples also say their numbers, for the log of what was used."""

    def __init__(self, folder: Path) -> None:
        self.inner = ShardDataset(folder, decode="rgb", target="classification")

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, number: int) -> tuple[int, Tensor, int]:
        image, label = self.inner[number]
        return number, image, label

    def spans(self) -> list[Span]:
        return list(self.inner.spans())


class Group(NamedTuple):
    """The workers of this round of torchrun."""

    rank: int
    world: int
    device: torch.device

    def total(self, *values: float) -> list[float]:
        """Return the sums over all workers, each of which calls this."""
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def from_first(self, value: Any) -> Any:
        """Return on all workers what the first one has."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]


def main(options: argparse.Namespace, agent: int | None = None) -> None:
    threading.Thread(target=end_with, args=(agent or os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    group = join()
    path = options.out / f"{options.name}.pt"
    queue = open_tasks(options.name)
    state = group.from_first(resume(path, queue) if group.rank == 0 else None)
    queue = queue.fenced(state["generation"])  # a worker of an earlier round that still lives gets no more tasks
    log = Log(options, group, state)

    torch.manual_seed(options.seed)
    model = DistributedDataParallel(network().to(group.device))
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    if state["model"]:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    step, used = state["step"], state["used"]
    planned = queue.parameters.samples * queue.parameters.epochs

    # Each step takes the same number of records, however many workers share them: the training is then the same one.
    share = max(1, options.batch_size // group.world + (group.rank < options.batch_size % group.world))
    with ElasticDataset(Numbered(options.out / "train"), queue, batch_size=share, wait=False) as batches:
        coming, saved = iter(batches), step
        while True:
            batch = next(coming, ())  # None: nothing now. (): the queue is finished
            due = step - saved >= options.checkpoint_every
            if due:
                batches.flush()  # all of them have reported what they used up to here when they meet
            records, ended = group.total(len(batch[0]) if batch else 0, batch == ())
            if due:
                if group.rank == 0:
                    save(path, model, optimizer, queue, step=step, used=used)
                saved = step
            if not records:
                if ended == group.world:
                    break
                time.sleep(0.02)  # the last reports of the epoch are on their way
                continue

            loss = train(model, batch, records, group)
            for each in optimizer.param_groups:
                each["lr"] = rate(used / planned) * records / options.batch_size
            optimizer.step()
            step, used = step + 1, used + int(records)
            log.step(step, used, batches.epoch, batch, loss)
            time.sleep(options.slow)
    if group.rank == 0:
        save(path, model, optimizer, queue, step=step, used=used)
        log.result(step, used, evaluate(model.module, options.out / "test", group.device))
    dist.destroy_process_group()


def end_with(process: int) -> None:
    """End this process when torchrun does: where that is killed, its worker would go on, or wait for it for good."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    os._exit(1)


def join() -> Group:
    """Meet the other workers: over NCCL where there is a GPU for each, else over gloo."""
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=20))
    return Group(rank, world, torch.device("cuda", local) if cuda else torch.device("cpu"))


def resume(path: Path, queue: TaskQueue) -> dict[str, Any]:
    """Return the last checkpoint, or the beginning, with the queue put back to it."""
    if path.exists():
        state = torch.load(path, map_location="cpu")
        queue.restore_shard_from_checkpoint(state["queue"])
    else:
        state = {"model": None, "optimizer": None, "step": 0, "used": 0, "generation": 0}
        queue.reset()
    return state | {"parent": state["generation"], "generation": queue.generation}


def save(path: Path, model: nn.Module, optimizer: Any, queue: TaskQueue, *, step: int, used: int) -> None:
    """Write a checkpoint. All workers have reported what they used up to this step, and nobody reports more before the
    first one takes part in the next step."""
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "queue": queue.get_shard_checkpoint(),
        "generation": queue.generation,
        "step": step,
        "used": used,
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def train(model: nn.Module, batch: Any, records: float, group: Group) -> float:
    """Compute the gradients of the mean loss over the records of all workers. Return the sum of this worker's losses.

    DistributedDataParallel divides by the number of workers, not of records; who has none takes part with nothing."""
    model.zero_grad()
    if batch:
        _numbers, images, labels = batch
        loss = functional.cross_entropy(model(images.to(group.device)), labels.to(group.device), reduction="sum")
    else:
        loss = model(torch.zeros(1, 32, 32, 3, dtype=torch.uint8, device=group.device)).sum() * 0
    (loss * group.world / records).backward()
    return loss.item()


def rate(progress: float) -> float:
    """Return the rate of learning: it rises, then falls to nothing."""
    return RATE * min(progress / WARM_UP, (1 + math.cos(math.pi * progress)) / 2) + 1e-5


def network() -> nn.Module:
    def layer(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True))

    layers = layer(3, 16), layer(16, 32), layer(32, 48)
    return nn.Sequential(Pixels(), *layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(48, 4))


class Pixels(nn.Module):
    """Takes images as the datasets give them: uint8, n x height x width x 3."""

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def evaluate(model: nn.Module, folder: Path, device: torch.device) -> tuple[float, float]:
    """Return loss and accuracy on the images of the test."""
    dataset = ShardDataset(folder, decode="rgb", target="classification")
    found = [dataset[number] for number in range(len(dataset))]
    images = torch.stack([image for image, _label in found]).to(device)
    labels = torch.tensor([label for _image, label in found], device=device)
    outputs = model.eval()(images)
    return functional.cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).float().mean().item()


class Log:
    """A file of JSON lines of each worker of each round: which records it used in which step."""

    def __init__(self, options: argparse.Namespace, group: Group, state: dict[str, Any]) -> None:
        folder = options.out / f"{options.name}-log"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{state['generation']}-{group.rank}.jsonl"
        self._group, self._generation = group, state["generation"]
        self._result = options.out / f"{options.name}.json"
        (folder / f"{os.getpid()}.pid").touch()
        self._write(generation=state["generation"], parent=state["parent"], start=state["step"], world=group.world)

    def step(self, step: int, used: int, epoch: int, batch: Any, loss: float) -> None:
        numbers = batch[0].tolist() if batch else []
        self._write(step=step, used=used, epoch=epoch, records=numbers, loss=loss)
        if step % 20 == 0:
            total, records = self._group.total(loss, len(numbers))  # of all workers: a single one may have had none
            if self._group.rank == 0:
                print(
                    f"step {step:>5}  {self._group.world} workers  epoch {epoch}  loss {total / records:.3f}",
                    flush=True,
                )

    def result(self, step: int, used: int, scores: tuple[float, float]) -> None:
        result = {"generation": self._generation, "steps": step, "used": used, "loss": scores[0], "accuracy": scores[1]}
        self._result.write_text(json.dumps(result))
        print(f"done: {step} steps, {used:,} records; test loss {scores[0]:.4f}, accuracy {scores[1]:.3f}", flush=True)

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line | {"time": time.time()}) + "\n")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on a queue of tasks.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("elastic"), help="where the shards are, and the model goes")
    add("--name", default="run1", help="of the queue (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="records of a step, of all workers (default: %(default)s)")
    add("--checkpoint-every", type=int, default=10, metavar="STEPS", help="(default: %(default)s)")
    add("--slow", type=float, default=0.0, metavar="SECONDS", help="wait after each step")
    add("--seed", type=int, default=0, help="of the model's weights at the beginning")
    return parser.parse_args(given)


if __name__ == "__main__":
    try:
        main(arguments())
    except TasksError as error:
        sys.exit(f"error: {error.message}")
    except DatacacheError as error:
        sys.exit(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
