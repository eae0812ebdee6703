"""The first epoch from S3 with nothing on the node: ours with lookahead against bare obstore and against what the
libraries that stream shards do.

The server is on the same machine and has all in memory, for all: `rclone serve s3` with the files in the page cache,
or with `--server ceph` a Ceph cluster of one node. The clock runs from the making of the dataset (the library is
imported, our node's daemon runs, our snapshot is known) to the last batch; each time the caches are new and empty.
Everybody gives raw bytes, shuffled, in batches of 64; shards and chunks have 64 MB; CPU time is that of all processes
but the server, our daemon included.

  obstore, objects   every image with a request of its own, `--concurrency` at a time, thrown away: no loader
  obstore, shards    the shards in ranges of 4 MiB, as many at a time; whole ones from rclone, which answers ranges with
                     the right bytes and a status that obstore takes for an error (ours then asks without obstore)
  SnapshotDataset    every image is an object; the order comes from an `EpochSampler` that publishes it to the daemon
  ShardDataset       from `s3://`, with `shuffle="blocks"`, published as well
  MDS, LitData       their streaming from `s3://` to an empty local folder, as they set themselves up; LitData also
                     with `batch_decode=1` (where workers share a chunk, that reads all of it for each sample)
  WebDataset         `pipe:curl` of URLs that were signed beforehand; it keeps no copy
ArrayRecord has no streaming from S3 that could be measured: it reads files.

Ours store what they fetch, with checksums, as MDS and LitData store it without. A first pass of each, from empty caches
as well, adds up the samples' digests: a wrong sum ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    Contender,
    ContenderError,
    Pass,
    RunningContender,
    foreign_environment,
    middle,
    write,
)
from benchmarks.environments import (
    LITDATA,
    MDS,
    WEBDATASET,
    Peer,
    PeerEnvironments,
    PeerUnavailableError,
    add_peers_option,
    environments,
)
from benchmarks.harness import ResultTable, Workspace, parser, ratio
from benchmarks.loader_peers.plan import ReadPlan
from benchmarks.loaders import OTHER_WAYS, PEERS, ImageSet, make_images, make_ours
from tests.servers import CephRgw, RcloneS3

OBJECTS, RANGES = "obstore, objects", "obstore, shards"
SHARDS, SNAPSHOT = "ShardDataset", "SnapshotDataset"
STREAMING = (WEBDATASET, MDS, LITDATA)
RANGE_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class FreshContender:
    """A contender that is made anew for each pass, with empty caches."""

    name: str
    samples_checked: bool
    """False for what gives no samples."""
    fresh: Callable[[], Any]
    """A context with the contender."""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=10_000)
    arguments.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument(
        "--concurrency", type=int, default=64, help="requests at a time: obstore's, and our daemon's"
    )
    arguments.add_argument("--server", choices=("rclone", "ceph"), default="rclone")
    arguments.add_argument("--rounds", type=int, default=3)
    add_peers_option(arguments)
    args = arguments.parse_args()
    if args.quick:
        args.files, args.batch, args.rounds, args.workers = 40, 16, 1, [0]
    with Workspace(args.dir) as work:
        missing: dict[str, str] = {}
        field = Field(work, args)
        images = field.images
        peers = list(field.copies(environments(args), missing))
        field.serve()
        entries = [*field.obstore(), *field.ours(), *field.peers(peers)]
        passes = measure(entries, images, rounds=args.rounds, log=work.path / "read.log", missing=missing)
        title = (
            f"first epoch of {args.files:,} JPEGs of 107 KB from {args.server}, {args.concurrency} requests at a time"
        )
        report(title, images, passes)
        for name, reason in missing.items():
            print(f"{name} was not measured: {reason}")


class Field:
    """Everybody's files as buckets of a server, and who reads them."""

    def __init__(self, work: Workspace, args: argparse.Namespace) -> None:
        self._work, self._args = work, args
        self._server: RcloneS3 | CephRgw
        self._foreign = foreign_environment(work.short_folder())
        self._made = 0
        if args.server == "rclone":
            self._server = work.s3()
            self._root = self._server.root
        else:
            self._root = work.folder("buckets")
        self.images = make_images(self._bucket("images"), "photographs", args.files)
        # Written by another home, so that those that are measured know nothing of them.
        home, self._shards = make_ours(work, self.images, self._root)
        home.close()

    def copies(self, environments: PeerEnvironments, missing: dict[str, str]) -> Iterator[tuple[Peer, Path]]:
        """Write each peer's files; its Python."""
        for peer in STREAMING:
            module = PEERS[peer]
            try:
                if peer is WEBDATASET and shutil.which("curl") is None:
                    raise PeerUnavailableError("there is no curl")
                python = environments.bin(peer) / "python"
                folder = self._bucket(_bucket_of(peer))
                write(module, python, self._foreign, self.images.folder, folder, self._work.path / f"{module}.log")
                yield peer, python
            except (PeerUnavailableError, ContenderError) as exc:
                missing[str(peer)] = str(exc)

    def serve(self) -> None:
        """From now on the files are in the server. rclone must not have looked before; Ceph is given them."""
        if self._args.server == "ceph":
            size_bytes = sum(path.stat().st_size for path in self._root.rglob("*") if path.is_file())
            self._server = self._work.ceph(size_bytes * 3 // 2 + 2**28)
            for folder in self._root.iterdir():
                self._server.make_bucket(folder.name)
                upload(self._server.env(), folder.name, folder)
        os.sync()  # so that nobody's writing is slowed down by that of others
        # MDS has its own name for the endpoint.
        self._foreign |= self._server.env() | {"S3_ENDPOINT_URL": self._server.endpoint}

    def _bucket(self, name: str) -> Path:
        path = self._root / name
        path.mkdir()
        return path

    def obstore(self) -> Iterator[FreshContender]:
        """Whole objects, and ranges of shards."""
        whole = {"concurrency": self._args.concurrency, "folder": str(self.images.folder)}
        pieces = {**whole, "folder": str(self._shards), "samples": self.images.count}
        if self._args.server != "rclone":
            pieces["piece_bytes"] = RANGE_BYTES
        for name, bucket, options in ((OBJECTS, "images", whole), (RANGES, self._shards.name, pieces)):
            contender = self._contender(name, "bare_obstore", bucket, ReadPlan(options=options))
            yield FreshContender(name=name, samples_checked=False, fresh=self._anew(contender))

    def ours(self) -> Iterator[FreshContender]:
        """Both datasets, with any number of workers."""
        kinds: list[tuple[str, str, dict[str, Any]]] = [
            (SNAPSHOT, "images@latest", {"kind": "snapshot"}),
            (SHARDS, f"s3://{self._shards.name}", {"kind": "shards", "shuffle": "blocks"}),
        ]
        for name, source, options in kinds:
            for workers in self._args.workers:
                plan = ReadPlan(
                    workers=workers, batch_size=self._args.batch,
                    options={**options, "packed": True, "lookahead": True},
                )  # fmt: skip
                contender = self._contender(_with_workers(name, workers), "ours", source, plan)
                yield FreshContender(name=contender.name, samples_checked=True, fresh=self._in_new_home(contender))

    def peers(self, found: list[tuple[Peer, Path]]) -> Iterator[FreshContender]:
        """Those that could be had."""
        for peer, python in found:
            source = f"s3://{_bucket_of(peer)}"
            if peer is WEBDATASET:
                source = json.dumps([f"pipe:curl -s -f '{url}'" for url in self._signed(_bucket_of(peer))])
            ways: dict[str, dict[str, Any]] = {"": {}, **OTHER_WAYS.get(peer, {})}
            for way, options in ways.items():
                for workers in self._args.workers:
                    plan = ReadPlan(workers=workers, batch_size=self._args.batch, options=options)
                    name = _with_workers(f"{peer}, {way}" if way else str(peer), workers)
                    contender = replace(self._contender(name, PEERS[peer], source, plan), python=python)
                    yield FreshContender(name=name, samples_checked=True, fresh=self._anew(contender))

    def _contender(self, name: str, module: str, source: str, plan: ReadPlan) -> Contender:
        python = Path(sys.executable)
        return Contender(name=name, module=module, source=source, python=python, env=self._foreign, plan=plan)

    def _anew(self, contender: Contender) -> Callable[[], Any]:
        @contextmanager
        def fresh() -> Iterator[Contender]:
            self._made += 1
            cache = self._work.folder(f"cache-{self._made}")
            plan = replace(contender.plan, cache=str(cache))
            yield replace(contender, plan=plan, env={**contender.env, "LITDATA_CACHE_DIR": str(cache)})
            shutil.rmtree(cache)

        return fresh

    def _in_new_home(self, contender: Contender) -> Callable[[], Any]:
        @contextmanager
        def fresh() -> Iterator[Contender]:
            self._made += 1
            home = self._work.home(
                f"home-{self._made}", self._server.env(), concurrency=self._args.concurrency,
                ssd_bytes=2 * self.images.size_bytes + 2**28,
            )  # fmt: skip
            if contender.plan.options["kind"] == "snapshot":
                home.dsctl("snapshot", "create", "images", "--from", "s3://images")
            home.dsctl("daemon", "start")
            yield replace(contender, env=home.env, beside=home.processes)
            home.close()

        return fresh

    def _signed(self, bucket: str) -> list[str]:
        """A URL for each file, good for a day."""
        import boto3
        from botocore.config import Config

        client = boto3.client(
            "s3", endpoint_url=self._server.endpoint, aws_access_key_id=self._server.access_key,
            aws_secret_access_key=self._server.secret_key, region_name=self._server.region,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )  # fmt: skip
        return [
            client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": path.name}, ExpiresIn=86400)
            for path in sorted((self._root / bucket).glob("*.tar"))
        ]


def upload(env: dict[str, str], bucket: str, folder: Path) -> None:
    """All files of a flat folder."""
    from concurrent.futures import ThreadPoolExecutor

    from obstore.store import S3Store

    store = S3Store(
        bucket, endpoint=env["AWS_ENDPOINT_URL"], access_key_id=env["AWS_ACCESS_KEY_ID"],
        secret_access_key=env["AWS_SECRET_ACCESS_KEY"], region=env["AWS_REGION"], virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )  # fmt: skip
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda path: store.put(path.name, path), folder.iterdir()):
            pass


