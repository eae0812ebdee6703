"""The cost of checking for a cold read: GETs of whole objects with nothing to compare, with each checksum, and by bare
obstore.

`rclone serve s3` sends no checksums, so the headers that S3 would send are added to each answer once it is here: the
check is the real one, of what came. Rounds alternate. Without a header the ETag, an MD5, is what is compared.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import OBJECT_BYTES, ResultTable, Workspace, make_files, parser, ratio, timed
from datacache.core.ids import ObjectRef
from datacache.settings import load_settings
from datacache.store.checksums import Checker, compute
from datacache.store.open import open_backend
from tests.servers import RcloneS3

UNCHECKED = "nothing compared"


class Given(Checker):
    """A checker for a store that gives checksums of one kind."""

    def __init__(self, algorithm: str, known: Mapping[str, bytes]) -> None:
        super().__init__(md5=algorithm == "md5")
        self._headers = {
            key: {f"x-amz-checksum-{algorithm}": base64.b64encode(value).decode()} for key, value in known.items()
        }

    def check(self, ref: ObjectRef, data: Any, headers: Mapping[str, str]) -> None:
        """See `Checker`."""
        super().check(ref, data, {**headers, **self._headers.get(ref.key, {})})


def bare_obstore(server: RcloneS3, bucket: str) -> Callable[[ObjectRef], object]:
    """One GET."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        bucket, endpoint=server.endpoint, access_key_id=server.access_key, secret_access_key=server.secret_key,
        region=server.region, virtual_hosted_style_request=False, client_options={"allow_http": True},
    )  # fmt: skip
    return lambda ref: obstore.get(store, ref.key).bytes()


def all_of(pool: ThreadPoolExecutor, get: Callable[[ObjectRef], object], refs: Sequence[ObjectRef]) -> None:
    """Get each object once."""
    for _ in pool.map(get, refs):
        pass


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=1000)
    arguments.add_argument("--size", type=int, default=OBJECT_BYTES, help="bytes of an object")
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--rounds", type=int, default=7)
    args = arguments.parse_args()
    if args.quick:
        args.files, args.rounds = 20, 1
    with Workspace(args.dir) as work:
        server = work.s3()
        folder = server.make_bucket("images")
        make_files(folder, args.files, args.size)
        os.environ |= server.env()
        store: Any = open_backend("s3://images", load_settings())
        refs = [info.ref(store.url) for page in store.list("") for info in page]
        ways: dict[str, Checker] = {UNCHECKED: Checker(md5=False)}
        for algorithm in ("crc32c", "crc64nvme", "md5"):
            known = {ref.key: compute(algorithm, (folder / ref.key).read_bytes()) for ref in refs}
            ways[algorithm] = Given(algorithm, {} if algorithm == "md5" else known)

        def checked_by(checker: Checker) -> Callable[[ObjectRef], object]:
            def get(ref: ObjectRef) -> object:
                store._checker = checker  # noqa: SLF001
                return store.read(ref, 0, ref.size_bytes)

            return get

        getters = {name: checked_by(checker) for name, checker in ways.items()}
        getters["bare obstore"] = bare_obstore(server, "images")
        for threads in args.threads:
            rates: dict[str, list[float]] = {name: [] for name in getters}
            cpu: dict[str, list[float]] = {name: [] for name in getters}
            with ThreadPoolExecutor(threads) as pool:
                for number in range(args.rounds):
                    for name in list(getters) if number % 2 else list(getters)[::-1]:
                        before = time.process_time()
                        seconds = timed(partial(all_of, pool, getters[name], refs))
                        cpu[name].append((time.process_time() - before) / args.files * 1e6)
                        rates[name].append(args.files / seconds)
            title = f"{args.files:,} objects × {args.size:,} bytes, {threads} at a time"
            table = ResultTable(title, "", "objects/s", "MB/s", "/ unchecked", "CPU µs/object")
            plain = median(rates[UNCHECKED])
            for name in getters:
                rate = median(rates[name])
                table.row(name, rate, rate * args.size / 1e6, ratio(rate, plain), median(cpu[name]))
            table.print()
        store.close()


if __name__ == "__main__":
    main()
