"""Run the daemon of a home, or the process of one of its parts, from lock to clean stop: in the main thread."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.cluster.members import Members, ShownMembers, open_members
from datacache.cluster.peers import open_peers
from datacache.core import ipc, lockfile
from datacache.core.errors import CacheError, DaemonRunningError
from datacache.daemon import paths
from datacache.daemon.client import import_store_clients
from datacache.daemon.handover import HandOver
from datacache.daemon.keeper import Keeper
from datacache.daemon.mount_leases import holder
from datacache.daemon.parts import PartProcesses, end_with
from datacache.daemon.server import Daemon
from datacache.daemon.turns import TurnKind
from datacache.exchange.server import FrameServer
from datacache.settings import Settings
from datacache.store.credentials import Environments
from datacache.tiers.memory import remove_abandoned_dirs
from datacache.tiers.parts import Part, parts_by_cores
from datacache.tiers.recovery import open_part, open_tiers
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_MOST_REQUEST_BYTES = 2**31
"""A published order of some hundred million samples. Only the home's owner can send one."""


@contextlib.contextmanager
def hold_lock(settings: Settings, *, wait: bool = False) -> Iterator[Sequence[int]]:
    """Be the only daemon of a home; who has the descriptors holds the lock. `DaemonRunningError` if there is another,
    unless its end is to be waited for."""
    path = paths.lock_path(settings.home)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # The home itself is locked: a file in it may be deleted, and another be made in its place.
        home = os.open(settings.home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise CacheError(
            f"the home {settings.home} cannot be used: {exc.strerror} ({exc.filename})",
            hint="Set DATACACHE_HOME to a folder you can write to.",
        ) from exc
    try:
        if not all(lockfile.take(held, wait=False) for held in (home, fd)):
            pid = os.pread(fd, 20, 0).decode(errors="replace").strip() or "?"
            if not wait:
                raise DaemonRunningError(
                    f"a daemon (pid {pid}) serves {settings.home} already",
                    hint="See: dsctl daemon status. Stop it: dsctl daemon stop.",
                )
            log.info("a daemon (pid %s) serves %s: waiting for its end", pid, settings.home)
            for held in (home, fd):
                lockfile.take(held)
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):  # a full disk; the number is for people
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield home, fd
    finally:
        os.close(fd)
        os.close(home)


def run(settings: Settings, *, wait: bool = False) -> None:
    """Serve until told to stop; with `wait`, once another daemon of the home has ended. Raises `DaemonRunningError` and
    `CacheError` before it serves."""
    # A daemon that others depend on, such as a node's, has what its administrator gave it.
    environments = None if settings.daemon == "external" else Environments.take_from(os.environ)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(hold_lock(settings, wait=wait))
        keeper = Keeper(settings.home)  # before the tiers are opened, which may take a while, to after they are closed
        keeper.start()
        stack.callback(keeper.close)
        remove_abandoned_dirs(settings.ram_dir)
        writer = stack.enter_context(open_tiers(settings))
        catalog = open_catalog_url(settings.catalog, settings=settings, blob_cache_dir=settings.home)
        stack.callback(catalog.close)
        members = open_members(settings, holder(settings.home))
        parts, count = None, settings.processes or parts_by_cores()
        if count > 1:
            parts = PartProcesses(settings, writer.divide(count), held, environments, members=members)
        _serve(settings, writer, catalog, environments, members=members, parts=parts)
    _end()


def run_part(settings: Settings, part: Part, parent: int, nodes: int | None) -> None:
    """Serve a part but the first for the daemon whose process id is `parent`, and no longer than that lives; `nodes` is
    the descriptor of the listener for other nodes. Raises as `run` does."""
    end_with(parent)
    environments = None if settings.daemon == "external" else Environments.take_from(os.environ)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(open_part(settings, part))
        catalog = open_catalog_url(settings.catalog, settings=settings, blob_cache_dir=settings.home)
        stack.callback(catalog.close)
        members, listener = None, None
        if nodes is not None:
            members, listener = ShownMembers(paths.members_path(settings.home)), socket.socket(fileno=nodes)
        _serve(settings, writer, catalog, environments, members=members, listener=listener)
    _end()


def _end() -> None:
    if threading.active_count() > 1:
        # Gets from a store that is away, asleep between two tries: all is written and closed, nobody waits for them.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(0)


def _serve(
    settings: Settings,
    writer: TierWriter,
    catalog: Catalog,
    environments: Environments | None,
    *,
    members: Members | None,
    listener: socket.socket | None = None,
    parts: PartProcesses | None = None,
) -> None:
    peers = open_peers(settings, members) if members is not None else None
    daemon = Daemon(settings, writer, catalog, environments, peers=peers, parts=parts)
    path = paths.socket_path(settings.home, writer.part.number)
    if settings.stores or environments is None or environments.newest_first()[0]:
        # What the first fetch from a bucket needs takes a while to import: have it ready by then. A daemon that nobody
        # told of a bucket may serve folders of this machine alone.
        threading.Thread(target=import_store_clients, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.stopping.set())
    server = FrameServer(
        daemon.answer,
        most_bytes=_MOST_REQUEST_BYTES,
        name="daemon",
        crowded=lambda: daemon.fetcher.turns.crowded(TurnKind.READ),
    )
    with contextlib.ExitStack() as until_stopped:
        if parts is not None:
            until_stopped.callback(parts.stop)
        if peers is not None and daemon.nodes is not None:
            from datacache.daemon.nodes import listen_to_nodes, serve_nodes

            until_stopped.callback(peers.close)
            peers.members.start()
            listener = listener or listen_to_nodes(settings.listen)
            in_cluster = serve_nodes(daemon.nodes, listener, shared=writer.part.number > 0)
            until_stopped.callback(in_cluster.close)
        if parts is not None:
            parts.start(listener)
        # What is there is stale: we hold the lock.
        server.listen(ipc.listen(path, backlog=512))
        if peers is not None and not writer.part.number:
            peers.join()
            tell_parts = parts.show_members if parts is not None else lambda: None
            until_stopped.callback(HandOver(peers, writer, daemon.fetcher, tell_parts=tell_parts).stop)
        daemon.begin()
        log.info("serving %s (pid %d)", settings.home, os.getpid())
        daemon.live()
        log.info("stopping")
        path.unlink(missing_ok=True)
    daemon.close()
    server.close()
