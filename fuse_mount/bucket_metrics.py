"""The state of read-write mounts as Prometheus text (exposition format 0.0.4). Names are here and nowhere else.

Used by `bucket_server` (its control socket) and by `dsctl status --metrics`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fuse_mount.bucket_config import BucketInfo

_METRICS: tuple[tuple[str, str, str, Callable[[dict[str, Any]], float]], ...] = (
    (
        "dirty_files",
        "gauge",
        "Files, folders and deletions that are not in the bucket yet.",
        lambda s: s["dirty_files"],
    ),
    ("dirty_bytes", "gauge", "Bytes that are not in the bucket yet.", lambda s: s["dirty_bytes"]),
    ("oldest_dirty_seconds", "gauge", "Age of what has waited longest.", lambda s: s["oldest_dirty_s"] or 0),
    ("uploads_under_way", "gauge", "Objects that are being uploaded.", lambda s: len(s["uploading"])),
    ("upload_bytes_per_second", "gauge", "Rate of the uploads.", lambda s: s["upload_bytes_per_s"]),
    ("uploaded_files_total", "counter", "Files uploaded.", lambda s: s["uploaded_files"]),
    ("uploaded_bytes_total", "counter", "Bytes uploaded.", lambda s: s["uploaded_bytes"]),
    ("upload_failures", "gauge", "Files whose last upload failed; they are tried again.", lambda s: s["failed_files"]),
    ("conflicts_total", "counter", "Files somebody else changed, too; ours lie beside.", lambda s: s["conflict_count"]),
    ("store_away_seconds", "gauge", "For how long the store has not answered.", lambda s: s["store_away_s"]),
    ("halted", "gauge", "1 while nothing can be uploaded until somebody sees to it.", lambda s: int(bool(s["halted"]))),
    ("staging_used_bytes", "gauge", "Bytes in the staging area.", lambda s: s["staging"]["used_bytes"]),
    (
        "staging_limit_bytes",
        "gauge",
        "Bytes it may take (0: what its disk has).",
        lambda s: s["staging"]["limit_bytes"],
    ),
    ("staging_pressure", "gauge", "Share of that in use.", lambda s: s["staging"]["pressure"]),
    ("quota_bytes", "gauge", "Bytes that may be under the prefix (0: any).", lambda s: _quota(s, "quota_bytes")),
    ("quota_used_bytes", "gauge", "Bytes of that in use, 0 without a quota.", lambda s: _quota(s, "used_bytes")),
    ("quota_refusals_total", "counter", "Writes that did not fit in it.", lambda s: _quota(s, "refused")),
)


def render_metrics(mounts: Sequence[tuple[BucketInfo, dict[str, Any]]]) -> str:
    """The metrics of mounts, each with the status of its live bucket. No credential and no object name is in it."""
    lines: list[str] = []
    for name, kind, text, value in _METRICS:
        lines += [f"# HELP datacache_write_{name} {text}", f"# TYPE datacache_write_{name} {kind}"]
        for info, status in mounts:
            labels = f'mountpoint="{_escape(str(info.mountpoint))}",url="{_escape(info.url)}"'
            lines.append(f"datacache_write_{name}{{{labels}}} {value(status)}")
    lines += [
        "# HELP datacache_write_server_restarts_total Servers of a mount that died.",
        "# TYPE datacache_write_server_restarts_total counter",
    ]
    for info, _ in mounts:
        labels = f'mountpoint="{_escape(str(info.mountpoint))}",url="{_escape(info.url)}"'
        lines.append(f"datacache_write_server_restarts_total{{{labels}}} {info.restarts}")
    return "\n".join(lines) + "\n"


def _quota(status: dict[str, Any], name: str) -> float:
    quota = status.get("quota") or {}
    return float(quota.get(name, 0))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").encode("utf-8", "replace").decode()
