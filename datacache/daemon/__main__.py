"""`python -m datacache.daemon [--wait]`: one daemon for the home in the settings, in the foreground.

With `--wait` it waits for the end of another daemon of the home instead of refusing: an upgrade starts it beside the
old one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from datacache.core.errors import DaemonRunningError, DatacacheError
from datacache.daemon.server import run
from datacache.settings import load_settings

ALREADY_RUNNING = 3
"""Exit code: another daemon serves this home."""


def main() -> int:
    """Serve; 0 after a clean stop, 1 if it cannot start, 3 if another daemon runs."""
    parser = argparse.ArgumentParser(prog="python -m datacache.daemon", description="Serve one home.")
    parser.add_argument("--wait", action="store_true", help="wait until another daemon of the home has ended")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for chatty in ("aiohttp.access", "botocore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Each block wakes a handful of threads; as a batch process they do not preempt one another (nor the training) on
    # waking, which took a warm-up from 2,000 to 3,000 objects/s on two processors (sched(7)).
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        run(load_settings(), wait=arguments.wait)
    except DaemonRunningError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return ALREADY_RUNNING
    except DatacacheError as exc:
        sys.stderr.write(f"error: {exc}\nhint: {exc.hint}\n" if exc.hint else f"error: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
