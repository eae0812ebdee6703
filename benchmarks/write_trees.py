"""Programs that change trees of small files through a directory of a bucket: our read-write mount and rclone mount
(`--vfs-cache-mode writes`), which take turns, beside the disk.

The S3 server keeps its objects in memory on the same machine, and every system gets a bucket of its own. In order:
  cp -a, or rsync -a        a new tree
  rsync --delete --inplace  the same tree, of which a quarter is gone by then and a quarter has other bytes of the same
                            size: these are opened and written over where they lie
  rm -rf                    the tree
Without rsync on the machine the tree is made by cp, and its second line is left out. Seconds until the program returns
are medians of the rounds; "in the bucket" counts from its start too, and what is there then is compared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.harness import ResultTable, benchmark, ratio
from benchmarks.written import ARRIVAL_TIMEOUT_S, OURS, BucketView, System, small, system
from tests import leftovers

_A_FOLDER = 100
_BYTES = 4096
_AT_S = 1_700_000_000
_RSYNC = ["rsync", "-a", "--delete", "--inplace"]


def main() -> None:
    with benchmark(
        __doc__,
        {"makers": ("cp", "rsync")},
        makers=["cp", "rsync"] if shutil.which("rsync") else ["cp"],
        systems=["disk", OURS, "rclone"],
        files=(8000, 40),
        rounds=(3, 1),
    ) as (args, work):
        if args.quick:
            os.environ["RCLONE_VFS_WRITE_BACK"] = "100ms"
        memory = work.short_folder(prefix=leftovers.SHARED_MEMORY_PREFIX, dir=leftovers.SHARED_MEMORY)
        server = work.s3(root=memory)
        old, new = work.folder("old"), work.folder("new")
        before = _make(old, {number: number for number in range(args.files)})
        after = _make(new, {n: n + (n % 4 == 1) * args.files for n in range(args.files) if n % 4})
        times: dict[str, dict[str, list[tuple[float, float | None]]]] = defaultdict(lambda: defaultdict(list))
        for _ in range(args.rounds):
            for maker in args.makers:
                for name in args.systems:
                    with system(name, work, server) as target:
                        top = target.folder / "top"
                        steps = [(["cp", "-a", f"{old}", f"{top}"], before)]
                        if maker == "rsync":
                            steps = [(["rsync", "-a", f"{old}/", f"{top}/"], before)]
                            steps.append(([*_RSYNC, f"{new}/", f"{top}/"], after))
                        for command, wanted in [*steps, (["rm", "-rf", f"{top}"], {})]:
                            what = " ".join(word for word in command if "/" not in word)
                            times[what][name].append(_timed(command, target, wanted))
        for what, found in times.items():
            _print(f"{what}, {args.files:,} files of {_BYTES:,} bytes, s", found)


def _make(folder: Path, contents: dict[int, int]) -> dict[str, int]:
    """Write files of these numbers with the contents of other numbers; return these by the keys in the bucket."""
    made = {}
    for number, content in contents.items():
        path = folder / f"d{number // _A_FOLDER:03}" / f"f{number:06}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(small(content, _BYTES))
        at_s = _AT_S + (content != number)
        os.utime(path, (at_s, at_s))
        made[f"top/{path.parent.name}/{path.name}"] = content
    return made


def _timed(command: list[str], target: System, wanted: dict[str, int]) -> tuple[float, float | None]:
    """Run a program; return the seconds until it returned, and until the bucket has what is wanted."""
    began = time.monotonic()
    subprocess.run(command, check=True)
    returned_s = time.monotonic() - began
    if target.view is None:
        return returned_s, None
    while not _has(target.view, wanted):
        if time.monotonic() > began + ARRIVAL_TIMEOUT_S:
            raise SystemExit(f"{target.name}: the bucket did not get what {command[0]} did")
        time.sleep(0.25)
    return returned_s, time.monotonic() - began


def _has(view: BucketView, wanted: dict[str, int]) -> bool:
    """Return whether the bucket has exactly these files, whatever markers of folders it has."""
    sizes = {found["path"]: found["size"] for page in view.store.list() for found in page}
    if {key for key in sizes if not key.endswith("/")} != wanted.keys():
        return False
    changed = [key for key, content in wanted.items() if not key.endswith(f"{content:06}")]
    return all(bytes(view.store.get(key).bytes()) == small(wanted[key], _BYTES) for key in changed)


def _print(title: str, times: dict[str, list[tuple[float, float | None]]]) -> None:
    returned = {name: median(returned for returned, _ in found) for name, found in times.items()}
    arrived = {name: [at for _, at in found if at is not None] for name, found in times.items()}
    table = ResultTable(title, "", "until it returned", "/ ours", "until in the bucket")
    for name, taken_s in returned.items():
        there = median(arrived[name]) if arrived[name] else None
        table.row(name, taken_s, ratio(taken_s, returned.get(OURS)) if name != OURS else None, there)
    table.print()


if __name__ == "__main__":
    main()
