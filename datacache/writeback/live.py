"""A live bucket prefix as a read-write mount uses it: engine, uploader and the way to read, put together by `api`.

Any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from datacache.core.ids import ObjectRef
from datacache.tiers.local import LocalBlocks
from datacache.writeback.engine import WriteBack
from datacache.writeback.staging.quota import Quota
from datacache.writeback.upload.uploader import Uploader

_SHOWN = 100


class Blocks(Protocol):
    """The node's read cache (`reader.blocks.NodeBlocks`)."""

    local: LocalBlocks

    def read(self, ref: ObjectRef, number: int, start: int, stop: int) -> memoryview | bytes:
        """Return a part of a block, wherever it is."""
        ...


class LiveBucket:
    """One prefix, read and written."""

    def __init__(
        self,
        engine: WriteBack,
        uploader: Uploader,
        blocks: Blocks,
        quota: Quota,
        *,
        url: str,
        ttl_s: float,
        upload_every_s: float,
        staging_wait_s: float,
    ) -> None:
        self.engine, self.uploader, self.blocks, self.quota = engine, uploader, blocks, quota
        engine.fetching.blocks = blocks
        self.url = url
        self.ttl_s = ttl_s
        self.upload_every_s = upload_every_s
        self.staging_wait_s = staging_wait_s
        self.hidden: Callable[[], list[str]] = list
        """Keys that who shows the bucket as a directory has to leave out. Under the engine's lock."""
        self.problem: Callable[[], tuple[str, float]] = lambda: ("", 0.0)
        """Why the store does not answer who shows it, and for how many seconds. Under the engine's lock."""

    def status(self) -> dict[str, Any]:
        """What is pending, how the uploads go, and how much room there is: values that fit into JSON."""
        files = self.engine.files
        staging = {
            "folder": str(self.engine.area.folder),
            "used_bytes": files.used_bytes,
            "limit_bytes": files.capacity_bytes,
            "pressure": round(files.pressure(), 4),
        }
        found = {"url": self.url, "ack": self.engine.ack, **self.uploader.status(), "staging": staging}
        with self.engine.lock:
            hidden = self.hidden()
            problem, away_s = self.problem()
        if problem and not found["store_problem"]:
            found |= {"store_problem": problem, "store_away_s": away_s}
        found["losses"] = [loss._asdict() for loss in self.engine.losses.all()]
        return found | {"quota": self.quota.status(), "hidden_names": len(hidden), "hidden": hidden[:_SHOWN]}

    def flush(self, timeout_s: float | None = None, progress: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Return when all that was acknowledged before the call is in the bucket. `UploadError` if it cannot be."""
        self.engine.losses.save()
        self.engine.commit()
        self.uploader.flush(timeout_s, progress)

    def close(self, *, discard: bool = False) -> None:
        """Stop uploading, make everything durable, and let the staging area go. What is pending stays there. With
        `discard` an area that was made just now, for nothing, goes as well."""
        self.uploader.stop(10.0)
        self.quota.close()
        self.engine.close(discard=discard)
        self.engine.bucket.close()
