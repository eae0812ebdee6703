"""Versions: what another snapshot costs, in time and in catalog bytes, and what a diff costs.

First a folder of small files of which 1 % at random are rewritten each round. `dsctl snapshot create` of it against
hashing all of it (XXH3, in this process, one thread and two) and against `dvc add`; then `snapshot diff` of the
last two versions against `dvc diff`. With the files in the page cache, and with their data (not the directories)
dropped from it. DVC works without git while it adds, and its two versions are committed to git for its diff. It is
installed on first use, in a virtual environment of its own.

Then catalogs with versions of a large data set whose ETags are random, as S3's are: each adds files under a new
prefix, or each changes files at random. Bytes are those of the stored blobs, and of the database's files. SQLite,
and MongoDB. `--files 0` and `--entries 0` leave a part out.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import xxhash

from benchmarks.harness import DSCTL, Home, ResultTable, Workspace, benchmark, drop_caches, ratio, timed
from benchmarks.peers import DVC, Dvc, PeerUnavailableError, programs_of
from benchmarks.usage import CommandUsage, measured
from datacache.api import open_catalog
from datacache.catalog.base import Catalog
from datacache.catalog.commit import commit_manifest
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import BlobId, Entry, Lineage, Naming, Source
from datacache.manifest.reader import Manifest
from tests.servers import Mongod

FILES_OF_A_FOLDER = 1_000
OURS = "dsctl snapshot create"
ADDED, CHANGED = "each adds files under a new prefix", "each changes files at random"


def main() -> None:
    with benchmark(
        __doc__, files=(100_000, 500), rounds=(3, 1), entries=(1_000_000, 5_000), changes=(1_000, 5), versions=(10, 3)
    ) as (args, work):
        if args.files:
            try:
                programs: Path | None = programs_of(DVC, args)
            except PeerUnavailableError as exc:
                programs = None
                print(f"{DVC} is not measured: {exc}")
            measure_folder(work, args.files, args.rounds, programs)
        if args.entries:
            measure_space(work, args.entries, args.changes, args.versions)


# --- a folder ---


def measure_folder(work: Workspace, files: int, rounds: int, programs: Path | None) -> None:
    """Measure snapshots of a folder that changes, against hashing and DVC."""
    repository = work.folder("repository")
    tree, chance = repository / "data", random.Random(0)
    paths = make_small_files(tree, files, chance)
    home = work.home("folder-home")
    dvc = Dvc(programs, repository, tree.name) if programs is not None else None

    actions: dict[str, Callable[[], object]] = {
        OURS: lambda: home.snapshot("files", f"file://{tree}"),
        "XXH3 of all, 1 thread": lambda: hash_all(tree, 1),
        "XXH3 of all, 2 threads": lambda: hash_all(tree, 2),
    }
    if dvc is not None:
        actions["dvc add"] = dvc.add
    first = {name: timed(action) for name, action in actions.items()}
    later: dict[bool, dict[str, list[float]]] = {dropped: {name: [] for name in actions} for dropped in (True, False)}
    for dropped in [*later] * rounds:
        before = latest(home, "files")
        changed = chance.sample(paths, max(1, files // 100))
        for path in changed:
            path.write_bytes(chance.randbytes(path.stat().st_size))
        for name, action in actions.items():
            if dropped:
                drop_caches()
            later[dropped][name].append(timed(action))
        after = latest(home, "files")

    columns = ("first, s", "changed, s", "ours /", "changed, dropped, s", "ours /")
    table = ResultTable(f"{files:,} small files, {len(changed):,} changed", "", *columns)
    for name in actions:
        kept, dropped_s = (median(later[dropped][name]) for dropped in (False, True))
        ratios = [ratio(median(later[dropped][OURS]), s) for dropped, s in ((False, kept), (True, dropped_s))]
        table.row(name, first[name], kept, ratios[0], dropped_s, ratios[1])
    table.print()

    diffs = ResultTable("what changed between the last two versions", "", "seconds", "ours /", "peak MiB")
    diff = snapshot_diff(home, before, after, changed=len(changed), rounds=rounds)
    diffs.row("dsctl snapshot diff", diff.seconds, None, diff.peak_mib)
    if dvc is not None:
        dvc.track()
        found: list[str] = []
        seconds = median(timed(lambda: found.append(dvc.diff())) for _ in range(rounds))
        files_changed = [item for item in json.loads(found[0])["modified"] if not item["path"].endswith("/")]
        if len(files_changed) != len(changed):
            raise SystemExit(f"dvc diff says {len(files_changed)} instead of {len(changed)}")
        diffs.row("dvc diff", seconds, ratio(diff.seconds, seconds), None)
    diffs.print()


def make_small_files(root: Path, count: int, chance: random.Random) -> list[Path]:
    """Write files of 1 to 3 KB, a thousand in a folder."""
    paths = [root / f"{number // FILES_OF_A_FOLDER:04}" / f"{number:07}.bin" for number in range(count)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(chance.randrange(1_000, 3_000)))
    return paths


def hash_all(root: Path, threads: int) -> None:
    """Compute XXH3-128 of every file of a tree."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]

    def digest(path: str) -> bytes:
        with open(path, "rb", buffering=0) as file:
            return xxhash.xxh3_128_digest(file.read())

    with ThreadPoolExecutor(threads) as pool:
        parts = (paths[number::threads] for number in range(threads))
        list(pool.map(lambda part: [digest(path) for path in part], parts))


