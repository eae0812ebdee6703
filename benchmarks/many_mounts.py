"""Many small snapshots mounted on one machine, one after another by `dsctl mount`: how long it takes, and what the
processes that serve them take of the memory, before anything is read and after every file was read once.

Memory is PSS: each page is counted once, in equal parts, however many processes have it (proc(5), smaps_rollup). All
processes of the home but the cache daemon are counted, and divided by the number of mounts.
"""

from __future__ import annotations

from statistics import median

from benchmarks.harness import ResultTable, benchmark, make_files, timed
from benchmarks.usage import command_of, memory_mib


def main() -> None:
    with benchmark(__doc__, mounts=(64, 3), files=(100, 5), size=20_000) as (args, work):
        home = work.home("home", ram_bytes="64MiB", ssd_bytes="4GiB")
        places = {f"set-{number}": work.folder(f"mnt-{number}") for number in range(args.mounts)}
        for name in places:
            source = work.folder(f"source-{name}")
            make_files(source, args.files, args.size)
            home.snapshot(name, source)
        home.dsctl("daemon", "start")

        def memory() -> list[float]:
            return [memory_mib(pid, "Pss") for pid in home.processes() if "fuse_mount" in command_of(pid)]

        took = [
            timed(lambda name=name, place=place: home.dsctl("mount", name, place)) for name, place in places.items()
        ]
        fresh = memory()
        for place in places.values():
            for path in place.iterdir():
                path.read_bytes()
        used = memory()
        table = ResultTable(f"{args.mounts} mounts of {args.files} files", "what", "value")
        table.row("seconds for all of them", sum(took))
        table.row("the first one, s", took[0])
        table.row("the median, s", median(took))
        table.row("processes", len(used))
        table.row("MiB a mount, nothing read", sum(fresh) / args.mounts)
        table.row("MiB a mount, all read", sum(used) / args.mounts)
        table.print()


if __name__ == "__main__":
    main()
