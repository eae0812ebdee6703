"""`ShardDataset` over folders, URLs and snapshots: the same samples as the snapshot's, an error for every damage."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from datacache import api
from datacache.core.errors import ShardError, SnapshotNotFoundError, UsageError
from datacache.core.ids import BLOCK_BYTES
from datacache.loaders.tuning.clock import Clocks, Measured
from datacache.settings import Settings
from datacache.shards.index import ShardIndex, index_name
from datacache.torch import PackedBatch, ShardDataset, SnapshotDataset, collate
from tests.loaders.conftest import COUNT, read_until_here
from tests.promises import promise
from tests.servers import RcloneS3

pytestmark = pytest.mark.shared_home

_SHARD_BYTES = 100_000


@pytest.fixture
def shards(faces_ref: str, settings: Settings, tmp_path: Path) -> Path:
    """The faces in several small shards."""
    folder = tmp_path / "shards"
    made = api.shard(faces_ref, to=str(folder), max_size_bytes=_SHARD_BYTES, settings=settings)
    assert len(made.built.set.shards) > 3
    return folder


@pytest.fixture
def large_shards(settings: Settings, tmp_path: Path) -> tuple[Path, list[bytes]]:
    """Samples of random bytes in shards of several blocks, some across a block's end."""
    folder = tmp_path / "large"
    folder.mkdir()
    sizes = (1_500_000, 3_000_000, 10, 2_000_000, BLOCK_BYTES + 5, 0, 700_000, 1_000_000)
    contents = [np.random.default_rng(number).bytes(size) for number, size in enumerate(sizes)]
    for number, data in enumerate(contents):
        (folder / f"{number:03d}.bin").write_bytes(data)
    record = api.create_snapshot(f"{tmp_path.name}-large", folder.as_uri(), settings=settings)
    api.shard(record.ref, to=str(tmp_path / "out"), max_size_bytes=9_000_000, settings=settings)
    return tmp_path / "out", contents


def _equal(first: ShardDataset, second: SnapshotDataset) -> None:
    assert len(first) == len(second)
    for number in range(len(second)):
        image, target = first[number]
        expected, boxes = second[number]
        assert image == expected
        assert torch.equal(target["boxes"], boxes["boxes"])
        assert torch.equal(target["labels"], boxes["labels"])


@promise("Shards have the samples of the snapshot they were made from")
def test_a_folder_of_shards_has_the_samples_of_the_snapshot(shards: Path, faces_ref: str) -> None:
    dataset = ShardDataset(shards)
    assert dataset.kind == "detection"
    assert dataset.classes == ("with_mask", "without_mask")
    _equal(dataset, SnapshotDataset(faces_ref))
    assert ShardDataset(str(shards)).path(0) == "shard-000000.tar/JPEGImages/000001"
    assert len(ShardDataset(shards.as_uri())) == COUNT


@promise("Shards have the samples of the snapshot they were made from")
def test_a_snapshot_of_shards_is_read_through_the_cache(shards: Path, faces_ref: str, settings: Settings) -> None:
    api.create_snapshot("sharded", shards.as_uri(), settings=settings, tags=["v1"])
    dataset = ShardDataset("sharded@v1")
    _equal(dataset, SnapshotDataset(faces_ref))
    _equal(pickle.loads(pickle.dumps(dataset)), SnapshotDataset(faces_ref))


