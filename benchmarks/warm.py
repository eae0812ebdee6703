"""`dsctl warm --wait` against bare obstore fetching the same objects with as many requests at a time, with and without
comparing each object with the MD5 that its ETag is.

Both read from `rclone serve s3`; ours also checksums and stores what it fetches, and its time includes the start of the
command. CPU time is that of the daemon, and of obstore's process. Each round is on an empty cache. Afterwards the
server is stopped and every object is read, so what was called warm was all there. For large objects: `--files 8 --size
134217728 --concurrency 8`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from statistics import median

from obstore.store import S3Store

from benchmarks.harness import OBJECT_BYTES, Home, ResultTable, benchmark, make_files, ratio, rounds_of, timed
from benchmarks.peers import bare_store
from benchmarks.usage import command_of, cpu_of_families
from datacache.core.ids import BLOCK_BYTES


def main() -> None:
    with benchmark(__doc__, files=(10_000, 50), size=OBJECT_BYTES, concurrency=64, rounds=(3, 1)) as (args, work):
        server = work.s3()
        names = make_files(server.make_bucket("images"), args.files, args.size)
        bare = bare_store("images", server.env())
        homes: list[Home] = []

        def measured(work: Callable[[], object], cpu_s: Callable[[], float]) -> tuple[float, float]:
            before = cpu_s()
            return args.files / timed(work), 1e6 * (cpu_s() - before) / args.files

        def fetch(*, check_md5: bool) -> tuple[float, float]:
            fetching = _fetch_all(bare, names, args.size, args.concurrency, check_md5=check_md5)
            return measured(lambda: asyncio.run(fetching), time.process_time)

        def warm(*, check_md5: bool) -> tuple[float, float]:
            settings = {"concurrency": args.concurrency, "ssd_bytes": 2 * args.files * args.size + 2**28}
            home = work.home(f"home-{len(homes)}", server.env(), check_md5=int(check_md5), **settings)
            if homes:
                homes[-1].close()
            homes.append(home)
            home.snapshot("images", "s3://images")
            home.dsctl("daemon", "start")
            daemon = [pid for pid in home.processes() if "datacache.daemon" in command_of(pid)]
            return measured(lambda: home.dsctl("warm", "images@latest", "--wait"), lambda: cpu_of_families(daemon))

        ways = {
            "dsctl warm": lambda: warm(check_md5=True),
            "dsctl warm, nothing compared": lambda: warm(check_md5=False),
            "obstore": lambda: fetch(check_md5=False),
            "obstore, and MD5": lambda: fetch(check_md5=True),
        }
        found = {
            name: [median(each) for each in zip(*some, strict=True)]
            for name, some in rounds_of(ways, args.rounds).items()
        }
        server.close()
        with homes[-1].environment():
            from datacache import open_snapshot

            with open_snapshot("images@latest") as snap:
                if not all(len(snap.read(name)) == args.size for name in names):
                    raise SystemExit("not all objects are whole")
        title = f"{args.files:,} objects × {args.size:,} bytes, {args.concurrency} requests at a time"
        table = ResultTable(title, "", "objects/s", "MB/s", "/ obstore", "CPU µs", "/ obstore")
        for name, (rate, cpu_us) in found.items():
            rate_of, cpu_of = found["obstore"]
            table.row(name, rate, rate * args.size / 1e6, ratio(rate, rate_of), cpu_us, ratio(cpu_us, cpu_of))
        table.print()


async def _fetch_all(store: S3Store, names: list[str], size: int, concurrency: int, *, check_md5: bool) -> None:
    """Fetch all objects with bare obstore, so many at a time; compute their MD5s if asked to."""
    waiting = iter(names)

    async def fetcher() -> None:
        for name in waiting:
            answer, digest = await store.get_async(name), hashlib.md5(usedforsecurity=False)
            if size > BLOCK_BYTES:
                async for part in answer.stream(min_chunk_size=2**20):
                    if check_md5:
                        await asyncio.to_thread(digest.update, part)
                continue
            data = await answer.bytes_async()
            if check_md5:
                digest.update(data)

    await asyncio.gather(*(fetcher() for _ in range(concurrency)))


if __name__ == "__main__":
    main()
