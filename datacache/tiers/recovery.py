"""Open a node's cache for writing: check rather than trust, and repair what can be repaired.

An index that was not closed cleanly is walked by a child process first (a torn LMDB file can be fatal to whoever reads
it); if the child fails or dies, the index is made again from the regions' own records. Only the daemon, holding its
lock, may call this, and before it has threads (it forks).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from datacache.core.errors import CacheError
from datacache.settings import Settings
from datacache.tiers import containers, layout
from datacache.tiers.access import FILE_BYTES, AccessTable
from datacache.tiers.index import TIER_NAMES, Index, forget_index, open_index
from datacache.tiers.tier import Container, Tier
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_CLEAN = "CLEAN"
_BOUNCE_BYTES = 8 * 2**20
_INDEX_SLACK = 256 * 1024  # what the index may grow by between two looks at its size


@contextlib.contextmanager
def open_tiers(settings: Settings) -> Iterator[TierWriter]:
    """The writer of a home's tiers. `CacheError` if the folder cannot be used or is of a newer version."""
    home = settings.home
    folder = layout.cache_dir(home)
    folders = {"ram": layout.ram_tier_dir(home, settings.ram_dir), "ssd": layout.ssd_dir(home)}
    try:
        for path in (folder, *folders.values()):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(13, "permission denied", str(path))
        if _check_format(folder):
            # The home is new: what lies in its RAM folder is of another that had its path.
            for path in folders["ram"].iterdir():
                path.unlink()
        index = _sound_index(home, folders)
        access = AccessTable(folder / "access.bin")
    except OSError as exc:
        hint = "Free some room or set DATACACHE_HOME to another folder."
        raise CacheError(f"the cache folder {folder} cannot be used: {exc.strerror or exc}", hint=hint) from exc
    overhead = {"ram": lambda: 0, "ssd": lambda: index.size_bytes() + FILE_BYTES + _INDEX_SLACK}
    budgets = {"ram": settings.ram_bytes, "ssd": settings.ssd_bytes}
    tiers = [
        Tier(
            name,
            folders[name],
            budget_bytes=budgets[name],
            policy=settings.eviction,
            ttl_s=settings.ttl_s,
            index=index,
            access=access,
            overhead=overhead[name],
            bounce=containers.Bounce(_BOUNCE_BYTES) if name == "ssd" else None,
        )
        for name in TIER_NAMES
    ]
    for tier in tiers:
        tier.make_room(0)  # the set size may be smaller than last time
        _shrink(tier)
    writer = TierWriter(index, tiers)
    try:
        yield writer
    finally:
        writer.close()
        index.env.sync(True)
        folder_of_index = index.folder
        forget_index(folder_of_index)
        (folder / _CLEAN).write_text(_stamp(folder_of_index))


def _shrink(tier: Tier) -> None:
    """A set size lowered below what is there is a hard limit too: the least recently read goes, whatever the policy."""
    by_age = sorted(tier.containers, key=lambda id: (bool(tier.containers[id].pinned_by), tier.last_used(id)))
    for id in by_age:
        if tier.used_bytes <= tier.budget_bytes:
            return
        tier.evict([id])


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


def _sound_index(home: Path, folders: dict[str, Path]) -> Index:
    folder, clean = layout.index_dir(home), layout.cache_dir(home) / _CLEAN
    if (folder / "data.mdb").exists():
        closed_cleanly = False
        with contextlib.suppress(OSError):
            closed_cleanly = clean.read_text() == _stamp(folder)
        clean.unlink(missing_ok=True)
        if not closed_cleanly and not _walks(folder, folders):
            folder = _rebuild(home, folders)
    elif _any_container(folders):
        folder = _rebuild(home, folders)
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in layout.index_generations(home):
        old = layout.cache_dir(home) / f"index.{number}"
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return open_index(folder, writable=True)


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
    """A new index from the records in the regions. Object files are dropped: their checksums were in the old index."""
    cache = layout.cache_dir(home)
    fresh = cache / "index.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    index, blocks, highest = Index(fresh, writable=True), 0, 0
    for tier, folder in folders.items():
        for path in sorted(folder.iterdir()):
            id = layout.container_of(path.name)
            dataset = containers.region_dataset(path) if id is not None and not id & layout.OBJECT_FILE else None
            if id is None or dataset is None:
                path.unlink(missing_ok=True)
                continue
            highest = max(highest, id)
            with index.env.begin(write=True) as txn:
                for block, location in containers.scan_region(path):
                    txn.put(block, layout.pack_location(location), db=index.blocks[tier])
                    blocks += 1
                container = Container(dataset=dataset, disk_bytes=path.stat().st_blocks * 512)
                txn.put(f"{tier}/{id:08x}".encode(), json.dumps(asdict(container)).encode(), db=index.meta)
    with index.env.begin(write=True) as txn:
        txn.put(b"next-container", (highest + 1).to_bytes(4, "big"), db=index.meta)
    index.env.sync(True)
    index.close()
    target = cache / f"index.{max(layout.index_generations(home), default=-1) + 1}"
    fresh.rename(target)
    log.warning("made the index again from the regions: %d blocks", blocks)
    return target
