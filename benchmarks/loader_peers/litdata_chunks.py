"""LitData: chunks of 64 MB, made by `optimize()` and read by its own loader.

What it gives of a local chunk are views of a mapped file, which cannot be handed over between processes, and of which
not a byte has been read: the collate makes `bytes` of them.

For bytes its `batch_decode="auto"` takes 256 samples at a time, for JPEGs 1, says its documentation, "so each row is
decoded once". With 1, which is `options["batch_decode"]`, it was 4 times as fast here. Both are measured.
"""

from __future__ import annotations

import os
from pathlib import Path

import litdata
from litdata.streaming import downloader

from benchmarks.loader_peers.plan import Loader, ReadPlan, image_files


def write(images: Path, target: Path) -> None:
    """Write chunks by one process, in order."""
    paths = [str(path) for path in image_files(images)]
    litdata.optimize(
        fn=_read, inputs=paths, output_dir=str(target), chunk_bytes="64MB", num_workers=1, mode="overwrite",
        start_method="fork", verbose=False,
    )  # fmt: skip


def open_loader(source: str, plan: ReadPlan) -> Loader:
    """Open `source`: a folder, or `s3://` with the endpoint in `AWS_ENDPOINT_URL`, copied to the plan's cache."""
    remote = {}
    if "://" in source:
        options = {
            "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
            "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
            "region_name": os.environ["AWS_REGION"],
        }
        # The server has no TLS, which LitData does not let its obstore use; with it nothing would be different.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001
        remote = {"cache_dir": plan.cache, "storage_options": options}
    batch_decode = plan.options.get("batch_decode", "auto")
    dataset = litdata.StreamingDataset(source, shuffle=True, batch_decode=batch_decode, **remote)
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=plan.batch_size, collate_fn=as_bytes, **plan.workers_stay()
    )
    return lambda _number: loader


def as_bytes(samples: list[bytes | memoryview]) -> list[bytes]:
    """Collate samples; what is `bytes` already is not copied."""
    return list(map(bytes, samples))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
