"""A training on this machine whose nodes come, go and are killed, and the count of what it used. For `compare.py`.

Each node is an agent in a process of its own, of `workers` workers. All processes are forked from one that has
imported PyTorch already, which this one need not do. The store in which agents meet is in a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "torch.distributed.run", "datacache.api", "datacache.torch"])


class Job:
    """The training `name`, in a queue of the same name. Close it."""

    def __init__(
        self, out: Path, name: str, *, most: int = 4, workers: int = 1, torchrun: bool = False, options: list[str]
    ) -> None:
        self.out, self.name = out, name
        self.agents: list[BaseProcess] = []
        self._torchrun = torchrun
        port, to = PROCESSES.Pipe(duplex=False)
        self._store = PROCESSES.Process(target=be_store, args=(to,), daemon=True)
        self._store.start()
        endpoint = f"127.0.0.1:{port.recv()}"
        train = ["--out", str(out), "--name", name, *options]
        if torchrun:
            nodes = [f"--nnodes=1:{most}", f"--nproc-per-node={workers}", "--max-restarts=1000"]
            nodes += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={name}"]
            self._command = [*nodes, str(HERE / "train.py"), *train]
        else:
            nodes = [f"--nodes=1:{most}", f"--workers={workers}", f"--endpoint={endpoint}", f"--id={name}"]
            self._command = [*nodes, "--", *train]
        self._log = out / f"{name}.txt"

    def add(self) -> None:
        """Start another agent, which joins in."""
        agent = PROCESSES.Process(target=be_agent, args=(self._torchrun, self._command, self._log))
        agent.start()
        self.agents.append(agent)

    def kill_agent(self, number: int) -> None:
        """Kill an agent. Its worker ends with it."""
        process = self.agents.pop(number)
        process.kill()
        process.join()

    def kill_worker(self, number: int) -> bool:
        """Kill the worker of an agent, which starts another one. Return False where it has none now."""
        for worker in self._workers(self.agents[number].pid):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                return True
        return False

    def _workers(self, agent: int) -> list[int]:
        """Return the processes below an agent that have noted themselves down as workers."""
        noted = {int(path.stem) for path in (self.out / f"{self.name}-log").glob("*.pid")}
        return [process for process in below(agent) if process in noted]

    def used(self) -> int:
        """Return how many records the training has used, as far as its log says."""
        return max((line.get("used", 0) for line in self.lines()), default=0)

    def world(self) -> int:
        """Return of how many workers the last round is; 0 before the first."""
        begun = [line for line in self.lines() if "start" in line]
        return max(begun, key=lambda line: line["time"])["world"] if begun else 0

    def lines(self) -> list[dict[str, Any]]:
        return read_log(self.out, self.name)

    def finished(self) -> bool:
        return (self.out / f"{self.name}.json").exists()

    def wait(self, until: Callable[[], bool], *, limit_s: float = 600.0) -> None:
        """Wait until something has come about, or the training is over."""
        end = time.monotonic() + limit_s
        while not until() and not self.finished():
            if time.monotonic() > end or not any(agent.is_alive() for agent in self.agents):
                raise TimeoutError(f"{self.name} does not go on: see {self._log}")
            time.sleep(0.1)

    def finish(self, *, limit_s: float = 600.0) -> dict[str, Any]:
        """Wait for the end. Return the result."""
        self.wait(self.finished, limit_s=limit_s)
        for agent in self.agents:
            agent.join(5)  # at the end an agent waits for all others of its round, for minutes if one was killed
        return json.loads((self.out / f"{self.name}.json").read_text())

    def close(self) -> None:
        for agent in self.agents:
            for process in (*below(agent.pid), agent.pid) if agent.is_alive() else ():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            agent.join()
        self._store.kill()
        self._store.join()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def be_store(to: Connection) -> None:
    """Keep the store in which agents meet, and tell its port."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    to.send(store.port)
    if parent := multiprocessing.parent_process():
        parent.join()


def be_agent(torchrun: bool, command: list[str], log: Path) -> None:
    """Start workers as `command` says, in this process, which writes to a log of its own."""
    import launch
    from torch.distributed import run

    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if torchrun:
        settings = ",".join(f"{key}={value}" for key, value in launch.RENDEZVOUS.items())
        run.main([f"--rdzv-conf={settings}", *command])
    else:
        launch.main(launch.arguments(command))


def make_queue(arguments: list[str]) -> None:
    """Draw the data and make a queue, in a process that has imported everything already."""
    process = PROCESSES.Process(target=be_preparer, args=(arguments,))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"prepare.py ended with exit code {process.exitcode}")


def be_preparer(arguments: list[str]) -> None:
    import prepare

    prepare.main(prepare.arguments(arguments))


def below(process: int) -> list[int]:
    """Return the children of a process, and theirs."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *below(child))]


def read_log(out: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of all workers' logs, each with its round of torchrun. One that a kill cut short is left out."""
    lines = []
    for path in (out / f"{name}-log").glob("*.jsonl"):
        generation, _, rank = path.stem.partition("-")
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                lines.append({"generation": int(generation), "rank": int(rank)} | json.loads(line))
    return lines


class Used(NamedTuple):
    """How often records were used."""

    records: int
    """Of all epochs."""
    rounds: int
    """How often the workers were started together."""
    missed: int
    """Records that are in no step of the training that the model has had."""
    repeated: int
    """Records that are in more than one of them."""
    again: int
    """Uses in steps that were lost with a killed worker."""
    most: int
    """The most uses of one record, lost ones included."""


def count(out: Path, name: str, samples: int, epochs: int) -> Used:
    """Count the uses of all records of a training that is finished."""
    lines = read_log(out, name)
    begun = {line["generation"]: line for line in lines if "start" in line and line["rank"] == 0}
    # The training that the model has had: the last round, before its first step what its checkpoint's round had done …
    generation = json.loads((out / f"{name}.json").read_text())["generation"]
    until: dict[int, float] = {}
    end = float("inf")
    while generation:
        until[generation], end = end, begun[generation]["start"]
        generation = begun[generation]["parent"]
    had: Counter[tuple[int, int]] = Counter()
    all_uses: Counter[tuple[int, int]] = Counter()
    for line in lines:
        uses = [(line["epoch"], number) for number in line.get("records", ())]
        all_uses.update(uses)
        if uses and begun[line["generation"]]["start"] < line["step"] <= until.get(line["generation"], -1):
            had.update(uses)
    return Used(
        records=samples * epochs,
        rounds=len(begun),
        missed=samples * epochs - len(had),
        repeated=sum(times > 1 for times in had.values()),
        again=all_uses.total() - had.total(),
        most=max(all_uses.values()),
    )
