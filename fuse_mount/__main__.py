"""The processes of mounts: `python -m fuse_mount`, started by `process.spawn` and by the keeper. `--help` lists them.

When the mount can be read, or could not be made, one JSON line says so on the descriptor of `--ready-fd`. Nothing else
is read or written there. A supervisor talks to who started it on the socket of `--first`. With `--daemon` it forks once
more, so that whoever started it has no child to wait for. A take-over, whose home is DATACACHE_HOME's, is of all that a
dead supervisor served.

What brings a mount back (`--only-if-dead`) runs below the mount host if there is one: it is passed on, unless
`--hosted` says that it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datacache.core import ipc
from datacache.core.errors import DatacacheError
from datacache.core.logs import log_to_stderr, set_level
from fuse_mount.kernel.notifier import Notifier

if TYPE_CHECKING:
    from fuse_mount.lifecycle import process

_BUCKET_HOST_AWAY_S = 10.0
"""Less than the keeper waits for an owner (`keeper._PATIENCE_S`)."""


def main() -> int:
    """Serve mounts to their end; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuse_mount", description="Serve mounts.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--supervise", action="store_true", help="serve the snapshots of a pool")
    what.add_argument("--takeover", metavar="MOUNTPOINT", help="take over the mount there")
    what.add_argument("--host", action="store_true", help="start mounts on request, and be their parent")
    what.add_argument("--bucket", metavar="JSON", help="mount the bucket this says, read-write")
    what.add_argument("--bucket-server", metavar="JSON", help="serve such a mount")
    parser.add_argument("--pool", default="", metavar="ID", help="the pool that serves it")
    parser.add_argument("--home", type=Path, metavar="DIR", help="with --supervise")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="with --supervise: worker processes")
    parser.add_argument("--first", type=int, metavar="N", help="with --supervise: the socket of who started it")
    parser.add_argument("--alone", action="store_true", help="with --supervise: nobody else joins")
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help="how many servers died before")
    parser.add_argument("--held", metavar="N,N,N", help="connection, memory and device of a mount to go on with")
    parser.add_argument("--only-if-dead", action="store_true", help="leave a mount alone whose supervisor lives")
    parser.add_argument("--hosted", action="store_true", help="serve here: a mount host asked for it")
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="with --host: gets its id when all is taken over"
    )
    parser.add_argument("--ready-fd", type=int, metavar="N", help="where to say that the mount is there")
    parser.add_argument("--daemon", action="store_true", help="go on in the background")
    arguments = parser.parse_args()
    if arguments.daemon and os.fork():
        return 0
    log_to_stderr("%(asctime)s %(process)d %(levelname)s %(message)s")  # the mount's log, but for the foreground
    if arguments.ready_fd is not None:
        os.set_inheritable(arguments.ready_fd, False)

    def report(word: dict[str, Any]) -> None:
        fd, arguments.ready_fd = arguments.ready_fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # whoever started it is not interested any more
                os.write(fd, json.dumps(word).encode() + b"\n")
                os.close(fd)

    try:
        return _run(arguments, report)
    except DatacacheError as exc:
        logging.getLogger("fuse_mount").error("%s", exc)
        report(ipc.error_answer(exc))
    except Exception as exc:
        logging.getLogger("fuse_mount").exception("the mount process failed")
        report({"error": f"the mount process failed: {exc!r}", "hint": ""})
    return 1


def _run(arguments: argparse.Namespace, report: process.Report) -> int:
    if arguments.bucket_server is not None:
        notifier = Notifier()  # before all that a server imports, which its process would keep
        from fuse_mount.bucket.held import HeldMount
        from fuse_mount.bucket.server import BucketServer
        from fuse_mount.lifecycle.state import BucketConfig

        held = HeldMount.from_argument(arguments.held) if arguments.held else None
        server = BucketServer(BucketConfig.from_json(arguments.bucket_server), arguments.restarts, held, notifier)
        return server.run(report, arguments.ready_fd)
    if arguments.supervise:
        from fuse_mount.lifecycle import pool
        from fuse_mount.lifecycle.supervisor import Supervisor

        os.chdir("/")
        served, first = pool.Pool(arguments.home, arguments.pool), socket.socket(fileno=arguments.first)
        Supervisor(served, arguments.workers, first, alone=arguments.alone).serve()
        return 0
    if arguments.host:
        from datacache.settings import load_settings
        from fuse_mount.lifecycle.host import MountHost

        settings = load_settings()
        set_level(settings.log_level)
        return MountHost(settings, arguments.ready_file).run()
    if arguments.only_if_dead:
        # The daemon, which may have started this, is a batch process.
        with contextlib.suppress(OSError):  # a sandbox may refuse it
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        if not arguments.hosted and (word := _pass_on(arguments)) is not None:
            report({"ok": word})
            return 0
    if arguments.bucket is not None:
        from fuse_mount.bucket.supervisor import BucketSupervisor
        from fuse_mount.lifecycle.state import BucketConfig

        os.chdir("/")
        attached = not arguments.daemon and not arguments.only_if_dead  # which is started with the log
        supervised = BucketSupervisor(BucketConfig.from_json(arguments.bucket), attached=attached)
        if not arguments.only_if_dead:
            supervised.start(report)
        elif not supervised.go_on(report):
            report({"ok": {}})
            return 0
        supervised.serve()
        return 0
    from datacache.settings import load_settings
    from fuse_mount.lifecycle import pool, process
    from fuse_mount.lifecycle.state import MountFiles

    home, mountpoint = load_settings().home, arguments.takeover
    former, environment = MountFiles(home, mountpoint).read(), process.environment({})
    try:
        taken = pool.take_over(mountpoint, home, environment, only_if_dead=arguments.only_if_dead, id=arguments.pool)
        report({"ok": taken.to_dict() if taken is not None else {}})
    finally:  # one that cannot be taken over keeps no other one from it
        if former is not None:
            pool.take_over_all_of(former, home, environment, id=arguments.pool)
    return 0


def _pass_on(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Have the mount host start it instead, and return what it says; None where there is no host. `MountError`."""
    host = os.environ.get("DATACACHE_MOUNT_HOST")
    if not host:
        return None
    from fuse_mount.lifecycle import process
    from fuse_mount.lifecycle.state import BucketConfig, MountFiles

    # A bucket's server stays where it is started: not beside the daemon, if the host is only being started again. A
    # snapshot's workers are followed by others at any time, and its readers wait.
    if arguments.bucket is not None:
        config, away_s = BucketConfig.from_json(arguments.bucket), _BUCKET_HOST_AWAY_S
        words, files = ["--bucket", arguments.bucket], MountFiles(config.home, config.mountpoint)
    else:
        words, away_s = ["--takeover", arguments.takeover], 0.0
        files = MountFiles(os.environ.get("DATACACHE_HOME", ""), arguments.takeover)
    try:
        connection = process.connect_to_host(Path(host), away_s=away_s)
    except OSError:
        return None
    variables = {name: value for name, value in os.environ.items() if name.startswith("DATACACHE_")}
    with connection:
        return process.ask_host(connection, [*words, "--only-if-dead"], files, variables)


if __name__ == "__main__":
    sys.exit(main())
