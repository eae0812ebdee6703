"""S3 requests by our own client and by boto3's: listings, HEADs, small PUTs, uploads in parts, deletions.

Both ask the same server in turns. boto3 signs bodies and sends no checksum of its own, as ours does. The import and the
first client are timed in fresh processes. docs/decisions/0042 draws the conclusion.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from benchmarks.harness import ResultTable, benchmark, ratio, rounds_of, timed
from datacache.settings import load_settings
from datacache.store.open import open_bucket_backend

BUCKET = "requests"
OWN, BOTO = "our own", "boto3"
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
    with benchmark(
        __doc__,
        {"server": ("rclone", "ceph")},
        keys=(100_000, 50),
        requests=(400, 8),
        threads=[1, 8],
        rounds=(5, 1),
        server="rclone",
    ) as (args, work):
        server: Any = work.s3() if args.server == "rclone" else work.ceph(2 * 2**30)
        server.client().create_bucket(Bucket=BUCKET)
        os.environ |= server.env()
        bucket, client = open_bucket_backend(f"s3://{BUCKET}", load_settings()), boto3_client(server)
        work.stack.callback(bucket.close)
        data = os.urandom(1024)
        ways = {OWN: own_operations(bucket, data), BOTO: boto3_operations(client, data)}
        put = ways[OWN]["PUT 1 KiB"]
        put("first")
        names = [f"listed/{number:07}" for number in range(args.keys)]
        if args.server == "rclone":
            (server.root / BUCKET / "listed").mkdir()
            for name in names:
                (server.root / BUCKET / name).touch()
        else:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(put, names))

        table = ResultTable(f"a fresh process's first HEAD ({args.server})", "", "seconds", "MB")
        for name, code in FIRST.items():
            table.row(name, *medians([first_client(code) for _ in range(args.rounds)]))
        table.print()

        title = f"a listing of {args.keys:,} keys ({args.server})"
        table = ResultTable(title, "", "seconds", "keys/s", "/ own", "CPU µs/key")
        lists = {OWN: lambda: sum(map(len, bucket.list(""))), BOTO: lambda: list_by_boto3(client)}
        found = rounds_of({name: lambda work=work: measure(work) for name, work in lists.items()}, args.rounds)
        times = {name: medians(runs) for name, runs in found.items()}
        for name, (seconds, cpu_s) in times.items():
            table.row(name, seconds, args.keys / seconds, ratio(seconds, times[OWN][0]), cpu_s / args.keys * 1e6)
        table.print()

        keys = [f"k{number}" for number in range(args.requests)]
        for threads in args.threads:
            title = f"{args.requests:,} times, {threads} at a time ({args.server})"
            table = ResultTable(title, "", "our own /s", "boto3 /s", "CPU µs ours", "CPU µs boto3")
            with ThreadPoolExecutor(threads) as pool:

                def all_of(operation: Callable[[str], object], pool: ThreadPoolExecutor = pool) -> tuple[float, float]:
                    return measure(lambda: list(pool.map(operation, keys)))

                all_of(put)
                for operation in ways[OWN]:
                    each = {name: lambda do=way[operation]: all_of(do) for name, way in ways.items()}
                    spent = [medians(runs) for runs in rounds_of(each, args.rounds).values()]
                    rates = [args.requests / seconds for seconds, _ in spent]
                    table.row(operation, *rates, *(cpu_s / args.requests * 1e6 for _, cpu_s in spent))
            table.print()


def boto3_client(server: Any) -> Any:
    """Return a client that sends what ours sends, once."""
    import boto3
    from botocore.config import Config

    config = Config(
        s3={"addressing_style": "path", "payload_signing_enabled": True},
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
        retries={"total_max_attempts": 1}, max_pool_connections=64,
    )  # fmt: skip
    return boto3.client("s3", endpoint_url=server.endpoint, region_name=server.region, config=config)


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


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds, and seconds of this process's processor time."""
    before = time.process_time()
    seconds = timed(work)
    return seconds, time.process_time() - before


def medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of each."""
    return median(one for one, _ in pairs), median(two for _, two in pairs)


def first_client(code: str) -> tuple[float, float]:
    """Return seconds and MB until a fresh process has made its first HEAD."""
    program = f"import time; t = time.perf_counter()\n{code}\nseconds = time.perf_counter() - t\n"
    program += "words = open('/proc/self/status').read().split(); print(seconds, int(words[words.index('VmHWM:') + 1]))"
    seconds, kibibytes = map(float, subprocess.check_output([sys.executable, "-c", program], text=True).split())
    return seconds, kibibytes * 1024 / 1e6


if __name__ == "__main__":
    main()
