"""An S3 server that lists objects which do not exist: ListObjectsV2 over any number of keys, fast enough not
to be what is measured. Run as a child process: `python -m benchmarks.synthetic_s3 PORT FOLDERS FILES`.

It knows no signatures and holds nothing but keys: GET and HEAD answer 404.
"""

from __future__ import annotations

import bisect
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from tests.servers import free_port, program

BUCKET = "synthetic"
OBJECT = (
    "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"d41d8cd98f00b204e9800998ecf8427e"</ETag><Size>110000</Size><StorageClass>STANDARD</StorageClass></Contents>'
)


def keys(folders: int, files: int) -> list[str]:
    """Return `files` names in each of `folders` folders, sorted."""
    return [f"{folder:04d}/{number:07d}.jpg" for folder in range(folders) for number in range(files)]


def page_of(sorted_keys: list[str], query: dict[str, str]) -> str:
    """Answer ListObjectsV2 without a delimiter (Amazon S3 API reference): one page as XML."""
    prefix, limit = query.get("prefix", ""), int(query.get("max-keys", "1000"))
    start = bisect.bisect_right(sorted_keys, query.get("start-after", ""))
    at = int(query.get("continuation-token", max(start, bisect.bisect_left(sorted_keys, prefix))))
    end = bisect.bisect_left(sorted_keys, prefix + "\U0010ffff")
    found = sorted_keys[at : min(end, at + limit)]
    more = at + len(found) < end
    token = f"<NextContinuationToken>{at + len(found)}</NextContinuationToken>" if more else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><MaxKeys>{limit}</MaxKeys><KeyCount>{len(found)}</KeyCount>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{''.join(map(OBJECT.format, found))}{token}</ListBucketResult>"
    )


@contextmanager
def synthetic_s3(folders: int, files: int) -> Iterator[dict[str, str]]:
    """Run the server; yields the AWS variables that lead there."""
    port = free_port()
    setpriv = program("setpriv", package="util-linux")
    arguments = [sys.executable, "-m", "benchmarks.synthetic_s3", str(port), str(folders), str(files)]
    process = subprocess.Popen([setpriv, "--pdeathsig", "KILL", "--", *arguments])
    endpoint = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{endpoint}/{BUCKET}?list-type=2&max-keys=1", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the synthetic S3 server did not start") from None
                time.sleep(0.05)
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()


def main() -> None:
    port, folders, files = map(int, sys.argv[1:])
    names = keys(folders, files)

    async def answer(request: web.Request) -> web.Response:
        bucket, _, key = urllib.parse.unquote(request.path).strip("/").partition("/")
        if bucket != BUCKET or key or request.method != "GET":
            return web.Response(status=404)
        if "versioning" in request.query:
            return web.Response(text="<VersioningConfiguration/>", content_type="application/xml")
        return web.Response(text=page_of(names, dict(request.query)), content_type="application/xml")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
