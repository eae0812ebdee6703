"""A snapshot of a million entries: what creating, mounting and listing it costs in time and memory.

The entries come from a tree of empty files (`file://`) and from a synthetic ListObjectsV2 server in a child
process. Memory is the peak resident set of the `dsctl` process, and of each worker of the mount after a full
`find`. The listing rate is `ls -f` of one directory of 100,000 entries, through the mount and on the native
disk, directory entries and inodes dropped from memory before each, and once more with them kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import Home, ResultTable, Workspace, parser, ratio, timed
from benchmarks.synthetic_s3 import BUCKET, synthetic_s3


def make_tree(root: Path, folders: int, files: int) -> None:
    """Empty files, `files` in each of `folders` folders."""
    for folder in range(folders):
        path = root / f"{folder:04d}"
        path.mkdir()
        descriptor = os.open(path, os.O_RDONLY)
        for number in range(files):
            os.mknod(f"{number:07d}.jpg", 0o644, dir_fd=descriptor)
        os.close(descriptor)


def dsctl_measured(home: Home, *arguments: str) -> tuple[float, float]:
    """Run a command; its seconds and its peak resident MiB."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("dsctl")), *arguments], env=home.env, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"dsctl {arguments[0]} failed with exit code {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def resident_mib(pid: int) -> float:
    """Resident set now (proc(5), VmRSS)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def drop_directory_caches() -> None:
    """No directory entries, inodes or pages left in memory (proc(5), drop_caches)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def count(*command: str) -> int:
    """Lines a command prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        return sum(chunk.count(b"\n") for chunk in iter(lambda: process.stdout.read(2**20), b""))


def list_rate(folder: Path, entries: int, *, rounds: int, dropped: bool) -> float:
    """Entries a second of `ls -f`."""
    seconds = []
    for _ in range(rounds):
        if dropped:
            drop_directory_caches()
        start = time.perf_counter()
        found = count("ls", "-f", str(folder))
        seconds.append(time.perf_counter() - start)
        if found != entries + 2:
            raise SystemExit(f"{folder} lists {found - 2} entries instead of {entries}")
    return entries / median(seconds)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folders", type=int, default=10)
    arguments.add_argument("--files", type=int, default=100_000, help="files of a folder")
    arguments.add_argument("--rounds", type=int, default=5)
    args = arguments.parse_args()
    if args.quick:
        args.folders, args.files, args.rounds = 3, 500, 1
    entries = args.folders * args.files
    with Workspace(args.dir) as work:
        create = ResultTable(f"snapshot create, {entries:,} entries", "from", "seconds", "entries/s", "peak MiB")
        with synthetic_s3(args.folders, args.files) as env:
            home = work.home("s3-home", env)
            for label in ("S3", "S3, unchanged"):
                seconds, peak = dsctl_measured(home, "snapshot", "create", "many", "--from", f"s3://{BUCKET}")
                create.row(label, seconds, entries / seconds, peak)
            home.close()
        tree = work.folder("tree")
        make_tree(tree, args.folders, args.files)
        home = work.home("file-home")
        for label in ("folder", "folder, unchanged"):
            seconds, peak = dsctl_measured(home, "snapshot", "create", "many", "--from", f"file://{tree}")
            create.row(label, seconds, entries / seconds, peak)
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
        ours = list_rate(mount / "0000", files, rounds=rounds, dropped=dropped)
        native = list_rate(tree / "0000", files, rounds=rounds, dropped=dropped)
        label = f"ls -f, {files:,} entries, {'dropped' if dropped else 'kept'}, entries/s"
        table.row(label, ours, native, ratio(ours, native))
    expected = folders * (files + 1) + 1
    rates = []
    for root in (mount, tree):
        drop_directory_caches()
        start = time.perf_counter()
        found = count("find", str(root))
        rates.append(expected / (time.perf_counter() - start))
        if found != expected:
            raise SystemExit(f"find sees {found:,} paths in {root} instead of {expected:,}")
    table.row("find, entries/s", *rates, ratio(*rates))
    resident = sorted(((resident_mib(pid), name_of(pid)) for pid in home.processes()), reverse=True)
    for number, (mib, name) in enumerate(resident):
        table.row(f"resident MiB after find: {number + 1} {name}", mib, None, None)
    table.print()
    home.dsctl("umount", mount)


def name_of(pid: int) -> str:
    """Which module a Python process runs."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return words[words.index("-m") + 1] if "-m" in words[:-1] else Path(words[0]).name


if __name__ == "__main__":
    main()
