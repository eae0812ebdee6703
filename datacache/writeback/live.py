"""A live bucket prefix as a read-write mount uses it: engine, uploader and the way to read, put together by `api`.

Any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datacache.writeback.engine import WriteBack
from datacache.writeback.fetching import Blocks, Fetching
from datacache.writeback.quota import Quota
from datacache.writeback.upload.uploader import Uploader

_SHOWN = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveBucket:
    """One prefix, read and written."""

    engine: WriteBack
    uploader: Uploader
    fetching: Fetching
    blocks: Blocks
    quota: Quota
    url: str
    ttl_s: float
    upload_every_s: float
    staging_wait_s: float
    notes: tuple[str, ...] = ()
    """Notes for the one who opened it."""

    def status(self) -> dict[str, Any]:
        """Return what is pending, how the uploads go, and how much room there is: values that fit into JSON."""
        files = self.engine.files
        staging = {
            "folder": str(self.engine.area.folder),
            "used_bytes": files.used_bytes,
            "limit_bytes": files.capacity_bytes,
            "pressure": round(files.pressure(), 4),
        }
        found = {"url": self.url, "ack": self.engine.ack, **self.uploader.status(), "staging": staging}
        with self.engine.lock:
            hidden = self.engine.known.hidden()
            for watcher in self.engine.watchers:  # it may be away for who looks though nothing is uploaded
                problem, away_s = watcher.problem()
                if problem and not found["store_problem"]:
                    found |= {"store_problem": problem, "store_away_s": away_s}
        replication = self.engine.replication
        found["replica"] = None if replication is None else replication.status()._asdict()
        found["losses"] = [loss._asdict() for loss in self.engine.losses.all()]
        return found | {"quota": self.quota.status(), "hidden_names": len(hidden), "hidden": hidden[:_SHOWN]}

    def flush(self, timeout_s: float | None = None, progress: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Return when all that was acknowledged before the call is in the bucket. `UploadError` if it cannot be."""
        self.engine.losses.save()
        self.engine.commit(acknowledges=False)
        self.uploader.flush(timeout_s, progress)

    def close(self, *, discard: bool = False) -> None:
        """Stop uploading, make everything durable, and let the staging area go. What is pending stays there. With
        `discard` an area that was made just now, for nothing, goes as well."""
        self.uploader.stop(10.0)
        self.quota.close()
        self.engine.close(discard=discard)
        self.engine.bucket.close()