# --- a large data set ---


def measure_space(work: Workspace, entries: int, changes: int, versions: int) -> None:
    """Measure catalogs with many versions, on both databases."""
    columns = ("first, MB", "all, MB", "all / first", "database, first", "all", "diff of two, s", "peak MiB")
    table = ResultTable(f"{versions} versions of {entries:,} entries, {changes:,} changes each", "", *columns)
    with Mongod(work.path / "mongod") as mongod:
        for series in (ADDED, CHANGED):
            for name in ("SQLite", "MongoDB"):
                settings = {"catalog": mongod.database_url()} if name == "MongoDB" else {}
                home = work.home(f"{name}-{series.split()[1]}", **settings)
                table.row(f"{name}, {series}", *space_of(home, series, entries, changes, versions))
                home.close()
    table.print()


def space_of(home: Home, series: str, entries: int, changes: int, versions: int) -> tuple[float | str | None, ...]:
    """Return the cells of one catalog's row."""
    ids: list[str] = []
    blobs: dict[BlobId, int] = {}
    sizes, databases = [], []
    with home.environment():
        catalog = open_catalog()
        for rows in versions_of(series, entries, changes, versions):
            ids.append(commit(catalog, rows))
            blobs |= blobs_of(catalog, ids[-1])
            sizes.append(sum(blobs.values()) / 1e6)
            databases.append(database_bytes(home) / 1e6)
        catalog.close()
    expected = {"added" if series == ADDED else "changed": changes}
    diff = snapshot_diff(home, ids[0], ids[1], rounds=3, name="many", **expected)
    return (
        sizes[0], sizes[-1], ratio(sizes[-1], sizes[0]), databases[0], databases[-1], diff.seconds, diff.peak_mib
    )  # fmt: skip


def versions_of(series: str, entries: int, changes: int, versions: int) -> Iterator[list[Entry]]:
    """Yield the entries of each version, in path order; the same list again and again."""
    chance = random.Random(0)
    rows = [
        _random_entry(chance, f"images/{number // FILES_OF_A_FOLDER:05}/{number:08}.jpg") for number in range(entries)
    ]
    yield rows
    for version in range(1, versions):
        if series == ADDED:
            rows += [_random_entry(chance, f"later-{version:03}/{number:08}.jpg") for number in range(changes)]
        else:
            for row in chance.sample(range(entries), changes):
                rows[row] = _random_entry(chance, rows[row].path.decode())
        yield rows


def _random_entry(chance: random.Random, path: str) -> Entry:
    mtime_ns = (1_700_000_000 + chance.randrange(30_000_000)) * 10**9  # S3 gives seconds
    return Entry(path.encode(), chance.randrange(20_000, 300_000), mtime_ns, chance.randbytes(16).hex())


def commit(catalog: Catalog, rows: list[Entry]) -> str:
    """Make these entries the latest snapshot of `many`; return its id."""
    builder = ManifestBuilder([Source("s3://many", "")], catalog.put_blobs)
    for row in rows:
        builder.add(row)
    record = commit_manifest(catalog, builder, Naming(name="many"), origin="s3://many/", lineage=Lineage("create", {}))
    return record.id


def database_bytes(home: Home) -> int:
    """Return the size of a home's database, everything written down."""
    url = home.env.get("DATACACHE_CATALOG", "")
    if url.startswith("mongodb://"):
        import pymongo

        client: pymongo.MongoClient[dict[str, object]]
        with pymongo.MongoClient(url) as client:
            client.admin.command("fsync")
            stats = client.get_default_database().command("dbStats")
            return int(stats["totalSize"])
    file = home.path / "catalog.db"
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    return file.stat().st_size


# --- both ---


def latest(home: Home, name: str) -> str:
    """Return the whole id of a dataset's latest snapshot."""
    id: str = json.loads(home.dsctl("snapshot", "show", name, "--json"))["id"]
    return id


def blobs_of(catalog: Catalog, id: str) -> dict[BlobId, int]:
    """Return the blobs of a snapshot's manifest with their stored sizes."""
    ids = [info.blob for info in Manifest.open(id, catalog.get_blobs).root.ranges]
    return {blob: len(data) for blob, data in catalog.get_blobs([BlobId(bytes.fromhex(id)), *ids]).items()}


def snapshot_diff(
    home: Home, before: str, after: str, *, rounds: int, name: str = "files", **expected: int
) -> CommandUsage:
    """Compare two snapshots; return the run of median length. A wrong answer ends the benchmark."""
    command = [DSCTL, "snapshot", "diff", f"{name}@{before}", f"{name}@{after}", "--json"]
    runs = [measured(command, env=home.env) for _ in range(rounds)]
    found = json.loads(runs[0].output)
    for kind in ("added", "removed", "changed"):
        if found[kind]["files"] != expected.get(kind, 0):
            raise SystemExit(f"the diff says {found[kind]['files']} {kind} instead of {expected.get(kind, 0)}")
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


if __name__ == "__main__":
    main()
