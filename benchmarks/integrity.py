"""The cost of checking for a cold read: GETs of whole objects with nothing to compare, with each checksum, and by bare
obstore.

`rclone serve s3` sends no checksums, so the headers that S3 would send are added to each answer once it is here: the
check is the real one, of what came. Without a header the ETag, an MD5, is what is compared.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import obstore

from benchmarks.harness import OBJECT_BYTES, ResultTable, benchmark, make_files, ratio, rounds_of, timed
from benchmarks.peers import bare_store
from datacache.core.ids import ObjectRef
from datacache.settings import load_settings
from datacache.store.checksums import Checker, compute
from datacache.store.open import open_backend

UNCHECKED = "nothing compared"


class Given(Checker):
    """A checker for a store that gives checksums of one kind."""

    def __init__(self, algorithm: str, known: Mapping[str, bytes]) -> None:
        super().__init__(md5=algorithm == "md5")
        header = f"x-amz-checksum-{algorithm}"
        self._headers = {key: {header: base64.b64encode(value).decode()} for key, value in known.items()}

    def check(self, ref: ObjectRef, data: Any, headers: Mapping[str, str]) -> None:
        """See `Checker`."""
        super().check(ref, data, {**headers, **self._headers.get(ref.key, {})})


def main() -> None:
    with benchmark(__doc__, files=(1000, 20), size=OBJECT_BYTES, threads=[1, 8], rounds=(7, 1)) as (args, work):
        server = work.s3()
        folder = server.make_bucket("images")
        make_files(folder, args.files, args.size)
        os.environ |= server.env()
        store: Any = open_backend("s3://images", load_settings())
        work.stack.callback(store.close)
        refs = [info.ref(store.url) for page in store.list("") for info in page]
        getters: dict[str, Callable[[ObjectRef], object]] = {}
        for algorithm in (UNCHECKED, "crc32c", "crc64nvme", "md5"):
            checker = Checker(md5=False)
            if algorithm != UNCHECKED:
                given = [] if algorithm == "md5" else refs
                known = {ref.key: compute(algorithm, (folder / ref.key).read_bytes()) for ref in given}
                checker = Given(algorithm, known)

            def get(ref: ObjectRef, checker: Checker = checker) -> object:
                store._checker = checker  # noqa: SLF001
                return store.read(ref, 0, ref.size_bytes)

            getters[algorithm] = get
        bare = bare_store("images")
        getters["bare obstore"] = lambda ref: obstore.get(bare, ref.key).bytes()
        for threads in args.threads:
            with ThreadPoolExecutor(threads) as pool:

                def all_of(get: Callable[[ObjectRef], object], pool: ThreadPoolExecutor = pool) -> tuple[float, float]:
                    before = time.process_time()
                    seconds = timed(lambda: list(pool.map(lambda ref: bool(get(ref)), refs)))
                    return args.files / seconds, (time.process_time() - before) / args.files * 1e6

                found = rounds_of({name: lambda get=get: all_of(get) for name, get in getters.items()}, args.rounds)
            title = f"{args.files:,} objects × {args.size:,} bytes, {threads} at a time"
            table = ResultTable(title, "", "objects/s", "MB/s", "/ unchecked", "CPU µs/object")
            plain = median(rate for rate, _ in found[UNCHECKED])
            for name, runs in found.items():
                rate = median(rate for rate, _ in runs)
                table.row(name, rate, rate * args.size / 1e6, ratio(rate, plain), median(cpu for _, cpu in runs))
            table.print()


if __name__ == "__main__":
    main()
