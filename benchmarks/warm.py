"""`dsctl warm --wait` against bare obstore fetching the same objects with the same number of requests at a
time, with and without comparing each object with the MD5 that its ETag is.

Both read from `rclone serve s3`; ours also checksums and stores what it fetches, and its time includes the
start of the command. Rounds alternate, each on an empty cache. Afterwards the server is stopped and every
object is read, so what was called warm was all there.
"""

from __future__ import annotations

import asyncio
from statistics import median

from benchmarks.harness import OBJECT_BYTES, Home, ResultTable, Workspace, make_files, parser, ratio, timed
from tests.servers import RcloneS3


async def fetch_all(server: RcloneS3, bucket: str, names: list[str], concurrency: int) -> None:
    """Every object once, thrown away."""
    from obstore.store import S3Store

    store = S3Store(
        bucket,
        endpoint=server.endpoint,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region=server.region,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    waiting = iter(names)

    async def fetcher() -> None:
        for name in waiting:
            answer = await store.get_async(name)
            await answer.bytes_async()

    await asyncio.gather(*(fetcher() for _ in range(concurrency)))


def check(home: Home, names: list[str], size_bytes: int) -> None:
    """All of it is on this node."""
    with home.environment():
        from datacache import open_snapshot

        with open_snapshot("images@latest") as snap:
            for name in names:
                if len(snap.read(name)) != size_bytes:
                    raise SystemExit(f"{name} is not whole")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=10_000)
    arguments.add_argument("--size", type=int, default=OBJECT_BYTES, help="bytes of an object")
    arguments.add_argument("--concurrency", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    if args.quick:
        args.files, args.rounds = 50, 1
    with Workspace(args.dir) as work:
        server = work.s3()
        names = make_files(server.make_bucket("images"), args.files, args.size)
        rates: dict[str, list[float]] = {"dsctl warm": [], "dsctl warm, nothing compared": [], "obstore": []}
        for number in range(args.rounds):
            for check_md5, name in enumerate(reversed(list(rates)[:2])):
                home = work.home(
                    f"home-{number}-{check_md5}",
                    server.env(),
                    concurrency=args.concurrency,
                    ssd_bytes=2 * args.files * args.size + 2**28,
                    check_md5=check_md5,
                )
                home.dsctl("snapshot", "create", "images", "--from", "s3://images")
                home.dsctl("daemon", "start")
                seconds = timed(lambda home=home: home.dsctl("warm", "images@latest", "--wait"))
                rates[name].append(args.files / seconds)
                if not check_md5 or number < args.rounds - 1:
                    home.close()
            seconds = timed(lambda: asyncio.run(fetch_all(server, "images", names, args.concurrency)))
            rates["obstore"].append(args.files / seconds)
        server.close()
        check(home, names, args.size)
        table = ResultTable(
            f"{args.files:,} objects × {args.size:,} bytes, {args.concurrency} requests at a time",
            "", "objects/s", "MB/s", "ours /",
        )  # fmt: skip
        ours = median(rates["dsctl warm"])
        for name, values in rates.items():
            table.row(name, median(values), median(values) * args.size / 1e6, ratio(ours, median(values)))
        table.print()


if __name__ == "__main__":
    main()