def _bucket_of(peer: Peer) -> str:
    return PEERS[peer].replace("_", "-")


def _with_workers(name: str, workers: int) -> str:
    return f"{name}, {workers} workers"


def measure(
    entries: list[FreshContender], images: ImageSet, *, rounds: int, log: Path, missing: dict[str, str]
) -> dict[str, list[Pass]]:
    """The first epochs of each. One that fails is left out, unless it is ours or bare."""
    passes: dict[str, list[Pass]] = {entry.name: [] for entry in entries}
    left = list(entries)
    for number in range(-1, rounds):
        for entry in left[number % len(left) :] + left[: number % len(left)]:
            try:
                with entry.fresh() as contender, RunningContender(contender, log) as one:
                    opened = one.open()
                    if number < 0 and entry.samples_checked:
                        if one.digest(0) != images.digest:
                            raise SystemExit(f"{entry.name} gave wrong bytes")
                        continue
                    done = one.epoch(0)
            except ContenderError as exc:
                if contender.module in ("ours", "bare_obstore"):
                    raise SystemExit(str(exc)) from exc
                missing[entry.name] = str(exc)
                left.remove(entry)
                passes.pop(entry.name)
                continue
            size_bytes = done.size_bytes if entry.samples_checked else min(done.size_bytes, images.size_bytes)
            if (done.samples, size_bytes) != (images.count, images.size_bytes):
                raise SystemExit(f"{entry.name} gave {done.samples:,} samples with {done.size_bytes:,} bytes")
            if number >= 0:
                passes[entry.name].append(
                    replace(done, seconds=opened.seconds + done.seconds, cpu_s=opened.cpu_s + done.cpu_s)
                )
    return passes


def report(title: str, images: ImageSet, passes: dict[str, list[Pass]]) -> None:
    """The table."""
    middles = {name: middle(found) for name, found in passes.items()}
    rates = {name: done.samples_per_s for name, done in middles.items()}
    best = {ours: max(rate for name, rate in rates.items() if name.startswith(ours)) for ours in (SNAPSHOT, SHARDS)}
    table = ResultTable(
        title, "", "files/s", "MB/s", f"/ {OBJECTS}", f"/ {RANGES}", *(f"best {ours} /" for ours in best),
        "CPU µs a file",
    )  # fmt: skip
    for name, done in middles.items():
        rate = rates[name]
        table.row(
            name, rate, rate * images.size_bytes / images.count / 1e6, ratio(rate, rates[OBJECTS]),
            ratio(rate, rates[RANGES]), *(ratio(ours, rate) for ours in best.values()), done.cpu_us,
        )  # fmt: skip
    table.print()


if __name__ == "__main__":
    main()
