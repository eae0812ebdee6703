"""The first epoch from S3 with nothing on the node: ours with lookahead against bare obstore and against what the
libraries that stream shards do.

The server is on the same machine and has all in memory: `rclone serve s3` with the files in the page cache, or with
`--server ceph` a Ceph cluster of one node. The clock runs from the making of the dataset (the library is imported, our
node's daemon runs, our snapshot is known) to the last batch; each time the caches are new and empty. Everybody gives
raw bytes, shuffled, in batches of 64; shards and chunks have 64 MB. CPU time is that of the server, of the process that
reads with all it starts, and of our daemon, each from the opening on. `--peers` names the libraries to compare with.

  obstore, objects   every image with a request of its own, `--concurrency` at a time, thrown away: no loader
  obstore, shards    the shards in ranges of 4 MiB, as many at a time; whole ones from rclone, which answers ranges with
                     the right bytes and a status that obstore takes for an error (ours then asks without obstore)
  SnapshotDataset    every image is an object; the order comes from an `EpochSampler` that publishes it to the daemon
  ShardDataset       from `s3://`, with `shuffle="blocks"`, published as well
  MDS, LitData       their streaming from `s3://` to an empty local folder, as they set themselves up; LitData also
                     with `batch_decode=1` (where workers share a chunk, that reads all of it for each sample)
  WebDataset         `pipe:curl` of URLs that were signed beforehand; it keeps no copy
ArrayRecord has no streaming from S3 that could be measured: it reads files.

Ours store what they fetch, with checksums, as MDS and LitData store it without. A first pass of each adds up the
samples' digests: a wrong sum ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    OURS,
    Contender,
    ContenderError,
    ImageSet,
    Pass,
    RunningContender,
    make_images,
    make_ours,
    middle,
    peers_environment,
    write,
)
from benchmarks.harness import ResultTable, Workspace, benchmark, ratio, rounds_of, size_of
from benchmarks.loader_peers.plan import ReadPlan
from benchmarks.loaders import OTHER_WAYS, PEERS
from benchmarks.peers import LITDATA, MDS, WEBDATASET, Peer, PeerUnavailableError, bare_store, programs_of
from benchmarks.usage import cpu_of_families
from tests.servers import CephRgw, RcloneS3

OBJECTS, RANGES = "obstore, objects", "obstore, shards"
SHARDS, SNAPSHOT = "ShardDataset", "SnapshotDataset"
NAMES = {peer.name: peer for peer in (WEBDATASET, MDS, LITDATA)}


@dataclass(frozen=True, kw_only=True)
class FreshContender:
    """A contender that is made anew for each pass, with empty caches."""

    contender: Contender
    fresh: Callable[[Contender], Any]
    """A context with the contender."""


def main() -> None:
    with benchmark(
        __doc__,
        {"server": ("rclone", "ceph"), "peers": list(NAMES)},
        files=(10_000, 20),
        workers=([0, 2], [0]),
        batch=(64, 16),
        concurrency=64,
        server="rclone",
        peers=list(NAMES),
        rounds=(3, 1),
    ) as (args, work):
        missing: dict[str, str] = {}
        field = Field(work, args)
        pythons = dict(field.copies(missing))
        field.serve()
        entries = [*field.ours(), *field.peers(pythons)]
        log = work.path / "read.log"
        passes = measure(entries, field.images, field.server_cpu, rounds=args.rounds, log=log, missing=missing)
        title = f"first epoch of {args.files:,} JPEGs of 107 KB from {args.server}"
        report(f"{title}, {args.concurrency} requests at a time", field.images, passes)
        for name, reason in missing.items():
            print(f"{name} was not measured: {reason}")


class Field:
    """Everybody's files as buckets of a server, and who reads them."""

    def __init__(self, work: Workspace, args: argparse.Namespace) -> None:
        self._work, self._args, self._made = work, args, 0
        self._server: RcloneS3 | CephRgw
        self._foreign = peers_environment(work.short_folder())
        if args.server == "rclone":
            self._server = work.s3()
            self._root = self._server.root
        else:
            self._root = work.folder("buckets")
        (self._root / "images").mkdir()
        self.images = make_images(self._root / "images", "photographs", args.files)
        # Written by another home, so that those that are measured know nothing of them.
        home, self._shards = make_ours(work, self.images, self._root)
        home.close()

    def copies(self, missing: dict[str, str]) -> Iterator[tuple[Peer, Path]]:
        """Write each peer's files; yield its Python."""
        for peer in map(NAMES.__getitem__, self._args.peers):
            module = PEERS[peer]
            try:
                if peer is WEBDATASET and shutil.which("curl") is None:
                    raise PeerUnavailableError("there is no curl")
                python = programs_of(peer, self._args) / "python"
                target, log = self._root / _bucket_of(peer), self._work.path / f"{module}.log"
                write(module, python, self._foreign, self.images.folder, target, log)
                yield peer, python
            except (PeerUnavailableError, ContenderError) as exc:
                missing[str(peer)] = str(exc)

    def serve(self) -> None:
        """Put the files into the server. rclone must not have looked before; Ceph is given them."""
        if self._args.server == "ceph":
            self._server = self._work.ceph(size_of(self._root) * 3 // 2 + 2**28)
            for folder in self._root.iterdir():
                self._server.make_bucket(folder.name)
                store = bare_store(folder.name, self._server.env())
                with ThreadPoolExecutor(16) as pool:
                    list(pool.map(lambda path, store=store: store.put(path.name, path), folder.iterdir()))
        os.sync()  # so that nobody's writing is slowed down by that of others
        # MDS has its own name for the endpoint.
        self._foreign |= self._server.env() | {"S3_ENDPOINT_URL": self._server.endpoint}

    def server_cpu(self) -> float:
        """Return the CPU seconds of the server so far."""
        return cpu_of_families(self._server.pids)

    def ours(self) -> Iterator[FreshContender]:
        """Yield obstore for whole objects and ranges of shards, and both datasets with any number of workers."""
        pieces = {} if self._args.server == "rclone" else {"piece_bytes": 4 * 2**20}
        for name, folder, more in (
            (OBJECTS, self.images.folder, {}),
            (RANGES, self._shards, {"samples": self.images.count, **pieces}),
        ):
            options = {"concurrency": self._args.concurrency, "folder": str(folder), **more}
            yield self._entry(name, "bare_obstore", folder.name, 0, options, self._anew)
        for name, source, kind in (
            (SNAPSHOT, "images@latest", {"kind": "snapshot"}),
            (SHARDS, f"s3://{self._shards.name}", {"kind": "shards", "shuffle": "blocks"}),
        ):
            options = {**kind, "packed": True, "lookahead": True}
            for workers in self._args.workers:
                yield self._entry(f"{name}, {workers} workers", "ours", source, workers, options, self._in_new_home)

    def peers(self, pythons: dict[Peer, Path]) -> Iterator[FreshContender]:
        """Yield those that could be had."""
        for peer, python in pythons.items():
            source = f"s3://{_bucket_of(peer)}"
            if peer is WEBDATASET:
                source = json.dumps([f"pipe:curl -s -f '{url}'" for url in self._signed(_bucket_of(peer))])
            ways: dict[str, dict[str, Any]] = {"": {}, **OTHER_WAYS.get(peer, {})}
            for way, options in ways.items():
                for workers in self._args.workers:
                    name = f"{peer}, {way}, {workers} workers" if way else f"{peer}, {workers} workers"
                    entry = self._entry(name, PEERS[peer], source, workers, options, self._anew)
                    yield replace(entry, contender=replace(entry.contender, python=python))

    def _entry(
        self, name: str, module: str, source: str, workers: int, options: dict[str, Any], fresh: Callable[..., Any]
    ) -> FreshContender:
        plan = ReadPlan(workers=workers, batch_size=self._args.batch, options=options)
        contender = Contender(name=name, module=module, source=source, env=self._foreign, plan=plan)
        return FreshContender(contender=contender, fresh=fresh)

    @contextmanager
    def _anew(self, contender: Contender) -> Iterator[Contender]:
        self._made += 1
        cache = self._work.folder(f"cache-{self._made}")
        env = {**contender.env, "LITDATA_CACHE_DIR": str(cache)}
        yield replace(contender, plan=replace(contender.plan, cache=str(cache)), env=env)
        shutil.rmtree(cache)

    @contextmanager
    def _in_new_home(self, contender: Contender) -> Iterator[Contender]:
        self._made += 1
        settings = {"concurrency": self._args.concurrency, "ssd_bytes": 2 * self.images.size_bytes + 2**28}
        home = self._work.home(f"home-{self._made}", self._server.env(), **settings)
        if contender.plan.options["kind"] == "snapshot":
            home.snapshot("images", "s3://images")
        home.dsctl("daemon", "start")
        yield replace(contender, env=home.env, beside=home.processes)
        home.close()

    def _signed(self, bucket: str) -> list[str]:
        """Return a URL for each file, good for a day."""
        import boto3
        from botocore.config import Config

        server = self._server
        client = boto3.client(
            "s3", endpoint_url=server.endpoint, aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key, region_name=server.region,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )  # fmt: skip
        names = sorted(path.name for path in (self._root / bucket).glob("*.tar"))
        requests = ({"Bucket": bucket, "Key": name} for name in names)
        return [client.generate_presigned_url("get_object", Params=one, ExpiresIn=86400) for one in requests]


def _bucket_of(peer: Peer) -> str:
    return PEERS[peer].replace("_", "-")


def measure(
    entries: list[FreshContender],
    images: ImageSet,
    server_cpu: Callable[[], float],
    *,
    rounds: int,
    log: Path,
    missing: dict[str, str],
) -> dict[str, Pass]:
    """Measure the first epochs of each. One that fails is left out, unless it is ours or bare."""

    def pass_of(entry: FreshContender, *, check: bool) -> Pass | None:
        if entry.contender.name in missing:
            return None
        bare = entry.contender.module == "bare_obstore"
        try:
            with entry.fresh(entry.contender) as contender, RunningContender(contender, log) as one:
                server_s = server_cpu()
                opened = one.do("open")
                if check and not bare:
                    one.check(images.digest)
                    return None
                done = one.epoch(0, images.count, images.size_bytes, padded=bare)
        except ContenderError as exc:
            if entry.contender.module in OURS:
                raise SystemExit(str(exc)) from exc
            missing[entry.contender.name] = str(exc)
            return None
        return replace(
            done,
            seconds=opened.seconds + done.seconds,
            cpu_s=opened.cpu_s + done.cpu_s,
            beside_s=opened.beside_s + done.beside_s,
            server_s=server_cpu() - server_s,
        )

    for entry in entries:
        pass_of(entry, check=True)
    ways = {e.contender.name: lambda e=e: pass_of(e, check=False) for e in entries}
    found = rounds_of(ways, rounds)
    return {name: middle(passes) for name, passes in found.items() if name not in missing}


def report(title: str, images: ImageSet, passes: dict[str, Pass]) -> None:
    """Print the table."""
    rates = {name: done.samples_per_s for name, done in passes.items()}
    best = {ours: max(rate for name, rate in rates.items() if name.startswith(ours)) for ours in (SNAPSHOT, SHARDS)}
    columns = (f"/ {OBJECTS}", f"/ {RANGES}", *(f"best {ours} /" for ours in best))
    columns += ("server µs", "reader µs", "daemon µs")
    table = ResultTable(title, "", "files/s", "MB/s", *columns)
    for name, rate in rates.items():
        ratios = [ratio(rate, rates[OBJECTS]), ratio(rate, rates[RANGES]), *(ratio(one, rate) for one in best.values())]
        done = passes[name]
        parts = (done.server_s, done.cpu_s - done.beside_s, done.beside_s)
        each = (1e6 * part / images.count for part in parts)
        table.row(name, rate, rate * images.size_bytes / images.count / 1e6, *ratios, *each)
    table.print()


if __name__ == "__main__":
    main()
