"""A read-write mount of a bucket does what a plain directory does, over random sequences of operations.

The quick run is the same every time. `DATACACHE_TEST_SEQUENCES` (how many sequences; 2,000 take about an hour) asks for
a long one with new sequences each time; a failure prints the shortest sequence that shows it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from datacache.settings import Settings
from tests.fuse_mount.bucket_mount import BucketMount
from tests.fuse_mount.posix_model import Comparison, Seen, Side, Subject
from tests.promises import promise
from tests.servers import CephRgw, RcloneS3

pytestmark = pytest.mark.alone
SEQUENCES = int(os.environ.get("DATACACHE_TEST_SEQUENCES") or 0)

_numbers = itertools.count()


class Place:
    """A mount of an empty bucket, and a plain directory of nothing beside it."""

    def __init__(self, server: RcloneS3 | CephRgw, settings: Settings, folder: Path) -> None:
        bucket = f"compared-{next(_numbers)}"
        server.client().create_bucket(Bucket=bucket)
        self.plain = folder / "plain"
        self.plain.mkdir()
        self.mount = BucketMount(server, bucket, folder / "mnt", settings, ttl_s=1.0)
        self.mount.mount()
        self.cases = itertools.count()

    def compare(self, profile: settings, *, keeps_folders: bool = True, fuse: str = "kernel") -> None:
        """Run the state machine."""
        place, kept, is_ours = self, keeps_folders, fuse == "kernel"

        class Machine(Comparison):
            keeps_folders, allocates, keeps_xattrs = kept, is_ours, is_ours

            def setting(self) -> tuple[Subject, Path]:
                return place.mount, place.plain / f"case-{next(place.cases)}"

        run_state_machine_as_test(Machine, settings=profile)  # type: ignore[no-untyped-call]

    def look_from_elsewhere(self, folder: Path, *, keeps_folders: bool = True) -> None:
        """A mount of the same bucket whose home is empty shows the same: all of it, or the files."""
        self.mount.flush()
        self.mount.unmount()
        other = self.mount.elsewhere(folder / "elsewhere", folder / "other-home")
        other.mount()
        try:
            expected, actual = (self._tree(root, keeps_folders) for root in (self.plain, other.mountpoint))
            assert list(actual) == list(expected)
            assert actual == expected
        finally:
            other.unmount()

    @staticmethod
    def _tree(root: Path, folders: bool) -> dict[str, tuple[Seen, object, dict[str, bytes]]]:
        tree = Side(root, refuses=False).tree()
        return {path: told for path, told in tree.items() if folders or told[1] is not None}


@pytest.fixture
def placed(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Place]:
    """A function that makes a `Place` on a server."""

    def place(server: RcloneS3 | CephRgw, **more: Any) -> Place:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        return Place(server, replace(settings, **more), tmp_path)

    return place


def profile(sequences: int, *, steps: int = 40) -> settings:
    """How many sequences of how many operations. Long runs look for new ones and shorten what fails."""
    return settings(
        max_examples=SEQUENCES or sequences,
        stateful_step_count=100 if SEQUENCES else steps,
        derandomize=not SEQUENCES,
        phases=[Phase.generate, Phase.shrink] if SEQUENCES else [Phase.generate],
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


@promise("Hard links are refused with EPERM")
@promise("Over long random sequences the mount does and says what a plain directory does")
@pytest.mark.timeout(max(300, SEQUENCES * 10))
@pytest.mark.parametrize(("fuse", "sequences"), [("kernel", 25), ("pyfuse3", 6)])
def test_a_mount_does_what_a_plain_directory_does(
    writable_rclone: RcloneS3, placed: Callable[..., Place], tmp_path: Path, fuse: str, sequences: int
) -> None:
    place = placed(writable_rclone, fuse=fuse)
    place.compare(profile(sequences), keeps_folders=False, fuse=fuse)
    place.look_from_elsewhere(tmp_path, keeps_folders=False)


@promise("Over long random sequences the mount does and says what a plain directory does")
@pytest.mark.ceph
@pytest.mark.timeout(max(300, SEQUENCES * 10))
def test_a_mount_of_a_ceph_bucket_does_what_a_plain_directory_does(
    ceph_rgw: CephRgw, placed: Callable[..., Place], tmp_path: Path
) -> None:
    place = placed(ceph_rgw)
    place.compare(profile(6))
    place.look_from_elsewhere(tmp_path)


@promise("Server, supervisor and daemon of a read-write mount may be killed again and again: programs wait")
@pytest.mark.timeout(max(300, SEQUENCES * 10))
def test_a_mount_whose_server_is_killed_again_and_again_does_what_a_plain_directory_does(
    writable_rclone: RcloneS3, placed: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = placed(writable_rclone)
    monkeypatch.setattr(place.mount, "remount", lambda: None)  # it is never unmounted
    ended, kills = threading.Event(), 0

    def kill() -> None:
        nonlocal kills
        random = Random(0)
        while not ended.wait(random.uniform(0.0, 0.5)):
            before = place.mount.info().pid
            place.mount.kill_server()
            kills += 1
            while place.mount.info().pid == before and not ended.wait(0.02):
                pass

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        place.compare(profile(10), keeps_folders=False)
    finally:
        ended.set()
        killer.join()
    assert kills > 2
    place.look_from_elsewhere(tmp_path, keeps_folders=False)
