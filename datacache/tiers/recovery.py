"""Open a node's cache for writing: check rather than trust, and repair what can be repaired.

Only the daemon calls this, and holds its lock. An index that was not closed cleanly is read by another process first (a
torn LMDB file can be fatal to its reader). An index that is gone, as it lies in memory, comes back from its copy if it
was closed cleanly. If neither will do, it is made again from the regions' own records.

`python -m datacache.tiers.recovery INDEX [--some]` is that other process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import lmdb

from datacache.core.boot import boot_id
from datacache.core.errors import CacheError
from datacache.core.ids import ObjectRef
from datacache.settings import Settings
from datacache.tiers import containers, layout
from datacache.tiers.eviction import Shares
from datacache.tiers.index import TIER_NAMES, UNCHECKED, Index, container_key, forget_index, open_index
from datacache.tiers.memory import AccessTable, held_memory_dir, memory_dir
from datacache.tiers.parts import Part
from datacache.tiers.tier import Container, Pins, Tier
from datacache.tiers.writer import TierWriter, read_pins

log = logging.getLogger(__name__)
_CLEAN = "CLEAN"
_BOOT = "BOOT"
_DATA = "data.mdb"
_BOUNCE_BYTES = 8 * 2**20
_STARTING_BYTES = 2**20
"""The room for small files of its own that a daemon makes on a full disk when it starts."""
_INDEX_SLACK = 256 * 1024  # what the index may grow by between two looks at its size


@contextlib.contextmanager
def open_tiers(settings: Settings) -> Iterator[TierWriter]:
    """Yield the writer of a home's tiers. `CacheError` if the folder cannot be used or has a newer format."""
    with contextlib.ExitStack() as held:
        yield from _opened(settings, held)


def _opened(settings: Settings, held: contextlib.ExitStack) -> Iterator[TierWriter]:
    home = settings.home
    folder = layout.cache_dir(home)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        memory = held.enter_context(held_memory_dir(home, settings.ram_dir))
        folders = {"ram": memory, "ssd": layout.ssd_dir(home)}
        folders["ssd"].mkdir(mode=0o700, exist_ok=True)
        for path in (folder, *folders.values()):
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(13, "permission denied", str(path))
        if _check_format(folder):  # the home is new: what lies here is of another that had its path
            # What processes have mapped stays: they may be this home's already.
            for number in layout.index_generations(memory):
                shutil.rmtree(memory / f"index.{number}", ignore_errors=True)
            for path in _containers_in(memory):
                path.unlink()
        index, clean = _sound_index(home, folders)
        try:
            writer = _writer(settings, index, folders, check=not clean)
        except BaseException:
            forget_index(index.folder)
            raise
    except (lmdb.Error, OSError) as exc:
        hint = "Free some room or set DATACACHE_HOME to another folder."
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise CacheError(f"the cache folder {folder} cannot be used: {reason}", hint=hint) from exc
    try:
        yield writer
    finally:
        writer.close()
        try:
            index.env.sync(True)
            _save(index, layout.saved_index(home))
            forget_index(index.folder)
            (folder / _CLEAN).write_text(_stamp(index.folder / _DATA) + "\n" + _stamp(layout.saved_index(home)))
        except (lmdb.Error, OSError) as exc:  # the next start looks more closely
            log.warning("the index %s was not closed cleanly: %s", index.folder, exc)
            forget_index(index.folder)


@contextlib.contextmanager
def open_part(settings: Settings, part: Part) -> Iterator[TierWriter]:
    """Yield the writer of a part but the first, whose process has the tiers of all open. The budgets in the settings
    are the part's own. `CacheError`."""
    memory = memory_dir(settings.home, settings.ram_dir)
    folders = {"ram": memory, "ssd": layout.ssd_dir(settings.home)}
    writer = _writer(settings, open_index(layout.index_dir(memory), writable=True), folders, check=False, part=part)
    try:
        yield writer
    finally:
        writer.close()


