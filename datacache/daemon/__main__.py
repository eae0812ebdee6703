"""`python -m datacache.daemon [--wait]`: one daemon for the home in the settings, in the foreground. It starts
the processes of other parts itself, with `--part`.

With `--wait` it waits until another daemon of the home has ended instead of refusing: an upgrade starts it beside the
old one. With `--check`, for liveness probes, it starts nothing and exits within seconds: 0 if the home's daemon
answers, or is opening its tiers and will answer, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys

from datacache.core.errors import DaemonRunningError, DatacacheError
from datacache.core.logs import log_to_stderr, set_level
from datacache.daemon import memory
from datacache.daemon.client import DaemonClient
from datacache.daemon.starting import ALREADY_RUNNING
from datacache.settings import keep_default_ssd_bytes, load_settings
from datacache.tiers.parts import Part


def main() -> int:
    """Serve; return 0 after a clean stop, 1 if it cannot start, 3 if another daemon runs. With `--check` see the
    module."""
    parser = argparse.ArgumentParser(prog="python -m datacache.daemon", description="Serve one home.")
    parser.add_argument("--wait", action="store_true", help="wait until another daemon of the home has ended")
    parser.add_argument("--check", action="store_true", help="say whether the daemon answers; 0 or 1, in ten seconds")
    parser.add_argument("--part", nargs=2, metavar=("NUMBER/OF", "PID"), help="serve a part, for the daemon PID")
    parser.add_argument("--listener", type=int, metavar="FD", help="where a part lets other nodes in")
    arguments = parser.parse_args()
    if arguments.check:
        return _check()
    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("botocore").setLevel(logging.WARNING)
    # Each block wakes a handful of threads; as a batch process they do not preempt one another (nor the training) on
    # waking, which took a warm-up from 2,000 to 3,000 objects/s on two processors (sched(7)).
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    memory.tune()
    from datacache.daemon.running import run, run_part

    try:
        settings = load_settings()
        set_level(settings.log_level)
        if arguments.part:
            number, of = map(int, arguments.part[0].split("/"))
            run_part(settings, Part(number, of), int(arguments.part[1]), arguments.listener)
            return 0
        keep_default_ssd_bytes(settings.home)
        run(load_settings(), wait=arguments.wait)
    except DaemonRunningError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return ALREADY_RUNNING
    except DatacacheError as exc:
        sys.stderr.write(f"error: {exc}\nhint: {exc.hint}\n" if exc.hint else f"error: {exc}\n")
        return 1
    return 0


def _check() -> int:
    try:
        settings = load_settings()
    except DatacacheError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    client = DaemonClient(settings)
    # A start after an unclean end may rebuild the index for minutes: who is killed then begins anew each time.
    if client.beats() or client.opens() or client.alive():
        return 0
    sys.stderr.write(f"error: {client.silence() or f'no daemon answers for {settings.home}'}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
