"""Loads every acknowledged checkpoint from the bucket itself and compares it. See README.md beside this file.

python examples/checkpoints/verify.py s3://bucket/runs --record acknowledged.jsonl
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from save import sum_of

Fetch = Callable[[str], bytes]


def main(options: argparse.Namespace) -> int:
    fetch = open_bucket(options.url)
    acknowledged = {}
    for line in options.record.read_text().splitlines():
        one = json.loads(line)
        acknowledged[one["file"]] = one  # the last one counts
    wrong = [message for one in acknowledged.values() if (message := problem(one, fetch))]
    for message in wrong:
        print(message, file=sys.stderr)
    print(f"{len(acknowledged)} acknowledged files, {len(acknowledged) - len(wrong)} of them in the bucket as saved")
    return 1 if wrong or not acknowledged else 0


def problem(acknowledged: dict[str, Any], fetch: Fetch) -> str:
    """Return what is wrong with this one, or nothing."""
    name = acknowledged["file"]
    try:
        checkpoint = torch.load(io.BytesIO(fetch(name)), weights_only=True)
    except FileNotFoundError:
        return f"{name}: not in the bucket"
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as exc:
        return f"{name}: cannot be loaded: {exc}"
    if checkpoint["step"] < acknowledged["step"]:
        return f"{name}: step {checkpoint['step']}, but step {acknowledged['step']} was acknowledged"
    # A later one may have arrived without a word: whoever saved it was cut off before the answer.
    if checkpoint["step"] == acknowledged["step"] and sum_of(checkpoint) != acknowledged["sum"]:
        return f"{name}: not the weights that were saved"
    return ""


def open_bucket(url: str) -> Fetch:
    """How to get an object below `s3://…`, or below a folder."""
    parts = urlsplit(url)
    if parts.scheme != "s3":
        folder = Path(unquote(parts.path) if parts.scheme == "file" else url)
        return lambda name: (folder / name).read_bytes()

    import boto3
    from botocore.config import Config
    from botocore.exceptions import ClientError

    client = boto3.client(
        "s3",
        endpoint_url=os.environ.get("AWS_ENDPOINT_URL"),
        config=Config(response_checksum_validation="when_required", s3={"addressing_style": "path"}),
    )
    prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""

    def fetch(name: str) -> bytes:
        try:
            body: bytes = client.get_object(Bucket=parts.netloc, Key=prefix + name)["Body"].read()
        except ClientError as exc:
            if exc.response["Error"]["Code"] in ("NoSuchKey", "404"):
                raise FileNotFoundError(name) from exc
            raise
        return body

    return fetch


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="s3://BUCKET/PREFIX, with the usual AWS_… variables; or a folder")
    parser.add_argument("--record", type=Path, required=True, help="what save.py wrote")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(options()))
