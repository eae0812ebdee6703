"""One contender in a process of its own, in its library's virtual environment; started by `benchmarks/contenders.py`.

    python -m benchmarks.loader_peers write MODULE IMAGES TARGET
    python -m benchmarks.loader_peers read MODULE SOURCE PLAN     PLAN: a JSON object, see plan.py

The second imports the library and then does what the lines of its standard input say, answering each with one line of
JSON; at the end of the input it ends. `open` makes the loader, `epoch N` goes through epoch N, `digest N` does so too
and adds up the samples' digests. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.loader_peers.plan import Loader, ReadPlan, count, digest, payloads, total


def main() -> None:
    what, name, source, argument = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    module = import_module(f"benchmarks.loader_peers.{name}")
    if what == "write":
        module.write(Path(source), Path(argument))
        return
    plan = ReadPlan(**json.loads(argument))
    loader: Loader | None = None
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command, *words = line.split()
        start = time.perf_counter()
        answer: dict[str, Any] = {}
        if command == "open":
            loader = module.open_loader(source, plan)
        else:
            assert loader is not None
            answer = {"epoch": _epoch, "digest": _digest}[command](loader, int(words[0]))
        print(json.dumps({"seconds": time.perf_counter() - start, **answer}), file=answers)


def _epoch(loader: Loader, number: int) -> dict[str, Any]:
    samples = size_bytes = 0
    for batch in loader(number):
        counted = count(batch)
        samples += counted.samples
        size_bytes += counted.size_bytes
    return {"samples": samples, "size_bytes": size_bytes}


def _digest(loader: Loader, number: int) -> dict[str, Any]:
    return {"digest": total(digest(payload) for batch in loader(number) for payload in payloads(batch))}


if __name__ == "__main__":
    main()
