"""Files that a read-write mount wrote, in a snapshot of its bucket: links, and permissions where they are asked for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import fuse_mount
from datacache import create_snapshot, open_snapshot
from datacache.api import diff_snapshots, export_snapshot
from datacache.settings import load_settings
from tests.fuse_mount.mount_processes import BucketMounter
from tests.promises import promise


@promise("With `--attributes`, links and permissions that a mount wrote are kept")
def test_a_snapshot_of_what_a_mount_wrote_keeps_links_and_permissions(
    bucket_mounter: BucketMounter, tmp_path: Path
) -> None:
    mounter = bucket_mounter
    mounter()
    point = Path(mounter.target)
    (point / "bin").mkdir()
    (point / "bin" / "tool").write_text("#!/bin/sh\n")
    (point / "bin" / "tool").chmod(0o755)
    (point / "secret").write_text("x")
    (point / "secret").chmod(0o600)
    (point / "link").symlink_to("bin/tool")
    (point / "again").symlink_to("link")
    (point / "folder").symlink_to("bin")
    (point / "out").symlink_to("/etc/passwd")
    mounter.unmount()
    settings = load_settings()
    plain = create_snapshot("plain", mounter.url, settings=settings)
    with open_snapshot("plain", settings) as snapshot:
        assert snapshot.stat("secret").mode == 0
    kept = create_snapshot("plain", mounter.url, settings=settings, attributes=True)
    assert create_snapshot("other", mounter.url, settings=settings).id == plain.id
    assert len(kept.warnings) == 1
    with open_snapshot("plain", settings) as snapshot:
        assert {path: snapshot.stat(path).target for path in snapshot.paths()} == {
            "again": "link",
            "bin/tool": "",
            "folder": "bin",
            "link": "bin/tool",
            "secret": "",
        }
        assert snapshot.stat("bin/tool").mode == stat.S_IFREG | 0o755
        assert snapshot.read("again") == snapshot.read("link") == b"#!/bin/sh\n"
    changed = {change.path for change in diff_snapshots(f"plain@{plain.id}", f"plain@{kept.id}", settings=settings)}
    assert changed == {b"again", b"folder", b"link", b"out"}
    shown = tmp_path / "shown"
    shown.mkdir()
    fuse_mount.mount_snapshot("plain", shown, settings=settings)
    try:
        assert os.readlink(shown / "link") == "bin/tool"
        assert (shown / "folder" / "tool").stat().st_mode & 0o777 == 0o555
        assert (shown / "secret").stat().st_mode & 0o777 == 0o400
    finally:
        fuse_mount.unmount(shown, settings=settings)
    export_snapshot("plain", tmp_path / "out", settings=settings)
    assert (tmp_path / "out" / "bin" / "tool").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "secret").stat().st_mode & 0o777 == 0o600
    assert os.readlink(tmp_path / "out" / "folder") == "bin"
