"""Whatever was acknowledged is in the bucket in the end, whoever is killed, whatever the store does and however full
the staging disk is (in the manner of JuiceFS's crash test).

`DATACACHE_TEST_KILLS` (how many kills a run has, 4) asks for a long one.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datacache.settings import Settings
from tests.conformance.faults import Fault, FaultProxy
from tests.fuse_mount.bucket_mount import BucketMount
from tests.fuse_mount.crash.rig import Writers, disturb, files_below, without_markers
from tests.promises import promise
from tests.servers import CephRgw, RcloneS3

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("DATACACHE_TEST_KILLS") or 4)
SEED = int(os.environ.get("DATACACHE_TEST_SEED") or 1)
SMALL_PARTS = Path(__file__).parent / "crash" / "small_parts"
LONG = pytest.mark.timeout(300 + KILLS * 20)

_numbers = itertools.count()


class Experiment:
    """A mount, writers on it, and in the end the comparison."""

    def __init__(self, mount: BucketMount, folder: Path) -> None:
        self.mount = mount
        self._folder = folder
        self._manifests = folder / "manifests"
        self._manifests.mkdir()

    def write(self, meanwhile: Callable[[], Any], *, writers: int = 2, **options: Any) -> dict[str, dict[str, int]]:
        """Write while something happens; check; what was tried and what failed."""
        self.mount.mount()
        with Writers(self.mount.mountpoint, self._manifests, writers, SEED, **options) as running:
            print(meanwhile())
            self.mount.revive()
            said = running.finish()
            print(said)
            self.check(running)
        return said

    def wait_for(self, text: str, *, more: int = 1, limit_s: float = 180.0) -> None:
        """Until the manifests have a text so many times more than now."""

        def count() -> int:
            return sum(path.read_text(encoding="utf-8").count(text) for path in self._manifests.iterdir())

        enough, deadline = count() + more, time.monotonic() + limit_s
        while count() < enough:
            assert time.monotonic() < deadline, f"{count()} times {text!r}, not {enough}"
            time.sleep(0.05)

    def check(self, writers: Writers) -> None:
        """The mount, the bucket, and the bucket through a mount of a node with an empty home all hold what was
        acknowledged."""
        assert writers.problems(files_below(self.mount.mountpoint)) == []
        self.mount.flush()
        log = self.mount.info().log.read_text(encoding="utf-8")
        assert "somebody else" not in log, log  # nobody else writes here
        left = self.mount.unmount()
        assert left["files"] == 0, left
        assert writers.problems(without_markers(self.mount.objects(""))) == []
        assert self.mount.unfinished_uploads() == []
        other = self.mount.elsewhere(self._folder / "elsewhere", self._folder / "other-home")
        other.mount()
        try:
            assert writers.problems(files_below(other.mountpoint)) == []
        finally:
            other.unmount()


@pytest.fixture
def experiment(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Experiment]:
    """A function that prepares one on a server, which may be reached through a proxy."""

    def prepare(
        server: RcloneS3 | CephRgw, *, part_bytes: int = 256 * 1024, endpoint: str = "", **options: Any
    ) -> Experiment:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        if endpoint:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("PYTHONPATH", str(SMALL_PARTS))
        monkeypatch.setenv("TEST_PART_BYTES", str(part_bytes))
        bucket = f"crashes-{next(_numbers)}"
        server.client().create_bucket(Bucket=bucket)
        mount = BucketMount(server, bucket, tmp_path / "mnt", settings, ttl_s=1.0, upload_every_s=1.0, **options)
        return Experiment(mount, tmp_path)

    return prepare


def kill_at_random(mount: BucketMount) -> Counter[str]:
    """Everything that can be killed, and each time wait until the mount is back."""

    def then_wait(kill: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            kill()
            mount.revive()

        return both

    ways = {
        "server": mount.kill_server,
        "all": mount.kill_all,
        "supervisor": mount.kill_supervisor,
        "daemon": mount.kill_daemons,
    }
    weighted = {
        f"{name} {n}": then_wait(way) for name, way in ways.items() for n in range(3 if name == "server" else 1)
    }
    return disturb(KILLS, random.Random(SEED), weighted, apart_s=0.7)


@promise("Kills, faults of the store and a full staging disk lose nothing that was acknowledged")
@pytest.mark.ceph
@LONG
def test_kills_lose_nothing(ceph_rgw: CephRgw, experiment: Callable[..., Experiment]) -> None:
    trial = experiment(ceph_rgw, part_bytes=5 * 2**20)
    said = trial.write(lambda: kill_at_random(trial.mount), largest=12_000_000)
    assert sum(said["failed"].values()) < sum(said["tried"].values()) / 2


@promise("Nobody notices that the cache daemon was killed under a read-write mount")
@LONG
def test_killing_the_cache_daemon_is_not_even_noticed(
    writable_rclone: RcloneS3, experiment: Callable[..., Experiment]
) -> None:
    trial = experiment(writable_rclone)
    kills = {"daemon": trial.mount.kill_daemons}
    said = trial.write(lambda: disturb(3, random.Random(SEED), kills, apart_s=0.5))
    assert said["failed"] == {}


CHANGES = ("PUT", "POST", "DELETE")

FAULTS: dict[str, Fault] = {
    "reset in the request": Fault(reset_request_at=1000),
    "reset in the answer": Fault(reset_at=100),
    "cut off answer": Fault(truncate_at=100),
    "lost answer": Fault(lose_answer=True),
    "500": Fault(status=500),
    "503": Fault(status=503, code="SlowDown"),
    "slow": Fault(request_bytes_s=500_000, answer_bytes_s=500_000),
    "too long": Fault(wrong_length=7),
    "too short": Fault(wrong_length=-1),
}


def rain(proxy: FaultProxy, dice: random.Random, share: float) -> None:
    """That share of all requests meets one of the faults."""
    for fault in FAULTS.values():
        chance = share / len(FAULTS)
        proxy.always(Fault(**{**fault.__dict__, "only": lambda _method, _path, chance=chance: dice.random() < chance}))


@promise("Kills, faults of the store and a full staging disk lose nothing that was acknowledged")
@LONG
def test_faults_of_the_store_lose_nothing(writable_rclone: RcloneS3, experiment: Callable[..., Experiment]) -> None:
    with FaultProxy(writable_rclone.endpoint) as proxy:
        trial = experiment(writable_rclone, endpoint=proxy.url)

        def weather() -> Counter[str]:
            rain(proxy, random.Random(SEED), 0.2)
            ways = {"refuse": proxy.refuse, "accept": proxy.accept}
            done = disturb(KILLS, random.Random(SEED), ways, apart_s=0.7)
            proxy.heal()
            return done

        said = trial.write(weather)
        # A name or a folder that nothing is known of yet needs an answer of the store, or it is an error.
        assert all("Input/output error" in what for what in said["failed"]), said
        assert sum(said["failed"].values()) <= 0.02 * sum(said["tried"].values()), said


@promise("Kills, faults of the store and a full staging disk lose nothing that was acknowledged")
@LONG
def test_faults_and_kills_together_lose_nothing(
    writable_rclone: RcloneS3, experiment: Callable[..., Experiment]
) -> None:
    with FaultProxy(writable_rclone.endpoint) as proxy:
        trial = experiment(writable_rclone, endpoint=proxy.url)

        def storm() -> Counter[str]:
            rain(proxy, random.Random(SEED), 0.2)
            done = kill_at_random(trial.mount)
            proxy.heal()
            return done

        trial.write(storm)


@pytest.fixture
def small_disk(tmp_path: Path, settings: Settings) -> Path:
    """A file system of 16 MiB to stage on."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], check=True)
    return path  # unmounted with the home


@promise("With full staging a writer waits, then gets ENOSPC")
@promise("Kills, faults of the store and a full staging disk lose nothing that was acknowledged")
@LONG
def test_a_full_staging_disk_loses_nothing(
    writable_rclone: RcloneS3,
    experiment: Callable[..., Experiment],
    small_disk: Path,
) -> None:
    with FaultProxy(writable_rclone.endpoint) as proxy:
        trial = experiment(writable_rclone, endpoint=proxy.url, staging=small_disk / "staging")
        trial.mount.settings = replace(trial.mount.settings, staging_wait_s=0.5)

        def fill_up() -> None:
            trial.wait_for('"done"', more=30)
            for killing in (False, True):
                proxy.always(Fault(status=503, code="SlowDown", only=lambda method, _path: method in CHANGES))
                # What is to be synced first may not fit in what is left: nobody goes on until something goes up.
                with suppress(AssertionError):
                    trial.wait_for('"settled"', limit_s=15)
                if killing:
                    trial.mount.kill_server()
                proxy.heal()
                if killing:
                    trial.mount.revive()
                trial.wait_for('"done"', more=20)

        said = trial.write(fill_up)
        assert any("No space left" in what for what in said["failed"]), said
