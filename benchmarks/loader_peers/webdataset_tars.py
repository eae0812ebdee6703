"""WebDataset: tars read from start to end, shards in random order, a buffer of 1,000 samples to shuffle in, batches
made in the pipeline.

A remote source is a list of shells' commands (`pipe:curl …`), as its users read from S3.
"""

from __future__ import annotations

import json
from functools import partial
from operator import itemgetter
from pathlib import Path

import webdataset as wds
from torch.utils.data import default_collate

from benchmarks.loader_peers.plan import Loader, ReadPlan, as_list, image_files

SHARD_BYTES = 64 * 10**6
SHUFFLE_SAMPLES = 1000


def write(images: Path, target: Path) -> None:
    """Write shards of some 64 MB, so that workers get equal shares."""
    with wds.ShardWriter(str(target / "shard-%06d.tar"), maxsize=SHARD_BYTES, verbose=0) as writer:
        for path in image_files(images):
            writer.write({"__key__": path.stem, "jpg": path.read_bytes()})


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Open `source`: a folder of tars, or a JSON list of what to open."""
    urls = json.loads(source) if source.startswith("[") else sorted(map(str, Path(source).glob("*.tar")))
    samples = (
        wds.WebDataset(urls, shardshuffle=len(urls), workersplitter=wds.split_by_worker, empty_check=False)
        .shuffle(SHUFFLE_SAMPLES)
        .map(itemgetter("jpg"))
    )
    if plan.size:
        from benchmarks.loader_peers.bare_decode import decoded

        samples = samples.map(partial(decoded, size=plan.size))
    samples = samples.batched(plan.batch_size, collation_fn=default_collate if plan.size else as_list)
    loader = wds.WebLoader(samples, batch_size=None, **plan.workers_stay())
    return lambda _number: loader