def _writer(
    settings: Settings,
    index: Index,
    folders: dict[str, Path],
    *,
    check: bool,
    part: Part = Part(),  # noqa: B008 - immutable
) -> TierWriter:
    access = AccessTable(folders["ram"] / "access.bin")
    overhead = {"ram": lambda: 0, "ssd": lambda: (index.size_bytes() + _INDEX_SLACK) // part.of}  # its copy
    budgets = {"ram": settings.ram_bytes, "ssd": settings.ssd_bytes}
    tiers = [
        Tier(
            name,
            folders[name],
            budget_bytes=budgets[name],
            # Published orders say what goes from the SSD; memory holds copies of what is there.
            policy="keep" if name == "ram" and settings.eviction == "clairvoyant" else settings.eviction,
            ttl_s=settings.ttl_s,
            index=index,
            access=access,
            overhead=overhead[name],
            bounce=containers.Bounce(_BOUNCE_BYTES) if name == "ssd" else None,
            check=check,
            shares=Shares(settings.shares),
            part=part,
        )
        for name in TIER_NAMES
    ]
    for tier in tiers:
        tier.make_room(0)  # the set size may be smaller than last time
        # It is a hard limit then, too: what was read least recently goes, whatever the policy.
        for id in sorted(tier.containers, key=lambda id: (bool(tier.containers[id].pinned_by), tier.last_used(id))):
            if tier.used_bytes > tier.budget_bytes or _lacks_room_to_start(tier, id):
                tier.evict([id])
        tier.shrunk_bytes = tier.evicted_bytes
        if tier.shrunk_bytes:
            words = "evicted %d bytes of %s: it may take %d only, or its disk is full"
            log.warning(words, tier.shrunk_bytes, tier.name, tier.budget_bytes)
    return TierWriter(index, tiers, layout.pins_file(settings.home), part, layout.tenants_file(settings.home))


def _lacks_room_to_start(tier: Tier, id: int) -> bool:
    """Tell whether a container makes way for what the daemon writes when it starts. Not many do, as the disk has no
    more room for that while readers have them open."""
    if tier.evicted_bytes >= _STARTING_BYTES or tier.containers[id].pinned_by:
        return False
    disk = os.statvfs(tier.folder)
    return disk.f_bavail * disk.f_frsize < _STARTING_BYTES


def _check_format(folder: Path) -> bool:
    """Tell whether the cache is a new one."""
    marker = folder / "FORMAT"
    try:
        text = marker.read_text()
    except FileNotFoundError:
        text = ""
    if text.strip() == str(layout.FORMAT_VERSION):
        return False
    if text:
        raise CacheError(
            f"the cache folder {folder} has format {text.strip()[:20]!r}; this version knows {layout.FORMAT_VERSION}",
            hint=f"Remove {folder} (it holds only copies of objects), or set DATACACHE_HOME to another folder.",
        )
    marker.write_text(str(layout.FORMAT_VERSION))
    return True


def _stamp(file: Path) -> str:
    status = os.stat(file)
    return f"{file.parent.name} {status.st_size} {status.st_mtime_ns}"


def _save(index: Index, saved: Path) -> None:
    """Replace the copy of the index."""
    beside = saved.with_name(f"{saved.name}.new")
    beside.mkdir(mode=0o700, exist_ok=True)
    try:
        index.env.copy(str(beside), compact=False)
        fd = os.open(beside / _DATA, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        (beside / _DATA).replace(saved)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _machine_went_down(marker: Path) -> bool:
    """Tell whether the index was last opened in another boot, and note this one."""
    before = ""
    with contextlib.suppress(OSError):
        before = marker.read_text()
    if before != boot_id():
        try:
            marker.write_text(boot_id())
        except OSError:  # a full disk: not known is better than wrong
            with contextlib.suppress(OSError):
                marker.unlink(missing_ok=True)
    return bool(before and boot_id()) and before != boot_id()


def _sound_index(home: Path, folders: dict[str, Path]) -> tuple[Index, bool]:
    """Return the index, and whether it was closed cleanly."""
    cache, memory = layout.cache_dir(home), folders["ram"]
    went_down = _machine_went_down(cache / _BOOT)
    folder, clean, saved = layout.index_dir(memory), cache / _CLEAN, layout.saved_index(home)
    closed: list[str] = []
    with contextlib.suppress(OSError):
        closed = clean.read_text().splitlines()
    clean.unlink(missing_ok=True)
    closed_cleanly = False
    if (folder / _DATA).exists():
        closed_cleanly = closed[:1] == [_stamp(folder / _DATA)]
        if not closed_cleanly and (went_down or not _walks(folder, folders)):
            folder = _rebuild(home, folders)
    elif saved.exists() and closed[1:] == [_stamp(saved)]:
        folder.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(saved, folder / _DATA)
        closed_cleanly = True
    elif _containers_in(*folders.values()):
        folder = _rebuild(home, folders)
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in layout.index_generations(memory):
        old = memory / f"index.{number}"
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    for number in layout.index_generations(cache):  # of a version that had it on disk
        shutil.rmtree(cache / f"index.{number}", ignore_errors=True)
    return open_index(folder, writable=True), closed_cleanly


def _containers_in(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.iterdir() if layout.container_of(path.name) is not None]


def _walks(folder: Path, folders: dict[str, Path]) -> bool:
    """Tell whether another process reads the whole index without an error, without dying of it, and finds a container
    in it if there are any. Not by a fork: this process may have threads."""
    some = ["--some"] if _containers_in(*folders.values()) else []
    package_root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH")) if p)
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, "-m", "datacache.tiers.recovery", str(folder), *some],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            env=os.environ | {"PYTHONPATH": path},
        )
        if found.returncode != -signal.SIGKILL:  # for want of memory, say: that may be chance, once
            break
    if found.returncode:
        log.warning("the index %s is broken: %s", folder, found.stderr.strip()[-500:] or f"exit {found.returncode}")
    return found.returncode == 0


