"""`dsctl warm --wait` against bare obstore fetching the same objects with as many requests at a time, with and without
comparing each object with the MD5 that its ETag is.

Both read from `rclone serve s3`; ours also checksums and stores what it fetches, and its time includes the start of the
command. Each round is on an empty cache. Afterwards the server is stopped and every object is read, so what was called
warm was all there.
"""

from __future__ import annotations

import asyncio
from statistics import median

from benchmarks.harness import OBJECT_BYTES, Home, ResultTable, benchmark, make_files, ratio, rounds_of, timed
from benchmarks.peers import bare_store


def main() -> None:
    with benchmark(__doc__, files=(10_000, 50), size=OBJECT_BYTES, concurrency=64, rounds=(3, 1)) as (args, work):
        server = work.s3()
        names = make_files(server.make_bucket("images"), args.files, args.size)
        bare = bare_store("images", server.env())
        homes: list[Home] = []

        async def fetch_all() -> None:
            waiting = iter(names)

            async def fetcher() -> None:
                for name in waiting:
                    await (await bare.get_async(name)).bytes_async()

            await asyncio.gather(*(fetcher() for _ in range(args.concurrency)))

        def warm(*, check_md5: bool) -> float:
            settings = {"concurrency": args.concurrency, "ssd_bytes": 2 * args.files * args.size + 2**28}
            home = work.home(f"home-{len(homes)}", server.env(), check_md5=int(check_md5), **settings)
            if homes:
                homes[-1].close()
            homes.append(home)
            home.snapshot("images", "s3://images")
            home.dsctl("daemon", "start")
            return args.files / timed(lambda: home.dsctl("warm", "images@latest", "--wait"))

        ways = {
            "dsctl warm": lambda: warm(check_md5=True),
            "dsctl warm, nothing compared": lambda: warm(check_md5=False),
            "obstore": lambda: args.files / timed(lambda: asyncio.run(fetch_all())),
        }
        rates = {name: median(found) for name, found in rounds_of(ways, args.rounds).items()}
        server.close()
        with homes[-1].environment():
            from datacache import open_snapshot

            with open_snapshot("images@latest") as snap:
                if not all(len(snap.read(name)) == args.size for name in names):
                    raise SystemExit("not all objects are whole")
        title = f"{args.files:,} objects × {args.size:,} bytes, {args.concurrency} requests at a time"
        table = ResultTable(title, "", "objects/s", "MB/s", "ours /")
        for name, rate in rates.items():
            table.row(name, rate, rate * args.size / 1e6, ratio(rates["dsctl warm"], rate))
        table.print()


if __name__ == "__main__":
    main()
