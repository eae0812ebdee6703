"""A listing of a large bucket: by one process, and as `snapshot create` does it, by several side by side.

Both make a snapshot in a catalog of its own, in a fresh process, and have to give the same one. The server lists
objects that do not exist and costs little; it answers at once, or after some milliseconds as far stores do. Memory is
the largest sum of the resident sets of all processes, which counts what they share for each of them.
"""

from __future__ import annotations

import sys

from benchmarks.harness import ResultTable, benchmark, ratio
from benchmarks.synthetic_s3 import BUCKET, synthetic_s3
from benchmarks.usage import CommandUsage, measured, middle

LIST = f"""
import sys
from datacache import api
print(api.create_snapshot("listed", "s3://{BUCKET}", processes=int(sys.argv[1]) or None).id)"""
WAYS = {"one process": 1, "side by side": 0}


def main() -> None:
    with benchmark(
        __doc__, folders=(64, 4), files=(15_625, 2000), latencies_ms=([0, 1, 10, 30], [1]), rounds=(3, 1)
    ) as (args, work):
        entries = args.folders * args.files
        title = f"a listing of {entries:,} objects in {args.folders} folders"
        table = ResultTable(title, "", "seconds", "objects/s", "/ one", "CPU s", "peak MiB")
        for latency_ms in args.latencies_ms:
            with synthetic_s3(args.folders, args.files, latency_ms=latency_ms) as env:
                runs: dict[str, list[CommandUsage]] = {name: [] for name in WAYS}
                ids = set()
                for number in range(args.rounds):
                    for name in list(WAYS)[:: 1 - 2 * (number % 2)]:
                        home = work.home(f"{name}-{latency_ms}-{number}", env)
                        usage = measured([sys.executable, "-c", LIST, str(WAYS[name])], env=home.env)
                        runs[name].append(usage)
                        ids.add(usage.output)
                        home.close()
            if len(ids) != 1:
                raise SystemExit("the snapshots differ")
            one = 0.0
            for name, found in runs.items():
                usage = middle(found)
                one = one or usage.seconds
                label = f"{name}, {latency_ms:g} ms"
                speed = ratio(one, usage.seconds)
                table.row(label, usage.seconds, entries / usage.seconds, speed, usage.cpu_s, usage.peak_mib)
        table.print()


if __name__ == "__main__":
    main()
