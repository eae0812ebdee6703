"""Test who may do what on a read-write mount that a group shares, as other users see it."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.fuse_mount.mount_processes import BucketMounter

OWNER, GROUP = 4710, 4711
MEMBER, STRANGER = 4712, 4713


@pytest.fixture
def mounter(bucket_mounter: BucketMounter) -> BucketMounter:
    """Of a bucket that has files and folders that nobody owns."""
    if os.geteuid() != 0:
        pytest.skip("only root can become other users")
    (bucket_mounter.bucket / "sub").mkdir(parents=True)
    (bucket_mounter.bucket / "old").write_text("old\n")
    (bucket_mounter.bucket / "sub" / "older").write_text("older\n")
    return bucket_mounter


def as_user(user: int, groups: list[int], script: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a folder, as a user whose own group has the user's number."""
    command = ["sh", "-euc", f'cd "$0"; {script}', str(at)]
    return subprocess.run(
        command, user=user, group=user, extra_groups=groups, umask=0o002, text=True, capture_output=True, check=False
    )


def test_members_of_the_group_create_write_rename_and_delete_what_nobody_owns_and_each_others_files(
    mounter: BucketMounter,
) -> None:
    mounter(uid=OWNER, gid=GROUP, umask=0o002)
    for path, mode in (("", 0o2775), ("old", 0o664), ("sub", 0o2775), ("sub/older", 0o664)):
        found = (mounter.target / path).stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (OWNER, GROUP, mode), path
    script = (
        "echo new > new; mkdir dir; echo in > dir/in; mv new dir/new; ln -s new dir/link; "
        "echo more >> old; mv sub/older older; rmdir sub; rm older; chmod 664 dir/in"
    )
    done = as_user(MEMBER, [GROUP], script, mounter.target)
    assert done.returncode == 0, done.stderr
    for path in ("dir", "dir/in", "dir/new"):
        found = (mounter.target / path).stat()
        assert (found.st_uid, found.st_gid) == (MEMBER, GROUP), path
    another = as_user(STRANGER, [GROUP], "echo too >> dir/in; mv dir/new dir/newer; rm dir/link", mounter.target)
    assert another.returncode == 0, another.stderr
    mounter.flush()
    assert (mounter.bucket / "old").read_text() == "old\nmore\n"
    assert (mounter.bucket / "dir" / "in").read_text() == "in\ntoo\n"
    assert (mounter.bucket / "dir" / "newer").read_text() == "new\n"
    assert not (mounter.bucket / "sub" / "older").exists()


def test_others_read_and_change_nothing(mounter: BucketMounter) -> None:
    mounter(uid=OWNER, gid=GROUP, umask=0o002)
    assert as_user(STRANGER, [], "cat old sub/older", mounter.target).stdout == "old\nolder\n"
    for script in ("echo new > new", "echo more >> old", "rm old", "mv old new", "mkdir dir", "rm sub/older"):
        done = as_user(STRANGER, [], script, mounter.target)
        assert done.returncode != 0, script
        assert "ermission denied" in done.stderr
