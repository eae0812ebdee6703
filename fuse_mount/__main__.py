"""The processes of mounts: `python -m fuse_mount`, started by `launch`.

    python -m fuse_mount --config JSON [--ready-fd N] [--daemon]         mount
    python -m fuse_mount --takeover MOUNTPOINT [--only-if-dead] [...]     take a mount over; its home is
    DATACACHE_HOME's
    python -m fuse_mount --host [--ready-file FILE]                       start mounts on request (`host`)
    python -m fuse_mount --bucket JSON [--only-if-dead] [...]             mount a bucket, read-write
    python -m fuse_mount --bucket-server JSON [--restarts N] [...]        the server of such a mount, started by that

When the mount can be read, or could not be made, one JSON line says so on descriptor N. Nothing else is read
or written there. With `--daemon` it forks once more, so that whoever started it has no child to wait for.

What brings a mount back (`--only-if-dead`) runs below the mount host if there is one: it is passed on, unless
`--hosted` says that it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from datacache.core.errors import DatacacheError, MountError
from fuse_mount import process
from fuse_mount.bucket_config import BucketConfig
from fuse_mount.state import MountConfig, MountFiles
from fuse_mount.supervisor import Supervisor, set_up_logging

_BUCKET_HOST_AWAY_S = 10.0
"""Less than the keeper waits for an owner (`keeper._PATIENCE_S`)."""


def main() -> int:
    """Serve one mount to its end; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuse_mount", description="Serve one mount.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="JSON", help="mount what this says")
    what.add_argument("--takeover", metavar="MOUNTPOINT", help="take over the mount there")
    what.add_argument("--host", action="store_true", help="start mounts on request, and be their parent")
    what.add_argument("--bucket", metavar="JSON", help="mount the bucket this says, read-write")
    what.add_argument("--bucket-server", metavar="JSON", help="serve such a mount")
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help="how many servers died before")
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
    set_up_logging()
    if arguments.ready_fd is not None:
        os.set_inheritable(arguments.ready_fd, False)
    try:
        return _run(arguments)
    except DatacacheError as exc:
        logging.getLogger("fuse_mount").error("%s", exc)
        _say(arguments.ready_fd, process.word_of(exc))
        return 1
    except Exception as exc:
        logging.getLogger("fuse_mount").exception("the mount process failed")
        _say(arguments.ready_fd, {"error": f"the mount process failed: {exc!r}", "hint": ""})
        return 1


def _run(arguments: argparse.Namespace) -> int:
    def report(word: dict[str, Any]) -> None:
        _say(arguments.ready_fd, word)
        arguments.ready_fd = None

    if arguments.bucket_server is not None:
        from fuse_mount.bucket_server import BucketServer

        return BucketServer(BucketConfig.from_json(arguments.bucket_server), arguments.restarts).run(report)
    if arguments.host:
        from datacache.settings import load_settings
        from fuse_mount.host import MountHost

        return MountHost(load_settings(), arguments.ready_file).run()
    if arguments.only_if_dead:
        # The daemon, which may have started this, is a batch process.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        if not arguments.hosted and (word := _pass_on(arguments)) is not None:
            report({"ok": word})
            return 0
    if arguments.bucket is not None:
        from fuse_mount.bucket_supervisor import BucketSupervisor

        os.chdir("/")
        supervised = BucketSupervisor(BucketConfig.from_json(arguments.bucket))
        if not arguments.only_if_dead:
            supervised.start(report)
        elif not supervised.go_on(report):
            report({"ok": {}})
            return 0
        supervised.serve()
        return 0
    config = MountConfig.from_json(arguments.config) if arguments.config is not None else _known(arguments.takeover)
    os.chdir("/")
    supervisor = Supervisor(config)
    if arguments.config is not None:
        supervisor.start(report)
    elif not supervisor.take_over(report, only_if_dead=arguments.only_if_dead):
        report({"ok": {}})
        return 0
    supervisor.serve()
    return 0


def _pass_on(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What the mount host says that has started it instead; None where there is no host. Raises `MountError`."""
    host = os.environ.get("DATACACHE_MOUNT_HOST")
    if not host:
        return None
    if arguments.bucket is not None:
        config = BucketConfig.from_json(arguments.bucket)
        words, mountpoint, home = ["--bucket", arguments.bucket], config.mountpoint, config.home
    else:
        words, mountpoint = ["--takeover", arguments.takeover], arguments.takeover
        home = os.environ.get("DATACACHE_HOME", "")
    # A bucket's server stays where it is started: not beside the daemon, if the host is only being started again. A
    # snapshot's workers are followed by others at any time, and its readers wait.
    away_s = _BUCKET_HOST_AWAY_S if arguments.bucket is not None else 0.0
    try:
        connection = process.connect_to_host(Path(host), away_s=away_s)
    except OSError:
        return None
    variables = {name: value for name, value in os.environ.items() if name.startswith("DATACACHE_")}
    with connection:
        return process.ask_host(connection, [*words, "--only-if-dead"], MountFiles(home, mountpoint), variables)


def _known(mountpoint: str) -> MountConfig:
    from datacache.settings import load_settings

    info = MountFiles(load_settings().home, mountpoint).read()
    if info is None:
        raise MountError(f"no mount of this home is known at {mountpoint}")
    return info.config


def _say(fd: int | None, word: dict[str, Any]) -> None:
    if fd is None:
        return
    try:
        os.write(fd, json.dumps(word).encode() + b"\n")
        os.close(fd)
    except OSError:
        pass  # whoever started it is not interested any more


if __name__ == "__main__":
    sys.exit(main())
