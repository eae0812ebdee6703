"""Upload what another node has left in a replica of its staging area: `python -m datacache.api.takeover FOLDER`.

Started by the daemon (`cluster.replicas.receiver`), whose settings it has, and with which it ends. The exit code is 0
once nothing is left to upload. Killed at any moment, the next one goes on.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

from datacache.api.opening import open_bucket
from datacache.core.errors import DatacacheError, StagingError
from datacache.daemon.parts import end_with
from datacache.settings import load_settings
from datacache.writeback.staging.area import areas

log = logging.getLogger("datacache.takeover")


def upload_replica(folder: Path) -> None:
    """Upload all that is in the areas of a replica's folder. `StagingError`, `UploadError`, the store's errors."""
    settings = replace(load_settings(), staging=folder)
    for area in areas(folder):
        if area.problem:
            raise StagingError(f"{area.folder}: {area.problem}")
        live = open_bucket(area.bucket_url, settings, who=f"the daemon (pid {os.getppid()})", keep_quota=True)
        try:
            if live.engine.area.folder != area.folder:
                raise StagingError(
                    f"{area.bucket_url} is at another endpoint here than on the node that wrote it",
                    hint="Set the same AWS_ENDPOINT_URL, or the same [stores], on all nodes of the cluster.",
                )
            live.flush()
            for conflict in live.status()["conflicts"]:
                log.warning("a conflict: %s", conflict)
        finally:
            live.close()


def main() -> int:
    """Return the exit code."""
    end_with(os.getppid())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        upload_replica(Path(sys.argv[1]))
    except DatacacheError as exc:
        log.error("%s is not uploaded yet: %s %s", sys.argv[1], exc, exc.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
