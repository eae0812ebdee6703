"""The state of read-write mounts as Prometheus text (exposition format 0.0.4). Names are here and nowhere else.

Used by the server's control socket, by `dsctl status --metrics`, and by the CSI driver, whose port others than
the owner can reach: that names a mount by an id which says nothing of its bucket. Any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fuse_mount.lifecycle.state import BucketInfo

_KEY_FILE = "metrics.key"
_LIMIT = "Bytes it may take (0: what its disk has)."
_MISSING = "Files, folders and deletions that are not in the bucket yet."
_METRICS: tuple[tuple[str, str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("dirty_files", "gauge", _MISSING, lambda s: s["dirty_files"]),
    ("dirty_bytes", "gauge", "Bytes that are not in the bucket yet.", lambda s: s["dirty_bytes"]),
    ("oldest_dirty_seconds", "gauge", "Age of what has waited longest.", lambda s: s["oldest_dirty_s"] or 0),
    ("uploads_under_way", "gauge", "Objects that are being uploaded.", lambda s: len(s["uploading"])),
    ("upload_bytes_per_second", "gauge", "Rate of the uploads.", lambda s: s["upload_bytes_per_s"]),
    ("uploaded_files_total", "counter", "Files uploaded.", lambda s: s["uploaded_files"]),
    ("uploaded_bytes_total", "counter", "Bytes uploaded.", lambda s: s["uploaded_bytes"]),
    ("upload_failures", "gauge", "Files whose last upload failed; they are tried again.", lambda s: s["failed_files"]),
    ("conflicts_total", "counter", "Files somebody else changed, too; ours lie beside.", lambda s: s["conflict_count"]),
    ("lost_files", "gauge", "Files of which written bytes were lost, not yet forgotten.", lambda s: len(s["losses"])),
    ("store_away_seconds", "gauge", "For how long the store has not answered.", lambda s: s["store_away_s"]),
    ("halted", "gauge", "1 while nothing can be uploaded until somebody sees to it.", lambda s: int(bool(s["halted"]))),
    ("staging_used_bytes", "gauge", "Bytes in the staging area.", lambda s: s["staging"]["used_bytes"]),
    ("staging_limit_bytes", "gauge", _LIMIT, lambda s: s["staging"]["limit_bytes"]),
    ("staging_pressure", "gauge", "Share of that in use.", lambda s: s["staging"]["pressure"]),
    ("quota_bytes", "gauge", "Bytes that may be under the prefix (0: any).", lambda s: _quota(s, "quota_bytes")),
    ("quota_used_bytes", "gauge", "Bytes of that in use, 0 without a quota.", lambda s: _quota(s, "used_bytes")),
    ("quota_refusals_total", "counter", "Writes that did not fit in it.", lambda s: _quota(s, "refused")),
    ("server_restarts_total", "counter", "Servers of a mount that died.", lambda s: s["restarts"]),
)


def mount_id(home: Path, info: BucketInfo) -> str:
    """Return what stands for a mount where its bucket and its place are not to be told: 12 hex digits, the same for as
    long as the home is. Made with a key of the home's, so nobody can find out by guessing URLs."""
    text = f"{info.url}\0{info.mountpoint}"
    return hashlib.blake2b(os.fsencode(text), key=_key_of(home), digest_size=6).hexdigest()


def render_metrics(mounts: Sequence[tuple[BucketInfo, dict[str, Any]]], home: str | Path, *, named: bool = True) -> str:
    """Return the metrics of mounts, each with the status of its live bucket. No credential and no object name is in it,
    and unless `named` no URL and no path: then only the id tells mounts apart."""
    home = Path(home)
    lines: list[str] = []
    labelled = [(_labels(home, info, named=named), status | {"restarts": info.restarts}) for info, status in mounts]
    for name, kind, text, value in _METRICS:
        lines += [f"# HELP datacache_write_{name} {text}", f"# TYPE datacache_write_{name} {kind}"]
        lines += [f"datacache_write_{name}{{{labels}}} {value(status)}" for labels, status in labelled]
    return "\n".join(lines) + "\n"


def _labels(home: Path, info: BucketInfo, *, named: bool) -> str:
    labels = f'mount="{mount_id(home, info)}"'
    if named:
        labels += f',mountpoint="{_escape(str(info.mountpoint))}",url="{_escape(info.url)}"'
    return labels


def _key_of(home: Path) -> bytes:
    path = home / "mounts" / _KEY_FILE
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    new.touch(mode=0o600)
    try:
        new.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(new, path)
    finally:
        new.unlink()
    return path.read_bytes()


def _quota(status: dict[str, Any], name: str) -> float:
    return float((status.get("quota") or {}).get(name, 0))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode("utf-8", "replace").decode()