def _rebuild(home: Path, folders: dict[str, Path]) -> Path:
    """Make a new index from the records in the regions. Object files are dropped, as their checksums were in the old
    index, and so is a region that cannot be read."""
    memory = folders["ram"]
    fresh = memory / "index.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    index, blocks, highest = Index(fresh, writable=True), 0, 0
    pinned = read_pins(layout.pins_file(home))
    for tier, folder in folders.items():
        for path in sorted(_containers_in(folder)):
            id = layout.container_of(path.name)
            assert id is not None
            highest = max(highest, id & ~layout.OBJECT_FILE)
            try:
                found = _reindex(index, tier, id, path, pinned)
            except OSError as exc:
                log.warning("%s cannot be read and is dropped: %s", path, exc.strerror)
                found = None
            if found is None:
                with contextlib.suppress(OSError):  # not in the index, so nobody reads it
                    path.unlink()
            else:
                blocks += found
    with index.write() as txn:
        txn.put(b"next-container", (highest + 1).to_bytes(4, "big"), db=index.meta)
    index.env.sync(True)
    index.close()
    target = memory / f"index.{max(layout.index_generations(memory), default=-1) + 1}"
    fresh.rename(target)
    log.warning("made the index again from the regions: %d blocks", blocks)
    return target


def _reindex(index: Index, tier: str, id: int, path: Path, pinned: Pins) -> int | None:
    """Put a region's blocks into an index; return their number. None for a file that is no region."""
    dataset = None if id & layout.OBJECT_FILE else containers.region_dataset(path)
    if dataset is None:
        return None
    blocks = 0
    with index.write() as txn:
        for block, location in containers.scan_region(path):
            txn.put(block, layout.pack_location(location), db=index.blocks[tier])
            blocks += 1
        container = Container(
            dataset=dataset,
            disk_bytes=path.stat().st_blocks * 512,
            pinned_by=[ref for ref, of in pinned.items() if of == dataset],
        )
        txn.put(container_key(tier, id), json.dumps(asdict(container)).encode(), db=index.meta)
    return blocks


def main() -> int:
    """Read a whole index, `sys.argv[1]`; return 0 if all of it makes sense and, with `--some`, it knows a container."""
    known = 0
    try:
        index = Index(Path(sys.argv[1]), writable=True)
        with index.env.begin() as txn:
            for tier in TIER_NAMES:
                with txn.cursor(db=index.blocks[tier]) as cursor:
                    for _, value in cursor:
                        layout.unpack_location(value)
            with txn.cursor(db=index.meta) as cursor:
                for key, value in cursor:
                    if b"/" in key:
                        Container(**json.loads(value))
                        known += 1
                    elif key.startswith(UNCHECKED):
                        ObjectRef(*json.loads(value))
    except (CacheError, lmdb.Error, OSError, ValueError, TypeError, IndexError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 1 if "--some" in sys.argv[2:] and not known else 0


if __name__ == "__main__":
    sys.exit(main())
