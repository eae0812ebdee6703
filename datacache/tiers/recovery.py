"""Open a node's cache for writing: check rather than trust, and repair what can be repaired.

An index that was not closed cleanly is walked by a child process first (a torn LMDB file can be fatal to whoever reads
it); if the child fails or dies, or the machine itself went down meanwhile (commits are not fsynced), the index is made
again from the regions' own records. Only the daemon, holding its lock, may call this, and before it has threads (it
forks).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import lmdb

from datacache.core.errors import CacheError
from datacache.settings import Settings
from datacache.tiers import containers, layout, pins
from datacache.tiers.access import FILE_BYTES, AccessTable
from datacache.tiers.index import TIER_NAMES, Index, forget_index, open_index
from datacache.tiers.tier import Container, Pins, Tier
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_CLEAN = "CLEAN"
_BOOT = "BOOT"
_BOUNCE_BYTES = 8 * 2**20
_INDEX_SLACK = 256 * 1024  # what the index may grow by between two looks at its size


@contextlib.contextmanager
def open_tiers(settings: Settings) -> Iterator[TierWriter]:
    """The writer of a home's tiers. `CacheError` if the folder cannot be used or is of a newer version."""
    home = settings.home
    folder = layout.cache_dir(home)
    folders = {"ram": layout.ram_tier_dir(home, settings.ram_dir), "ssd": layout.ssd_dir(home)}
    if not settings.ram_dir.is_dir():
        raise CacheError(
            f"the folder for the RAM tier, {settings.ram_dir}, does not exist",
            hint="Set DATACACHE_RAM_DIR to a tmpfs, such as /dev/shm.",
        )
    try:
        for path in (folder, *folders.values()):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(13, "permission denied", str(path))
        _check_private(folders["ram"])
        if _check_format(folder):
            # The home is new: what lies in its RAM folder is of another that had its path.
            for path in folders["ram"].iterdir():
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
            forget_index(index.folder)
            (folder / _CLEAN).write_text(_stamp(index.folder))
        except (lmdb.Error, OSError) as exc:  # the next start looks more closely
            log.warning("the index %s was not closed cleanly: %s", index.folder, exc)
            forget_index(index.folder)


def _writer(settings: Settings, index: Index, folders: dict[str, Path], *, check: bool) -> TierWriter:
    access = AccessTable(layout.cache_dir(settings.home) / "access.bin")
    overhead = {"ram": lambda: 0, "ssd": lambda: index.size_bytes() + FILE_BYTES + _INDEX_SLACK}
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
        )
        for name in TIER_NAMES
    ]
    for tier in tiers:
        tier.make_room(0)  # the set size may be smaller than last time
        _shrink(tier)
    return TierWriter(index, tiers, layout.pins_file(settings.home))


def _shrink(tier: Tier) -> None:
    """A set size lowered below what is there is a hard limit too: the least recently read goes, whatever the policy."""
    by_age = sorted(tier.containers, key=lambda id: (bool(tier.containers[id].pinned_by), tier.last_used(id)))
    for id in by_age:
        if tier.used_bytes <= tier.budget_bytes:
            return
        tier.evict([id])


def _check_private(folder: Path) -> None:
    """The RAM tier's folder is at a place anybody can guess, where anybody may have made it first."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise CacheError(
            f"the RAM tier's folder {folder} is not a folder of this user alone",
            hint=f"Remove {folder}, or set DATACACHE_RAM_DIR to another folder.",
        )


def _check_format(folder: Path) -> bool:
    """Whether the cache is a new one."""
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


def _stamp(index: Path) -> str:
    status = os.stat(index / "data.mdb")
    return f"{index.name} {status.st_size} {status.st_mtime_ns}"


@functools.cache
def _boot_id() -> str:
    """Which boot of the machine this is; empty if nobody says."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _machine_went_down(marker: Path) -> bool:
    """Whether the index was last opened in another boot; from now on it was in this one."""
    before = ""
    with contextlib.suppress(OSError):
        before = marker.read_text()
    if before != _boot_id():
        try:
            marker.write_text(_boot_id())
        except OSError:  # a full disk: not known is better than wrong
            with contextlib.suppress(OSError):
                marker.unlink(missing_ok=True)
    return bool(before and _boot_id()) and before != _boot_id()


def _sound_index(home: Path, folders: dict[str, Path]) -> tuple[Index, bool]:
    """The index, and whether it was closed cleanly."""
    closed_cleanly, went_down = False, _machine_went_down(layout.cache_dir(home) / _BOOT)
    folder, clean = layout.index_dir(home), layout.cache_dir(home) / _CLEAN
    if (folder / "data.mdb").exists():
        with contextlib.suppress(OSError):
            closed_cleanly = clean.read_text() == _stamp(folder)
        clean.unlink(missing_ok=True)
        if not closed_cleanly and (went_down or not _walks(folder, folders)):
            folder = _rebuild(home, folders)
    elif _any_container(folders):
        folder = _rebuild(home, folders)
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in layout.index_generations(home):
        old = layout.cache_dir(home) / f"index.{number}"
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return open_index(folder, writable=True), closed_cleanly


def _any_container(folders: dict[str, Path]) -> bool:
    return any(layout.container_of(path.name) is not None for folder in folders.values() for path in folder.iterdir())


def _walks(folder: Path, folders: dict[str, Path]) -> bool:
    """Whether a child process can read the whole index without an error, without dying of it, and finds a container
    in it if there are any."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # dying is one of the answers
        code, known = 1, 0
        try:
            index = Index(folder, writable=True)
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
            code = 0 if known or not _any_container(folders) else 1
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the index is not sound
            log.warning("the index %s is broken: %s", folder, exc)
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _rebuild(home: Path, folders: dict[str, Path]) -> Path:
    """A new index from the records in the regions. Object files are dropped: their checksums were in the old index.
    So is a region that cannot be read."""
    cache = layout.cache_dir(home)
    fresh = cache / "index.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    index, blocks, highest = Index(fresh, writable=True), 0, 0
    pinned = pins.read(layout.pins_file(home))
    for tier, folder in folders.items():
        for path in sorted(folder.iterdir()):
            id = layout.container_of(path.name)
            if id is not None:
                highest = max(highest, id & ~layout.OBJECT_FILE)
            try:
                found = _reindex(index, tier, id, path, pinned) if id is not None else None
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
    target = cache / f"index.{max(layout.index_generations(home), default=-1) + 1}"
    fresh.rename(target)
    log.warning("made the index again from the regions: %d blocks", blocks)
    return target


def _reindex(index: Index, tier: str, id: int, path: Path, pinned: Pins) -> int | None:
    """Put a region's blocks into an index; how many. None for a file that is no region."""
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
        txn.put(f"{tier}/{id:08x}".encode(), json.dumps(asdict(container)).encode(), db=index.meta)
    return blocks
