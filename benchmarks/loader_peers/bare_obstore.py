"""obstore alone: objects fetched with so many requests at a time, and thrown away.

`source`: a bucket at `AWS_ENDPOINT_URL`. Options: `concurrency`; `folder`, the local folder that is the bucket, for
the names and sizes; `piece_bytes`, to fetch larger objects in ranges of so many bytes; `samples`, how many are in all
objects together (by default each is one).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from benchmarks.loader_peers.plan import Counted, Loader, ReadPlan
from benchmarks.peers import bare_store


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Open a bucket. An epoch is one batch that says how much was fetched, in the order of the names."""
    store = bare_store(source)
    options = plan.options
    piece_bytes = options.get("piece_bytes", 0)
    wanted: list[tuple[str, int, int]] = []  # an end of 0: all of it
    for path in sorted(Path(options["folder"]).iterdir()):
        size = path.stat().st_size
        if 0 < piece_bytes < size:
            wanted += [(path.name, start, min(start + piece_bytes, size)) for start in range(0, size, piece_bytes)]
        else:
            wanted.append((path.name, 0, 0))

    async def fetch_all() -> int:
        waiting = iter(wanted)

        async def fetcher() -> int:
            got = 0
            for name, start, end in waiting:
                if end:
                    got += len(await store.get_range_async(name, start=start, end=end))
                else:
                    got += len(await (await store.get_async(name)).bytes_async())
            return got

        return sum(await asyncio.gather(*(fetcher() for _ in range(options["concurrency"]))))

    def epoch(_number: int) -> Iterator[Counted]:
        yield Counted(options.get("samples", len(wanted)), asyncio.run(fetch_all()))

    return epoch
