"""`dsctl doctor`: can this node do what the settings ask for, and if not, what to do.

With `--json`: `{"ok", "checks": [{"name", "state", "message", "hint"}]}`, where a state is `ok`, `warn`
(works, but not fully) or `fail`. Exit code 1 if a check fails. It changes nothing but a probe file in the
home and one in the staging folder, which it removes.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

import fuse_mount
from datacache import api
from datacache.core import lockfile
from datacache.core.counters import count, format_seconds
from datacache.core.errors import DatacacheError, MountError
from datacache.settings import format_bytes
from dataset_cli.app import App, command
from dataset_cli.output import printable
from dataset_cli.variables import differences, misspelt

if TYPE_CHECKING:
    from datacache.settings import Settings

_RESEND_SINCE = (6, 9)
_NEEDED_SINCE = (5, 1)
_FILES_WANTED = 4096
_STORES_ASKED = 20
_NODES_TOLD = 20
_ANSWER_S = 10.0
"""How long all stores together may take to answer."""


class Check(NamedTuple):
    """The result of one check."""

    name: str
    state: str
    message: str
    hint: str = ""


@command()
def doctor(app: App) -> None:
    """Check that this node can do what the settings ask for.

    Each line is ok, warn or fail, and says what to do.
    """
    checks: list[Check] = []
    width = 12
    for check in _checks(app):
        checks.append(check)
        app.out.line(f"{check.state:5} {check.name:{width}} {printable(check.message)}")
        if check.hint and check.state != "ok":
            app.out.line(f"{'':5} {'':{width}} → {printable(check.hint)}")
    failed = sum(check.state == "fail" for check in checks)
    warned = sum(check.state == "warn" for check in checks)
    app.out.result({"ok": not failed, "checks": [check._asdict() for check in checks]})
    app.out.line()
    app.out.line(f"{len(checks) - failed - warned} ok, {warned} to look at, {failed} failed")
    if failed:
        raise click.exceptions.Exit(1)


def _checks(app: App) -> Iterator[Check]:
    yield _fuse_device()
    yield _fusermount()
    yield kernel(os.uname().release)
    yield _open_files()
    settings = app.settings
    yield from variables(os.environ)
    yield from config(settings)
    yield home(settings)
    yield ram(settings)
    if settings.fuse == "pyfuse3":
        yield _pyfuse3()
    yield staging(settings)
    yield from _catalog_and_stores(app)
    yield from _daemon(settings)
    yield from _cluster(settings)
    yield from _lost_mounts(settings)


def _lost_mounts(settings: Settings) -> Iterator[Check]:
    for info in fuse_mount.list_mounts(settings):
        if fuse_mount.is_lost(info, settings):
            hint = f"Mount it again: dsctl mount {info.ref} {shlex.quote(str(info.mountpoint))}"
            yield Check("mount", "fail", f"{info.mountpoint}: its processes have died, nobody serves it", hint)


def _fuse_device() -> Check:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        hint = "modprobe fuse; in a container, give it the device: docker run --device /dev/fuse …"
        return Check("FUSE", "fail", "there is no /dev/fuse: nothing can be mounted", hint)
    except OSError as exc:
        hint = "As root: chmod 666 /dev/fuse. In a container, the device must be allowed to it."
        return Check("FUSE", "fail", f"/dev/fuse cannot be opened: {exc.strerror}", hint)
    return Check("FUSE", "ok", "/dev/fuse can be used")


def _fusermount() -> Check:
    found = shutil.which("fusermount3")
    if found:
        return Check("fusermount3", "ok", found)
    if os.geteuid() == 0:
        return Check("fusermount3", "ok", "not installed, and not needed as root")
    return Check(
        "fusermount3", "fail", "not installed: you cannot mount", "Install the package fuse3, or mount as root."
    )


def kernel(release: str) -> Check:
    """Tell what a kernel of this release can do for mounts."""
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version >= _RESEND_SINCE:
        return Check("kernel", "ok", f"{release}: a mount survives its workers")
    if version >= _NEEDED_SINCE:
        text = f"{release}: mounts work; reads in flight fail once when a worker is killed"
        return Check("kernel", "warn", text, "Linux 6.9 or newer sends them again instead.")
    return Check("kernel", "fail", f"{release} is too old for our mounts", "Use Linux 5.1 or newer, best 6.9.")


def _open_files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FILES_WANTED:
        hint = f"Raise it (ulimit -Hn {_FILES_WANTED}, or LimitNOFILE=)."
        return Check("open files", "warn", f"at most {hard:,}", hint)
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard:,}"
    return Check("open files", "ok", f"{limit} (now {soft:,}; the daemon raises it)")


def variables(names: Iterable[str]) -> Iterator[Check]:
    """Find variables that nobody reads, though somebody meant them for us."""
    for name, meant in misspelt(names).items():
        yield Check("variables", "warn", f"{name} is set, and is no setting", f"Did you mean {meant}?")


def config(settings: Settings) -> Iterator[Check]:
    """Tell whether others can read the secrets in the configuration file."""
    if settings.config is None:
        return
    try:
        mode = settings.config.stat().st_mode
        text = settings.config.read_text(encoding="utf-8")
    except OSError as exc:
        yield Check("config", "fail", f"{settings.config} cannot be read: {exc.strerror}")
        return
    secret = any(store.secret_access_key or store.session_token for store in settings.stores)
    secret = secret or re.search(r"://[^/\s\"']*:[^/\s\"']*@", text) is not None  # the catalog's password
    if secret and mode & 0o077:
        who = "everybody" if mode & 0o007 else "its group"
        may = f"{who} on this machine can read or change it (mode {mode & 0o777:04o})"
        hint = f"chmod 600 {settings.config}, and renew the secret if others may have read it."
        yield Check("config", "fail", f"{settings.config} has a secret in it, and {may}", hint)
    else:
        yield Check("config", "ok", str(settings.config))


def home(settings: Settings) -> Check:
    """Tell whether the home can be written and its disk holds the SSD tier."""
    folder = settings.home
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_probe(folder)
    except OSError as exc:
        hint = "Set DATACACHE_HOME to a folder on a local disk you can write to."
        return Check("home", "fail", f"{folder} cannot be written: {exc.strerror}", _way_out(exc, folder, hint))
    used = _size_of(folder / "cache" / "ssd")
    free = shutil.disk_usage(folder).free
    room = f"{folder}: {format_bytes(free)} free"
    if free + used < settings.ssd_bytes:
        text = f"{room}, {format_bytes(used)} cached; the limit is {format_bytes(settings.ssd_bytes)}"
        hint = "The disk is full before the cache is: free some, or lower DATACACHE_SSD_BYTES."
        return Check("home", "warn", text, hint)
    return Check("home", "ok", f"{room}, {format_bytes(settings.ssd_bytes)} for the cache")


def _write_probe(folder: Path, *, lock: bool = False) -> None:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-") as probe:
        probe.write(b"x" * 4096)
        probe.flush()
        os.fsync(probe.fileno())
        if lock:
            lockfile.take(probe.fileno(), wait=False)


def _way_out(exc: OSError, folder: Path, hint: str) -> str:
    full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"Make room: df -h {shlex.quote(str(folder))}" if full else hint


def ram(settings: Settings) -> Check:
    """Tell whether the RAM tier has room."""
    folder = settings.ram_dir
    if not os.access(folder, os.W_OK | os.X_OK):
        hint = "Set DATACACHE_RAM_DIR to a tmpfs you can write to."
        return Check("memory", "fail", f"{folder} cannot be written", hint)
    used = sum(_size_of(tier) for tier in folder.glob(f"datacache-{os.getuid()}-*"))
    free = shutil.disk_usage(folder).free
    left = api.abandoned_dirs(folder)
    if left:
        text = f"{folder} has {format_bytes(sum(map(_size_of, left)))} of homes that were removed"
        hint = f"The next daemon that starts removes it. Or: rm -r {shlex.join(map(str, left))}"
        return Check("memory", "warn", text, hint)
    text = f"{folder} has {format_bytes(free)} free, the RAM tier may take {format_bytes(settings.ram_bytes)}"
    if free + used < settings.ram_bytes:
        hint = "Lower DATACACHE_RAM_BYTES, or give it more (docker --shm-size, an emptyDir of medium Memory)"
        return Check("memory", "warn", text, hint)
    return Check("memory", "ok", text)


def _pyfuse3() -> Check:
    try:
        fuse_mount.check_pyfuse3()
    except MountError as exc:
        return Check("pyfuse3", "fail", exc.message, exc.hint)
    return Check("pyfuse3", "ok", "buckets can be mounted read-write")


def staging(settings: Settings) -> Check:
    """Tell whether read-write mounts can stage what they write."""
    folder = settings.staging_root
    hint = "Set DATACACHE_STAGING to a folder on durable storage that you can write to."
    if not folder.is_dir():
        if folder.parent.is_dir() and os.access(folder.parent, os.W_OK | os.X_OK):
            return Check("staging", "ok", f"{folder} will be made when something is mounted read-write")
        return Check("staging", "fail", f"{folder} is not there and cannot be made", hint)
    try:
        _write_probe(folder, lock=True)
    except OSError as exc:
        problem = f"{folder} cannot be written, synced and locked: {exc.strerror}"
        return Check("staging", "fail", problem, _way_out(exc, folder, hint))
    room = f"{folder}: {format_bytes(shutil.disk_usage(folder).free)} free"
    device = os.stat(folder).st_dev
    if any(mount.kind in ("tmpfs", "ramfs") for mount in fuse_mount.mounts() if mount.device == device):
        return Check("staging", "warn", f"{room}, in memory: what waits there is lost when the node goes down", hint)
    return Check("staging", "ok", room)


def _catalog_and_stores(app: App) -> Iterator[Check]:
    places = {store.url: app.settings for store in app.settings.stores}
    for mount in fuse_mount.list_bucket_mounts(app.settings):
        credentials = Path(mount.config.credentials or app.settings.credentials_dir)
        places[mount.url] = replace(app.settings, credentials=credentials)
    try:
        with app.catalog() as catalog:
            for info in fuse_mount.list_mounts(app.settings):
                with suppress(DatacacheError), api.open_mounted(info.ref, app.settings) as snapshot:
                    for source in snapshot.manifest.root.sources:
                        if not source.store.startswith("catalog:"):  # packs
                            places.setdefault(f"{source.store}/{source.prefix}", app.settings)
            found = catalog.datasets()
            yield Check("catalog", "ok", f"{catalog.url}: {count(len(found), 'dataset')}")
            for dataset in found[:50]:
                record = catalog.snapshot(dataset.name, dataset.latest)
                # Not the places of those that were converted or imported.
                if record is not None and (record.lineage is None or record.lineage.command == "create"):
                    places.setdefault(record.origin, app.settings)
    except DatacacheError as exc:
        yield Check("catalog", "fail", exc.message, exc.hint)
    yield from stores(places)


def stores(places: Mapping[str, Settings]) -> Iterator[Check]:
    """Tell of each store of these URLs whether it can be listed, once; of folders each is one. All are asked at the
    same time."""
    distinct: dict[tuple[str, Path], str] = {}
    for url, settings in places.items():
        with suppress(DatacacheError):
            distinct.setdefault((_store_of(url), settings.credentials_dir), url)
    asked = list(distinct.values())[:_STORES_ASKED]
    threads = ThreadPoolExecutor(_STORES_ASKED, thread_name_prefix="store")
    try:
        answers = {url: threads.submit(_look_at, url, places[url]) for url in asked}
        wait(answers.values(), _ANSWER_S)
        for url, answer in answers.items():
            silent = Check("store", "fail", f"{url} has not answered for {_ANSWER_S:.0f} s", "Is its server reachable?")
            yield answer.result() if answer.done() else silent
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _store_of(url: str) -> str:
    store, prefix = api.split_url(url)
    return store if store != "file://" else f"{store}/{prefix.rstrip('/')}"


def _look_at(url: str, settings: Settings) -> Check:
    """Ask for one page of a listing: it says whether a store is there and lets us in."""
    try:
        return Check("store", "ok", f"{url} can be listed" + ("; it is empty" if api.is_empty(url, settings) else ""))
    except DatacacheError as exc:
        return Check("store", "fail", exc.message, exc.hint)


def _daemon(settings: Settings) -> Iterator[Check]:
    try:
        client = api.running_daemon(settings)
        if client is None:
            failure = api.start_failure(settings)
            if failure is None and settings.cluster:
                out = f"not running: this node is not in the cluster {settings.cluster!r} now"
                yield Check("daemon", "warn", out, "Start it: dsctl daemon start")
            elif failure is None:
                yield Check("daemon", "ok", "not running; it starts when it is needed")
            else:
                hint = f"{failure.hint} When that is mended: dsctl daemon start".lstrip()
                yield Check("daemon", "fail", f"{failure.message} ({format_seconds(failure.ago_s)} ago)", hint)
            return
        health = client.health()
    except DatacacheError as exc:
        yield Check("daemon", "fail", exc.message, exc.hint)
        return
    if health["problems"]:
        hint = "See: dsctl cache status" + (", dsctl cluster status" if settings.cluster else "")
        yield Check("daemon", "warn", "; ".join(health["problems"]), hint)
    else:
        yield Check("daemon", "ok", f"running (pid {health['pid']})")
    for each in differences(settings, health):
        yield Check("settings", "warn", each.message, each.hint)


def _cluster(settings: Settings) -> Iterator[Check]:
    """Tell of each other node of the cluster that does not let this one in, or has another list, and why."""
    if not settings.cluster:
        return
    try:
        found = api.look_at_cluster(settings)
    except DatacacheError as exc:
        yield Check("cluster", "fail", exc.message, exc.hint)
        return
    others = [member for member in found["members"] if not member["this"]]
    out = [member for member in others if member["problem"] or not member["looked_at"]]
    good = f"{len(out)} with a problem" if out else "which can be asked"
    none = "no other in " + (
        "DATACACHE_CLUSTER_MEMBERS" if found["listed"] else "the catalog with this DATACACHE_CLUSTER"
    )
    text = f"{settings.cluster}: " + (f"{count(len(others), 'other node')}, {good}" if others else none)
    if found["problem"] and not others:  # which the daemon's problems tell
        return
    if out and len(out) == len(others):
        yield Check("cluster", "fail", text, "The reasons are below. Until then blocks are got more than once.")
    else:
        yield Check("cluster", "ok", text)
    for member in out[:_NODES_TOLD]:
        problem = member["problem"] or "it was not asked: too many others do not answer"
        yield Check("node", "warn", f"{member['node']} at {member['address']}: {problem}", member["hint"])
    if len(out) > _NODES_TOLD:
        yield Check("node", "warn", f"{len(out) - _NODES_TOLD} more nodes", "See: dsctl cluster status")


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # evicted meanwhile
            total += path.stat().st_blocks * 512
    return total
