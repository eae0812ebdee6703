"""An executor whose tasks wait at a gate: so that a test kills in the middle, and nowhere else.

Its functions run in the processes of engines, which import this module.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

_OPEN = 10**9
_GIVE_UP_S = 120.0


class Gate:
    """Lets so many parcels of tasks through. A folder that the processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "begun").mkdir(parents=True, exist_ok=True)

    def let(self, parcels: int = _OPEN) -> None:
        """Let so many through in all."""
        new = self.folder / f"new-{uuid.uuid4()}"
        new.write_text(str(parcels))
        new.replace(self.folder / "limit")

    def begun(self) -> int:
        """Return the number of parcels that were let through, or wait at the gate."""
        return len(list((self.folder / "begun").iterdir()))

    def wait(self) -> None:
        """Wait to be let through."""
        mine = self.folder / "begun" / f"{time.monotonic_ns():020}-{uuid.uuid4()}"
        mine.touch()
        ends = time.monotonic() + _GIVE_UP_S
        while sorted((self.folder / "begun").iterdir()).index(mine) >= int((self.folder / "limit").read_text()):
            if time.monotonic() > ends:
                raise TimeoutError("the gate stays shut")
            time.sleep(0.02)


def do_gated(folder: Path, call: Callable[..., bytes], key: str, worker: bytes, tasks: Sequence[bytes]) -> bytes:
    """Do a parcel of tasks, once it is let through."""
    Gate(folder).wait()
    return call(key, worker, tasks)


class GatedExecutor(Executor):
    """Passes calls on to another executor, and knows which tasks were in them, by their ids in the client's log."""

    _max_workers = 4

    def __init__(self, inner: Executor, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        self.sent: set[str] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.sent.update(xxh3_128_hexdigest(task) for task in args[2])
        return self._inner.submit(do_gated, self._folder, fn, *args, **kwargs)


def convert(url: str, ref: str, name: str, folder: Path) -> tuple[str, set[str]]:
    """Convert on the engine, through the gate. Return the snapshot's id and those of the tasks that were sent."""
    from datacache import api
    from datacache.executors.open import open_engine
    from datacache.settings import load_settings

    settings = load_settings()
    with open_engine(url, settings) as engine:
        gated = GatedExecutor(engine.executor, folder)
        made = api.convert(ref, to="yolo", resize="32x24", name=name, on=gated, settings=settings)
        return made.record.id, gated.sent


if __name__ == "__main__":
    convert(*sys.argv[1:4], Path(sys.argv[4]))
