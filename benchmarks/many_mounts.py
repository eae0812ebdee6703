"""Many small snapshots mounted on one machine, one after another by `dsctl mount`: how long it takes, and what the
processes that serve them take of the memory, before anything is read and after every file was read once.

Memory is PSS: each page is counted once, in equal parts, however many processes have it (proc(5), smaps_rollup). All
processes of the home but the cache daemon are counted, and divided by the number of mounts.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from benchmarks.harness import Home, ResultTable, Workspace, make_files, parser


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mounts", type=int, default=64)
    arguments.add_argument("--files", type=int, default=100, help="in each snapshot")
    arguments.add_argument("--size", type=int, default=20_000, help="bytes of a file")
    args = arguments.parse_args()
    if args.quick:
        args.mounts, args.files = 3, 5
    with Workspace(args.dir) as work:
        home = work.home("home", ram_bytes="64MiB", ssd_bytes="4GiB")
        places = []
        for number in range(args.mounts):
            source = work.folder(f"source-{number}")
            make_files(source, args.files, args.size)
            home.dsctl("snapshot", "create", f"set-{number}", "--from", str(source))
            places.append(work.folder(f"mnt-{number}"))
        home.dsctl("daemon", "start")
        took = []
        for number, place in enumerate(places):
            began = time.monotonic()
            home.dsctl("mount", f"set-{number}", place)
            took.append(time.monotonic() - began)
        fresh = memory(home)
        for place in places:
            for path in place.iterdir():
                path.read_bytes()
        used = memory(home)
        table = ResultTable(f"{args.mounts} mounts of {args.files} files", "what", "value")
        table.row("seconds for all of them", sum(took))
        table.row("the first one, s", took[0])
        table.row("the median, s", median(took))
        table.row("processes", used[1])
        table.row("MiB a mount, nothing read", fresh[0] / args.mounts)
        table.row("MiB a mount, all read", used[0] / args.mounts)
        table.print()


def memory(home: Home) -> tuple[float, int]:
    """The PSS in MiB of the processes that serve a home's mounts, and how many they are."""
    total, count = 0, 0
    for pid in home.processes():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"fuse_mount" not in words:
            continue
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        count += 1
    return total / 1024, count


if __name__ == "__main__":
    main()
