"""Shards in buckets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import ObjectNotFoundError, StoreError
from datacache.settings import Settings, load_settings
from datacache.shards.build import Sharded
from tests.conformance.faults import Fault, FaultProxy
from tests.servers import RcloneS3
from tests.shards.conftest import contents

Make = Callable[..., str]
Shard = Callable[..., tuple[Path, Sharded]]


@pytest.fixture
def proxy(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(rclone_s3.endpoint) as proxy:
        for name, value in rclone_s3.env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("DATACACHE_STORE_TIMEOUT_S", "2")
        yield proxy


def test_a_bucket_gets_the_bytes_that_a_folder_gets_and_images_come_from_one(
    make: Make, shard: Shard, drawn: Path, rclone_s3: RcloneS3, proxy: FaultProxy
) -> None:
    settings = load_settings()
    bucket = rclone_s3.make_bucket("shards-to")
    folder, plain = shard(make(drawn))
    shutil.copytree(drawn, bucket / "source")
    ref = api.create_snapshot("remote", "s3://shards-to/source", settings=settings).ref
    url = "s3://shards-to/out/faces"
    done = api.shard(ref, to=url, max_size_bytes=20_000, processes=2, name="s", settings=settings)
    assert [s.digest for s in done.built.set.shards] == [s.digest for s in plain.built.set.shards]
    written = contents(bucket / "out" / "faces")
    assert {name for name in written if name != "shards.json"} == {n for n in contents(folder) if n != "shards.json"}
    assert api.verify_shards(url, settings=settings)[1] == []
    assert done.record is not None
    with api.open_snapshot(done.record.ref, settings) as snapshot:
        assert snapshot.read("shard-000000.tar") == written["shard-000000.tar"]
    assert list((settings.home / "shards").glob("*/*put*")) == []


def test_a_build_that_lost_its_bucket_goes_on_where_it_was(
    make: Make, shard: Shard, drawn: Path, rclone_s3: RcloneS3, proxy: FaultProxy, settings: Settings
) -> None:
    settings = load_settings()
    bucket = rclone_s3.make_bucket("broken-off")
    ref = make(drawn)
    proxy.always(Fault(status=403, code="AccessDenied", only=lambda m, p: m == "PUT" and "shard-000004" in p))
    with pytest.raises(StoreError, match="shard-000004"):
        api.shard(ref, to="s3://broken-off/f", max_size_bytes=1, processes=1, settings=settings)
    assert not (bucket / "f" / "shards.json").exists()
    proxy.heal()
    done = api.shard(ref, to="s3://broken-off/f", max_size_bytes=1, processes=1, settings=settings)
    assert done.built.made == len(done.built.set.shards) - 4
    folder, _ = shard(ref, max_size_bytes=1)
    assert contents(bucket / "f") == contents(folder)


def test_a_bucket_that_is_not_there_is_told_before_any_work(make: Make, drawn: Path, proxy: FaultProxy) -> None:
    seen: list[str] = []
    with pytest.raises(ObjectNotFoundError, match="no-such-bucket"):
        api.shard(
            make(drawn),
            to="s3://no-such-bucket/x",
            settings=load_settings(),
            progress=lambda what, *_: seen.append(what),
        )
    assert seen == []
