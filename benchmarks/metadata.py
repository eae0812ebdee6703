"""A snapshot of a million entries: what creating, mounting and listing it costs in time and memory.

The entries come from a tree of empty files (`file://`) and from a synthetic ListObjectsV2 server in a child process.
Memory is the peak of the `dsctl` process, and the resident set of each process of the mount after a full `find`. The
listing rate is `ls -f` of one directory of 100,000 entries, through the mount and on the native disk, directory entries
and inodes dropped from memory before each, and once more with them kept.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from statistics import median

from benchmarks.harness import DSCTL, Home, ResultTable, benchmark, drop_caches, ratio, timed
from benchmarks.synthetic_s3 import BUCKET, synthetic_s3
from benchmarks.usage import command_of, measured, memory_mib


def main() -> None:
    with benchmark(__doc__, folders=(10, 3), files=(100_000, 500), rounds=(5, 1)) as (args, work):
        entries = args.folders * args.files
        create = ResultTable(f"snapshot create, {entries:,} entries", "from", "seconds", "entries/s", "peak MiB")

        def create_from(label: str, url: str, home: Home) -> None:
            for text in (label, f"{label}, unchanged"):
                usage = measured([DSCTL, "snapshot", "create", "many", "--from", url], env=home.env)
                create.row(text, usage.seconds, entries / usage.seconds, usage.peak_mib)

        with synthetic_s3(args.folders, args.files) as env:
            home = work.home("s3-home", env)
            create_from("S3", f"s3://{BUCKET}", home)
            home.close()
        tree = work.folder("tree")
        for folder in range(args.folders):
            path = work.folder(f"tree/{folder:04d}")
            for number in range(args.files):
                os.mknod(path / f"{number:07d}.jpg", 0o644)
        home = work.home("file-home")
        create_from("folder", f"file://{tree}", home)
        create.print()
        measure_mount(home, work.folder("mount"), tree, args.folders, args.files, args.rounds)


def measure_mount(home: Home, mount: Path, tree: Path, folders: int, files: int, rounds: int) -> None:
    """Mount, list, find, and look at the processes."""
    home.dsctl("mount", "many@latest", mount)
    os.listdir(mount)
    home.dsctl("umount", mount)

    def mount_and_list() -> None:
        home.dsctl("mount", "many@latest", mount)
        os.listdir(mount / "0000")

    table = ResultTable("the mount", "", "mount", "native", "/ native")
    table.row("mount again to the first ls, s", timed(mount_and_list), None, None)
    for dropped in (True, False):
        rates = [
            files
            / median(seconds_of("ls", "-f", root / "0000", lines=files + 2, dropped=dropped) for _ in range(rounds))
            for root in (mount, tree)
        ]
        label = f"ls -f, {files:,} entries, {'dropped' if dropped else 'kept'}, entries/s"
        table.row(label, *rates, ratio(*rates))
    paths = folders * (files + 1) + 1
    rates = [paths / seconds_of("find", root, lines=paths, dropped=True) for root in (mount, tree)]
    table.row("find, entries/s", *rates, ratio(*rates))
    resident = sorted(((memory_mib(pid, "VmRSS"), name_of(pid)) for pid in home.processes()), reverse=True)
    for number, (mib, name) in enumerate(resident):
        table.row(f"resident MiB after find: {number + 1} {name}", mib, None, None)
    table.print()
    home.dsctl("umount", mount)


def seconds_of(*command: str | Path, lines: int, dropped: bool) -> float:
    """Time a command that has to print so many lines."""
    if dropped:
        drop_caches(3)
    found: list[int] = []

    def run() -> None:
        with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            found.append(sum(chunk.count(b"\n") for chunk in iter(lambda: process.stdout.read(2**20), b"")))

    seconds = timed(run)
    if found != [lines]:
        raise SystemExit(f"{command} gives {found[0]:,} lines instead of {lines:,}")
    return seconds


def name_of(pid: int) -> str:
    """Return which module a Python process runs."""
    words = command_of(pid)
    return words[words.index("-m") + 1] if "-m" in words[:-1] else Path(words[0] if words else "").name


if __name__ == "__main__":
    main()