@pytest.fixture
def bucket(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a bucket that this test's daemon, which is not started yet, can read."""
    rclone_s3.make_bucket("shard-bucket")
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    return rclone_s3.root / "shard-bucket"


@promise("Shards have the samples of the snapshot they were made from")
def test_shards_in_a_bucket_are_read_through_the_cache(bucket: Path, shards: Path, faces_ref: str) -> None:
    shutil.copytree(shards, bucket / "set")
    dataset = ShardDataset("s3://shard-bucket/set")
    _equal(dataset, SnapshotDataset(faces_ref))
    shutil.rmtree(bucket / "set")  # what is here needs no bucket any more
    _equal(dataset, SnapshotDataset(faces_ref))


@promise("A DataLoader, forked or spawned, gives every sample once an epoch")
@pytest.mark.parametrize("workers", [("", 0), ("fork", 2), ("spawn", 1)], ids=lambda kind: kind[0] or "none")
def test_dataloaders_decode_shards(shards: Path, workers: tuple[str, int]) -> None:
    context, count = workers
    dataset = ShardDataset(shards, decode="rgb", size=(32, 48))
    loader = DataLoader(
        dataset, batch_size=10, num_workers=count, multiprocessing_context=context or None, collate_fn=collate
    )
    numbers = iter(range(COUNT))
    for images, targets in loader:
        assert images.shape == (10, 32, 48, 3)
        for image, target in zip(images, targets, strict=True):
            expected, boxes = dataset[next(numbers)]
            assert torch.equal(image, expected)
            assert torch.equal(target["boxes"], boxes["boxes"])


@pytest.mark.parametrize("through_cache", [False, True])
def test_packed_batches_hold_samples_that_cross_blocks(
    large_shards: tuple[Path, list[bytes]], settings: Settings, through_cache: bool
) -> None:
    folder, contents = large_shards
    where = api.create_snapshot(folder.parent.name, folder.as_uri(), settings=settings).ref if through_cache else folder
    dataset = ShardDataset(where, packed=True, target="path")
    order = [4, 0, 7, 5, 3, 1, 2, 6]
    for _ in range(3):  # from the store, then from here
        batch = dataset.__getitems__(order)
        assert isinstance(batch, PackedBatch)
        assert [bytes(sample.image.numpy()) for sample in batch] == [contents[number] for number in order]
        assert batch.targets == [f"{number:03d}" for number in order]
    assert [dataset[number][0] for number in range(8)] == contents


def test_samples_across_blocks_that_are_here_are_no_misses(
    large_shards: tuple[Path, list[bytes]], settings: Settings
) -> None:
    folder, contents = large_shards
    ref = api.create_snapshot(folder.parent.name, folder.as_uri(), settings=settings).ref
    dataset, packed = ShardDataset(ref, target=None), ShardDataset(ref, target=None, packed=True)
    read_until_here(dataset, range(8))
    clocks = Clocks(0)
    assert Measured(dataset, clocks).__getitems__(range(8)) == contents
    assert bytes(Measured(packed, clocks).__getitems__(range(8)).data.numpy()) == b"".join(contents)
    assert (clocks.usage().samples, clocks.usage().misses) == (16, 0)


def test_groups_are_the_samples_of_one_block(large_shards: tuple[Path, list[bytes]]) -> None:
    dataset = ShardDataset(large_shards[0], target=None)
    groups = dataset.groups()
    assert int(groups.sum()) == len(dataset)
    starts = np.concatenate(([0], np.cumsum(groups)[:-1]))
    for start, size in zip(starts.tolist(), groups.tolist(), strict=True):
        places = {
            (int(dataset.shards.shards_of(np.array([n]))[0]), int(dataset.shards.offsets[n]) // BLOCK_BYTES)
            for n in range(start, start + size)
        }
        assert len(places) == 1


def test_spans_are_the_shards(shards: Path) -> None:
    dataset = ShardDataset(shards)
    spans = dataset.spans()
    assert [span.name for span in spans] == [info.name for info in dataset.shards.set.shards]
    assert sum(span.count for span in spans) == COUNT
    assert [span.first for span in spans] == dataset.shards.starts[:-1].tolist()


@promise("A stream's batches are the same for any number of workers")
@pytest.mark.parametrize("shuffle", ["blocks", "global", False])
def test_a_stream_gives_the_same_batches_with_any_number_of_workers(shards: Path, shuffle: str | bool) -> None:
    dataset = ShardDataset(shards, target="path", packed=True)

    def epochs(workers: int) -> list[list[list[str]]]:
        stream = dataset.stream(6, shuffle=shuffle, seed=3)
        assert len(stream) == 7
        loader = DataLoader(stream, batch_size=None, num_workers=workers, persistent_workers=bool(workers))
        return [[batch.targets for batch in loader] for _ in range(2)]

    alone = epochs(0)
    paths = sorted(dataset.target(number) for number in range(COUNT))
    assert len(set(paths)) == COUNT
    for epoch in alone:
        assert sorted(path for batch in epoch for path in batch) == paths
    assert (alone[0] == alone[1]) == (shuffle is False)
    assert epochs(2) == alone


def test_streams_of_ranks_share_the_samples_out(shards: Path) -> None:
    dataset = ShardDataset(shards, target="path")
    seen = []
    for rank in range(3):
        stream = dataset.stream(4, rank=rank, world=3, even="uneven", seed=1)
        for _, keys in DataLoader(stream, batch_size=None):
            seen += keys
    assert len(seen) == len(set(seen)) == COUNT


def test_classes_of_shards_are_targets(settings: Settings, tmp_path: Path) -> None:
    for number, kind in enumerate(("cat", "dog", "cat")):
        (tmp_path / "pets" / kind).mkdir(exist_ok=True, parents=True)
        shutil.copy(_one_image(tmp_path), tmp_path / "pets" / kind / f"{number}.jpg")
    api.create_snapshot("pets", (tmp_path / "pets").as_uri(), settings=settings)
    api.shard("pets", to=str(tmp_path / "set"), classes_from_folders=True, settings=settings)
    dataset = ShardDataset(tmp_path / "set", packed=True)
    assert dataset.kind == "classification"
    assert dataset.classes == ("cat", "dog")
    assert dataset.__getitems__([0, 1, 2]).targets.tolist() == [0, 0, 1]
    with pytest.raises(UsageError, match="have no boxes"):
        ShardDataset(tmp_path / "set", target="detection")


def _one_image(folder: Path) -> Path:
    from PIL import Image

    path = folder / "one.jpg"
    Image.new("RGB", (8, 8)).save(path)
    return path


# --- damage --------------------------------------------------------------------------------------------------------


def _cut(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


def _flip(folder: Path, name: str) -> None:
    """One bit of the second sample's image."""
    index = ShardIndex.decode((folder / index_name(name)).read_bytes(), name)
    data = bytearray((folder / name).read_bytes())
    data[int(index.offsets[1]) + 100] ^= 4
    (folder / name).write_bytes(data)


def _lose(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _swap(folder: Path, name: str) -> None:
    other = "shard-000002.tar"
    (folder / name).rename(folder / "aside")
    (folder / other).rename(folder / name)
    (folder / "aside").rename(folder / other)


def _swap_same_size(folder: Path, name: str) -> None:
    """Two shards of one size are told apart by nothing but their bytes."""
    _swap(folder, name)
    sizes = {info["name"]: info["size_bytes"] for info in json.loads((folder / "shards.json").read_text())["shards"]}
    for each in (name, "shard-000002.tar"):
        data = (folder / each).read_bytes()
        (folder / each).write_bytes(data[: sizes[each]].ljust(sizes[each], b"\0"))


_NAME = "shard-000001.tar"


@promise("A broken image, and a shard that is cut short, damaged, missing or swapped, is an error that names it")
@pytest.mark.parametrize("through_cache", [False, True], ids=["folder", "cache"])
@pytest.mark.parametrize("damage", [_cut, _flip, _lose, _swap, _swap_same_size], ids=lambda damage: damage.__name__)
def test_damage_is_an_error_naming_shard_and_sample(
    shards: Path, settings: Settings, damage: Callable[[Path, str], None], through_cache: bool
) -> None:
    whole = ShardDataset(shards, target="path")
    hit = set(range(int(whole.shards.starts[1]), int(whole.shards.starts[2])))
    expected = [whole[number] for number in range(COUNT)]
    damage(shards, _NAME)
    where = str(shards)
    if through_cache:
        where = api.create_snapshot(shards.parent.name, where, settings=settings).ref

    def read_all() -> None:
        dataset = ShardDataset(where, target="path")
        for number in range(COUNT):
            assert dataset[number] == expected[number]

    with pytest.raises(ShardError) as caught:
        read_all()
    assert caught.value.shard in (_NAME, "shard-000002.tar")
    assert caught.value.shard in str(caught.value)
    if damage is not _lose and damage is not _swap:
        assert caught.value.sample
        assert caught.value.sample in str(caught.value)

    lenient = ShardDataset(where, target="path", on_error="skip")
    kept = []
    for batch in (lenient.__getitems__(range(start, min(start + 7, COUNT))) for start in range(0, COUNT, 7)):
        kept += batch
    assert all(pair in expected for pair in kept)
    lost = COUNT - len(kept)
    assert lenient.skipped == lost > 0
    assert {number for number in range(COUNT) if expected[number] not in kept} & hit
    packed = ShardDataset(where, target="path", packed=True, on_error="skip")
    batch = packed.__getitems__(range(COUNT))
    assert [(bytes(sample.image.numpy()), sample.target) for sample in batch] == kept


def test_a_damaged_label_is_an_error_or_its_sample_is_skipped(shards: Path) -> None:
    index = ShardIndex.decode((shards / index_name(_NAME)).read_bytes(), _NAME)
    label = next((member for member in index.members(1) if member.extension == "json"), None)
    assert label is not None
    data = bytearray((shards / _NAME).read_bytes())
    data[label.offset + 3] ^= 4
    (shards / _NAME).write_bytes(data)
    for target in ("detection", "path"):
        for packed in (False, True):
            with pytest.raises(ShardError, match=r"shard-000001\.tar"):
                ShardDataset(shards, target=target, packed=packed).__getitems__(range(COUNT))
            dataset = ShardDataset(shards, target=target, packed=packed, on_error="skip")
            assert len(dataset.__getitems__(range(COUNT))) == COUNT - 1
            assert dataset.skipped == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_flipped_byte_is_an_error_out_of_a_dataloader(shards: Path, workers: int) -> None:
    _flip(shards, _NAME)
    with pytest.raises(ShardError, match=r"shard-000001\.tar"):
        list(DataLoader(ShardDataset(shards, packed=True, target=None), batch_size=8, num_workers=workers))


@pytest.mark.shared_home(False)
@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_flipped_in_the_cache_is_mended_from_the_store(
    large_shards: tuple[Path, list[bytes]], settings: Settings, packed: bool
) -> None:
    folder, contents = large_shards
    ref = api.create_snapshot(folder.parent.name, folder.as_uri(), settings=settings).ref
    read_until_here(ShardDataset(ref, target=None), range(8))
    damaged = 0
    for file in sorted((settings.home / "cache" / "ssd").iterdir()):
        at = file.read_bytes().find(contents[0][1000:1064])
        if at >= 0:
            with file.open("r+b") as open_file:
                open_file.seek(at)
                open_file.write(bytes([contents[0][1000] ^ 1]))
            damaged += 1
    for folder_of_ram in settings.ram_dir.rglob("[or]-*"):
        folder_of_ram.unlink()
    assert damaged
    dataset = ShardDataset(ref, target=None, packed=packed)
    for _ in range(2):
        batch = dataset.__getitems__(range(len(contents)))
        got = [bytes(sample.image.numpy()) for sample in batch] if packed else batch
        assert got == contents


@promise("A broken image, and a shard that is cut short, damaged, missing or swapped, is an error that names it")
def test_a_shard_cut_short_while_it_is_read_is_an_error(shards: Path) -> None:
    dataset = ShardDataset(shards, packed=True, target=None)
    dataset.__getitems__(range(COUNT))  # all is mapped
    _cut(shards, _NAME)
    with pytest.raises(ShardError, match="cut short"):
        dataset.__getitems__(range(COUNT))


@pytest.mark.parametrize("name", ["shards.json", "shard-000001.index"])
def test_a_damaged_list_or_sidecar_is_refused(shards: Path, name: str) -> None:
    data = bytearray((shards / name).read_bytes())
    data[len(data) // 2] ^= 1
    (shards / name).write_bytes(data)
    with pytest.raises(ShardError):
        ShardDataset(shards)


@pytest.mark.shared_home(False)
def test_what_is_no_shard_set_is_said_plainly(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ShardError, match=r"no shards\.json"):
        ShardDataset(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faces").mkdir()
    with pytest.raises(SnapshotNotFoundError) as caught:
        ShardDataset("faces", settings=settings)
    assert "./faces" in caught.value.hint


def test_tfrecords_are_not_for_pytorch(faces_ref: str, settings: Settings, tmp_path: Path) -> None:
    api.shard(faces_ref, to=str(tmp_path / "records"), format="tfrecord", settings=settings)
    with pytest.raises(UsageError, match="tfrecord"):
        ShardDataset(tmp_path / "records")
