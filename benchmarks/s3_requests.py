"""S3 requests by our own client and by boto3's: listings, HEADs, small PUTs, uploads in parts, deletions.

Both ask the same server in rounds that alternate. boto3 signs bodies and sends no checksum of its own, as ours does.
The import and the first client are timed in fresh processes. docs/decisions/0042 draws the conclusion.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import ResultTable, Workspace, parser, ratio, timed
from datacache.settings import load_settings
from datacache.store.open import open_bucket_backend

BUCKET = "requests"
OWN, BOTO = "our own", "boto3"


def boto3_client(server: Any) -> Any:
    """Return a client that sends what ours sends, once."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint, aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key,
        region_name=server.region,
        config=Config(
            s3={"addressing_style": "path", "payload_signing_enabled": True},
            request_checksum_calculation="when_required", response_checksum_validation="when_required",
            retries={"total_max_attempts": 1}, max_pool_connections=64,
        ),
    )  # fmt: skip


def own_operations(bucket: Any, data: bytes) -> dict[str, Callable[[str], object]]:
    """Return what is measured, by our own client."""

    def upload(key: str) -> None:
        begun = bucket.begin_upload(key, {})
        bucket.put_part(key, begun, 1, data)
        bucket.list_parts(key, begun)
        bucket.abort_upload(key, begun)

    requests = bucket._requests.get()  # noqa: SLF001
    return {
        "HEAD": requests.head,
        "PUT 1 KiB": lambda key: requests.put(key, data),
        "upload begun, one part, listed, aborted": upload,
        "DELETE": requests.delete,
    }


def boto3_operations(client: Any, data: bytes) -> dict[str, Callable[[str], object]]:
    """Return the same by boto3."""

    def upload(key: str) -> None:
        begun = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        client.upload_part(Bucket=BUCKET, Key=key, UploadId=begun, PartNumber=1, Body=data)
        client.list_parts(Bucket=BUCKET, Key=key, UploadId=begun)
        client.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=begun)

    return {
        "HEAD": lambda key: client.head_object(Bucket=BUCKET, Key=key),
        "PUT 1 KiB": lambda key: client.put_object(Bucket=BUCKET, Key=key, Body=data),
        "upload begun, one part, listed, aborted": upload,
        "DELETE": lambda key: client.delete_object(Bucket=BUCKET, Key=key),
    }


def list_by_boto3(client: Any) -> int:
    """Return how many keys a listing gives."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return sum(len([(o["Key"], o["Size"], o["LastModified"], o["ETag"]) for o in p.get("Contents", ())]) for p in pages)


def list_by_own(bucket: Any) -> int:
    """Return how many keys a listing gives."""
    return sum(map(len, bucket.list("")))


def each(pool: ThreadPoolExecutor, operation: Callable[[str], object], keys: Sequence[str]) -> None:
    """Do it once for each key."""
    for _ in pool.map(operation, keys):
        pass


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds, and seconds of this process's processor time."""
    before = time.process_time()
    seconds = timed(work)
    return seconds, time.process_time() - before


def first_client(server: Any, code: str) -> tuple[float, float]:
    """Return seconds and MB until a fresh process has made its first HEAD."""
    program = f"import time; t = time.perf_counter()\n{code}\nseconds = time.perf_counter() - t\n"
    program += "words = open('/proc/self/status').read().split(); print(seconds, int(words[words.index('VmHWM:') + 1]))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | server.env(), capture_output=True, text=True, check=True
    )
    seconds, kibibytes = map(float, done.stdout.split())
    return seconds, kibibytes * 1024 / 1e6


FIRST = {
    OWN: f"""
from datacache.settings import load_settings
from datacache.store.open import open_backend
open_backend("s3://{BUCKET}", load_settings()).head("first")""",
    BOTO: f"""
import boto3
boto3.client("s3").head_object(Bucket="{BUCKET}", Key="first")""",
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--keys", type=int, default=100_000)
    arguments.add_argument("--requests", type=int, default=400)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--server", choices=("rclone", "ceph"), default="rclone")
    args = arguments.parse_args()
    if args.quick:
        args.keys, args.requests, args.rounds = 50, 8, 1
    with Workspace(args.dir) as work:
        server: Any = work.s3() if args.server == "rclone" else work.ceph(2 * 2**30)
        server.client().create_bucket(Bucket=BUCKET)
        os.environ |= server.env()
        bucket, client = open_bucket_backend(f"s3://{BUCKET}", load_settings()), boto3_client(server)
        data = os.urandom(1024)
        with ThreadPoolExecutor(8) as pool:
            put = own_operations(bucket, data)["PUT 1 KiB"]
            if args.server == "rclone":
                listed = server.root / BUCKET / "listed"
                listed.mkdir()
                for number in range(args.keys):
                    (listed / f"{number:07}").touch()
            else:
                each(pool, put, [f"listed/{number:07}" for number in range(args.keys)])
            put("first")
        table = ResultTable(f"a fresh process's first HEAD ({args.server})", "", "seconds", "MB")
        for name, code in FIRST.items():
            found = [first_client(server, code) for _ in range(args.rounds)]
            table.row(name, median(s for s, _ in found), median(m for _, m in found))
        table.print()
        table = ResultTable(
            f"a listing of {args.keys:,} keys ({args.server})", "", "seconds", "keys/s", "/ own", "CPU µs/key"
        )
        listings = {OWN: partial(list_by_own, bucket), BOTO: partial(list_by_boto3, client)}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in listings}
        for number in range(args.rounds):
            for name in list(listings) if number % 2 else list(listings)[::-1]:
                times[name].append(measure(listings[name]))
        own = median(s for s, _ in times[OWN])
        for name, found in times.items():
            seconds = median(s for s, _ in found)
            table.row(
                name, seconds, args.keys / seconds, ratio(seconds, own), median(c for _, c in found) / args.keys * 1e6
            )
        table.print()
        ways = {OWN: own_operations(bucket, data), BOTO: boto3_operations(client, data)}
        for threads in args.threads:
            title = f"{args.requests:,} times, {threads} at a time ({args.server})"
            table = ResultTable(title, "", "our own /s", "boto3 /s", "CPU µs ours", "CPU µs boto3")
            with ThreadPoolExecutor(threads) as pool:
                keys = [f"k{number}" for number in range(args.requests)]
                each(pool, ways[OWN]["PUT 1 KiB"], keys)
                for operation in ways[OWN]:
                    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
                    for number in range(args.rounds):
                        for name in list(ways) if number % 2 else list(ways)[::-1]:
                            spent[name].append(measure(partial(each, pool, ways[name][operation], keys)))
                    rates = [args.requests / median(s for s, _ in spent[name]) for name in ways]
                    costs = [median(c for _, c in spent[name]) / args.requests * 1e6 for name in ways]
                    table.row(operation, *rates, *costs)
            table.print()
        bucket.close()


if __name__ == "__main__":
    main()
