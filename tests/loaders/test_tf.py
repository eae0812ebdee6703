"""`datacache.tf.dataset` with the real TensorFlow: the same samples as PyTorch gets, from files and from shards."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from datacache import api
from datacache.annotations.query import Query
from datacache.core.errors import (
    ObjectNotFoundError,
    ShardError,
    SnapshotNotFoundError,
    StoreAccessError,
    StoreUnavailableError,
    UsageError,
)
from datacache.core.ids import BLOCK_BYTES
from datacache.daemon import paths
from datacache.loaders.order import EpochOrder
from datacache.loaders.selection import select
from datacache.loaders.source import SnapshotSource
from datacache.settings import Settings, load_settings
from datacache.shards.index import SHARDS_JSON, ShardSet
from datacache.tiers import layout
from datacache.tiers.memory import lookahead_dir
from tests import leftovers
from tests.loaders.conftest import COUNT
from tests.promises import promise
from tests.servers import RcloneS3

pytestmark = pytest.mark.usefixtures("tf")
FORMATS = ("webdataset", "tfrecord")


class World(NamedTuple):
    """Make what many tests read and none changes."""

    settings: Settings
    faces: str
    """A snapshot of images with boxes."""
    pets: str
    """One of images in folders named after their classes."""
    shards: dict[tuple[str, str], Path]
    """Of `faces` and `pets`, by name and format."""


@pytest.fixture(scope="module")
def world(drawn_faces: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A home of this module, snapshots and shards."""
    home, data = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("world")
    ram = leftovers.SHARED_MEMORY / f"{leftovers.SHARED_MEMORY_PREFIX}{os.getpid()}-tf"
    ram.mkdir()
    catalog = f"sqlite:///{home}/catalog.db"
    settings = Settings(home=home, catalog=catalog, ram_bytes=2**25, ssd_bytes=2**29, ram_dir=ram)
    for number, file in enumerate(sorted((drawn_faces / "JPEGImages").iterdir())[:9]):
        image = data / "pets" / ("cat", "dog", "emu")[number % 3] / file.name
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(file.read_bytes())
    faces = api.create_snapshot("faces", drawn_faces.as_uri(), settings=settings).ref
    pets = api.create_snapshot("pets", (data / "pets").as_uri(), settings=settings).ref
    shards = {}
    for (name, ref), format in itertools.product((("faces", faces), ("pets", pets)), FORMATS):
        folder = shards[name, format] = data / f"{name}-{format}"
        options = {"max_size_bytes": 60_000, "processes": 1, "classes_from_folders": name == "pets"}
        api.shard(ref, to=str(folder), format=format, settings=settings, **options)
    yield World(settings, faces, pets, shards)
    leftovers.end_processes(lambda: leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(home)))
    shutil.rmtree(ram, ignore_errors=True)


@pytest.fixture
def dataset(world: World) -> Callable[..., Any]:
    """`datacache.tf.dataset` in the home of this module."""
    from datacache.tf import dataset

    return partial(dataset, settings=world.settings)


@pytest.fixture
def own(world: World, tmp_path: Path) -> Callable[[str], Path]:
    """Shards of the faces for the test alone."""
    return lambda format: Path(shutil.copytree(world.shards["faces", format], tmp_path / format))


def _torch_samples(world: World, ref: str, **arguments: Any) -> list[tuple[bytes, Any]]:
    from datacache.torch import SnapshotDataset

    samples = SnapshotDataset(ref, settings=world.settings, **arguments)
    return [samples[number] for number in range(len(samples))]


def _plain(element: Any) -> tuple[bytes, Any]:
    """An element as plain values."""
    image, target = element
    if isinstance(target, dict):
        return image.numpy(), {name: values.numpy().tolist() for name, values in target.items()}
    value = target.numpy()
    return image.numpy(), value.decode() if isinstance(value, bytes) else int(value)


def _paths(elements: Any) -> list[str]:
    return [path.numpy().decode() for _, path in elements]


def _where(world: World, format: str) -> str:
    return world.faces if format == "files" else str(world.shards["faces", format])


def _held(settings: Settings) -> list[Path]:
    """The local files that are held now."""
    return list(paths.files_dir(settings.home).glob("*/*"))


def _plans(world: World) -> set[Path]:
    """The orders that are published now."""
    return set(lookahead_dir(world.settings.home, world.settings.ram_dir).glob("*"))


# --- what elements are ------------------------------------------------------------------------------------------------


@promise("TensorFlow elements are the samples that PyTorch gets")
@pytest.mark.parametrize("target", ["auto", "detection", "classification", "path"])
def test_elements_are_the_samples_that_pytorch_gets(world: World, dataset: Callable[..., Any], target: str) -> None:
    found = [_plain(element) for element in dataset(world.faces, target=target)]
    expected = _torch_samples(world, world.faces, target=target)
    if target in ("auto", "detection"):
        expected = [(image, {name: tensor.tolist() for name, tensor in boxes.items()}) for image, boxes in expected]
    assert found == expected


def test_classes_of_folders_and_images_alone(world: World, dataset: Callable[..., Any]) -> None:
    assert [_plain(element) for element in dataset(world.pets, target="folder")] == _torch_samples(
        world, world.pets, target="folder"
    )
    images = [image.numpy() for image in dataset(world.faces, target=None)]
    assert images == _torch_samples(world, world.faces, target=None)


def test_the_specification_says_what_elements_are(world: World, dataset: Callable[..., Any], tf: Any) -> None:
    image, target = dataset(world.faces).element_spec
    assert image == tf.TensorSpec([], tf.string)
    assert target == {"boxes": tf.TensorSpec([None, 4], tf.float32), "labels": tf.TensorSpec([None], tf.int64)}
    images, targets = dataset(world.faces, batch_size=4, drop_remainder=True).element_spec
    assert images.shape == [4]
    assert targets["boxes"] == tf.RaggedTensorSpec([4, None, 4], tf.float32, 1, tf.int64)


@promise("TensorFlow elements are the samples that PyTorch gets")
@pytest.mark.parametrize("format", ["files", *FORMATS])
@pytest.mark.parametrize("target", ["detection", "path", None])
def test_batches_hold_the_same_samples_boxes_ragged(
    world: World, dataset: Callable[..., Any], format: str, target: str | None
) -> None:
    where = _where(world, format)
    single = list(dataset(where, target=target))
    batches = dataset(where, target=target, batch_size=7)
    assert len(batches) == 6
    assert len(dataset(where, target=target, batch_size=7, drop_remainder=True)) == 5
    assert [len(batch) if target is None else len(batch[0]) for batch in batches] == [7, 7, 7, 7, 7, 5]
    if target is None:
        assert [image.numpy() for image in single] == [image for batch in batches for image in batch.numpy()]
        return
    again: list[Any] = []
    for images, targets in batches:
        for at, image in enumerate(images):
            one = {name: values[at] for name, values in targets.items()} if target == "detection" else targets[at]
            again.append((image, one))
    assert [_plain(element) for element in again] == [_plain(element) for element in single]


def test_zeros_at_the_end_of_a_file_and_names_of_all_kinds_survive(
    world: World, tmp_path: Path, dataset: Callable[..., Any]
) -> None:
    files = {"a": b"ends in zeros\0\0\0", "empty": b"", "ünï ☃": b"\0", "zz": os.urandom(100_000)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    api.create_snapshot("files", tmp_path.as_uri(), settings=world.settings)
    assert {path.numpy().decode(): data.numpy() for data, path in dataset("files")} == files


def test_queries_and_splits_choose_images_as_for_pytorch(world: World, dataset: Callable[..., Any]) -> None:
    for chosen in ({"labels": ["with_mask"]}, {"split": "val"}, {"where": "objects >= 2"}, {"max_objects": 1}):
        expected = [path for _, path in _torch_samples(world, world.faces, target="path", **chosen)]
        assert _paths(dataset(world.faces, target="path", **chosen)) == expected
        assert 0 < len(expected) < COUNT


# --- order ------------------------------------------------------------------------------------------------------------


@promise("A TensorFlow epoch has every sample once, in an order of its own that another run repeats")
@pytest.mark.parametrize("format", ["files", *FORMATS])
def test_each_epoch_has_every_sample_once_in_another_order_and_the_same_in_another_run(
    world: World, dataset: Callable[..., Any], format: str
) -> None:
    where = _where(world, format)
    shuffled = dataset(where, target="path", shuffle=True, seed=3)
    assert len(shuffled) == COUNT
    epochs = [_paths(shuffled) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({frozenset(epoch) for epoch in epochs}) == 1
    assert all(len(set(epoch)) == COUNT for epoch in epochs)
    again = dataset(where, target="path", shuffle=True, seed=3)
    assert [_paths(again) for _ in range(3)] == epochs
    assert _paths(dataset(where, target="path", shuffle=True, seed=4)) != epochs[0]
    fixed = dataset(where, target="path", shuffle=True, seed=3, epoch=1)
    assert _paths(fixed) == _paths(fixed)
    if format != "tfrecord":  # its shuffle buffer is TensorFlow's, which counts for itself
        assert _paths(fixed) == epochs[1]
    straight = _paths(dataset(where, target="path"))
    assert straight == _paths(dataset(where, target="path"))
    assert set(straight) == set(epochs[0])


def test_repeating_goes_on_with_the_next_epoch(world: World, dataset: Callable[..., Any]) -> None:
    repeated = _paths(dataset(world.faces, target="path", shuffle=True).repeat(2))
    shuffled = dataset(world.faces, target="path", shuffle=True)
    assert repeated == _paths(shuffled) + _paths(shuffled)


def test_several_iterators_at_once_do_not_disturb_one_another(world: World, dataset: Callable[..., Any]) -> None:
    for where in (world.faces, str(world.shards["faces", "tfrecord"])):
        straight = dataset(where, target="path")
        first, second = iter(straight), iter(straight)
        pairs = [(next(first)[1].numpy(), next(second)[1].numpy()) for _ in range(COUNT)]
        assert all(one == other for one, other in pairs)
        dropped = iter(dataset(where, target="path"))
        next(dropped)
        del dropped


# --- shards -----------------------------------------------------------------------------------------------------------


@promise("TensorFlow elements are the samples that PyTorch gets")
@pytest.mark.parametrize("format", FORMATS)
def test_shards_give_the_samples_that_they_were_made_of(world: World, dataset: Callable[..., Any], format: str) -> None:
    folder = world.shards["faces", format]
    assert len(ShardSet.decode((folder / SHARDS_JSON).read_bytes()).shards) >= 5
    found = list(dataset(folder))
    assert len(found) == COUNT
    for (image, target), (expected_image, expected) in zip(found, _torch_samples(world, world.faces), strict=True):
        assert image.numpy() == expected_image
        assert target["labels"].numpy().tolist() == expected["labels"].tolist()
        np.testing.assert_allclose(target["boxes"].numpy(), expected["boxes"].numpy(), rtol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_classes_in_shards_are_targets(world: World, dataset: Callable[..., Any], format: str) -> None:
    folder = world.shards["pets", format]
    expected = _torch_samples(world, world.pets, target="folder")
    assert [_plain(element) for element in dataset(folder)] == expected
    batched = [label for _, labels in dataset(folder, batch_size=4) for label in labels.numpy().tolist()]
    assert batched == [label for _, label in expected]


def test_records_come_serialized_if_asked_for(world: World, dataset: Callable[..., Any], tf: Any) -> None:
    records = list(dataset(world.shards["faces", "tfrecord"], parse=False))
    assert len(records) == COUNT
    features = tf.train.Example.FromString(records[0].numpy()).features.feature
    assert features["image/encoded"].bytes_list.value[0] == _torch_samples(world, world.faces, target=None)[0]
    (batch,) = dataset(world.shards["faces", "tfrecord"], parse=False, batch_size=COUNT)
    assert batch.shape == [COUNT]


@pytest.mark.parametrize("format", FORMATS)
def test_shards_in_a_bucket_are_read_by_url_and_as_a_snapshot(
    world: World,
    home: Path,
    rclone_s3: RcloneS3,
    monkeypatch: pytest.MonkeyPatch,
    dataset: Callable[..., Any],
    format: str,
) -> None:
    bucket = rclone_s3.make_bucket(f"tf-{os.urandom(4).hex()}")
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    url, settings = f"s3://{bucket.name}/shards", load_settings()
    shutil.copytree(world.shards["faces", format], bucket / "shards")
    api.create_snapshot("set", url, settings=settings)
    expected = _torch_samples(world, world.faces, target=None)
    for where in (url, "set", "set@latest"):
        for options in ({}, {"shuffle": True}):
            images = [image.numpy() for image in dataset(where, target=None, settings=settings, **options)]
            assert sorted(images) == sorted(expected)
    assert settings.home == home
    assert _held(settings) == []


def _large_set(settings: Settings, url: str, tmp_path: Path, **options: Any) -> list[bytes]:
    """A set of shards larger than a block, of images that are none."""
    images = [np.random.default_rng(number).bytes(700_000) for number in range(24)]
    for number, data in enumerate(images):
        (tmp_path / "large").mkdir(exist_ok=True)
        (tmp_path / "large" / f"{number:02}.png").write_bytes(data)
    ref = api.create_snapshot("large", str(tmp_path / "large"), settings=settings).ref
    api.shard(ref, to=url, format="tfrecord", max_size_bytes=BLOCK_BYTES + 10**6, settings=settings, **options)
    return images


@promise("TensorFlow's shards outlive their eviction while they are read")
def test_cached_shards_are_read_through_links_that_outlive_eviction_and_are_cleaned_up(
    rclone_s3: RcloneS3, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dataset: Callable[..., Any]
) -> None:
    bucket = rclone_s3.make_bucket(f"tf-{os.urandom(4).hex()}")
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    images = _large_set(settings, f"s3://{bucket.name}", tmp_path, name="set", processes=1)
    client = api.connect(settings)
    job = client.warm("set@latest")
    while client.job(job)["state"] == "running":
        time.sleep(0.01)
    cached = {path.stat().st_ino for path in layout.ssd_dir(home).glob("o-*")}
    assert len(cached) == 3  # and the last one is small, and copied
    straight = iter(dataset("set", target=None, settings=settings))
    assert next(straight).numpy() == images[0]
    held = _held(settings)
    assert held
    assert {path.stat().st_ino for path in held} <= cached
    client.evict(None)
    assert [image.numpy() for image in straight] == images[1:]
    del straight
    assert _held(settings) == []
    abandoned = iter(dataset("set", target=None, shuffle=True, settings=settings))
    next(abandoned)
    del abandoned
    assert _held(settings) == []


def test_the_order_of_samples_is_published_for_as_long_as_it_is_read(world: World) -> None:
    from datacache.loaders.tensorflow.dataset import Stream, TfOptions

    snapshot = api.open_snapshot(world.faces, world.settings)
    with closing(api.open_catalog(world.settings)) as catalog:
        source = SnapshotSource(snapshot, select(snapshot, catalog, target="path", query=Query()))
    options = TfOptions(batch_size=5, shuffle=True)
    stream = Stream(source, EpochOrder(COUNT), options, world.settings)
    for stop_early in (False, True):
        before = _plans(world)
        chunks = stream()
        next(chunks)
        assert len(_plans(world) - before) == 1
        if stop_early:
            chunks.close()
        else:
            assert len(list(chunks)) == 7
        assert _plans(world) == before


@promise("TensorFlow's shards outlive their eviction while they are read")
def test_at_most_two_groups_of_shards_are_held_and_the_next_is_published(
    world: World, own: Callable[[str], Path]
) -> None:
    from datacache.loaders.tensorflow.dataset import TfOptions
    from datacache.loaders.tensorflow.records import Turns

    ref = api.create_snapshot("held", own("tfrecord").as_uri(), settings=world.settings).ref
    turns = Turns(api.open_shards(ref, world.settings), TfOptions(), world.settings)
    before = _plans(world)
    seen = []
    for group in turns():
        held = sorted(path.name for path in _held(world.settings))
        assert len(held) <= 2
        assert [os.path.basename(path).decode() for path in group] == held[-1:] or not len(group)
        assert len(_plans(world) - before) == 1
        seen += [os.path.basename(path).decode()[len("000000-") :] for path in group]
    assert seen == [f"shard-{number:06d}.tfrecord" for number in range(5)]
    assert _held(world.settings) == []
    assert _plans(world) == before
    dropped = turns()
    next(dropped)
    dropped.close()
    assert _held(world.settings) == []


def test_what_is_published_of_records_is_whole_shards(world: World, own: Callable[[str], Path]) -> None:
    from datacache.loaders.tensorflow.records import ShardPlan

    folder = world.shards["faces", "tfrecord"]
    ref = api.create_snapshot("planned", folder.as_uri(), settings=world.settings).ref
    shards = api.open_shards(ref, world.settings)
    plan = ShardPlan(shards)
    source, items = plan.plan_source(), plan.plan_items(np.array([2, 0]))
    snapshot = api.open_snapshot(ref, world.settings)
    assert source is not None
    assert snapshot.ref == f"{source.dataset}@{source.snapshot}"
    manifest = snapshot.manifest
    assert [manifest.path(row) for (row,) in items.tolist()] == [b"shard-000002.tfrecord", b"shard-000000.tfrecord"]
    assert ShardPlan(api.open_shards(folder, world.settings)).plan_source() is None
    less = own("tfrecord")
    (less / "shard-000001.tfrecord").unlink()
    ref = api.create_snapshot("less", less.as_uri(), settings=world.settings).ref
    rows = ShardPlan(api.open_shards(ref, world.settings, lenient=True)).plan_items(np.arange(3))
    assert (rows[:, 2] > 0).tolist() == [True, False, True]


# --- use --------------------------------------------------------------------------------------------------------------


def test_images_are_decoded_in_a_map_and_a_model_learns_from_them(
    world: World, dataset: Callable[..., Any], tf: Any
) -> None:
    def decode(image: Any, label: Any) -> Any:
        pixels = tf.io.decode_jpeg(image, channels=3)
        return tf.image.resize(pixels, (8, 8)) / 255.0, label

    batches = dataset(world.pets, target="folder", shuffle=True).map(decode).batch(3).prefetch(2)
    model = tf.keras.Sequential([tf.keras.Input((8, 8, 3)), tf.keras.layers.Flatten(), tf.keras.layers.Dense(3)])
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(batches, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


@promise("`datacache.tf` needs no PyTorch")
def test_importing_it_does_not_import_pytorch_and_without_tensorflow_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ModuleNotFoundError('no', name='tensorflow')")
    code = """
        import sys
        try:
            import datacache.tf
        except ModuleNotFoundError as exc:
            print(exc)
        print("torch" in sys.modules)
        """
    for missing in (False, True):
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
        if missing:
            environment["PYTHONPATH"] = str(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=True
        )
        said = "datacache.tf needs TensorFlow: pip install 'dsctl[tensorflow]'\n" if missing else ""
        assert done.stdout == said + "False\n"


# --- what goes wrong --------------------------------------------------------------------------------------------------


@promise("A missing or damaged file or shard is a TensorFlow error that names it, or left out")
def test_a_file_that_is_gone_is_an_error_that_names_it_or_left_out(
    world: World, tmp_path: Path, dataset: Callable[..., Any], tf: Any
) -> None:
    for number in range(5):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    api.create_snapshot("gone", tmp_path.as_uri(), settings=world.settings)
    (tmp_path / "1.bin").unlink()
    for options in ({}, {"shuffle": True}, {"batch_size": 2}):
        with pytest.raises(tf.errors.OpError, match=r"1\.bin"):
            list(dataset("gone", **options))
    assert _paths(dataset("gone", on_error="skip")) == ["0.bin", "2.bin", "3.bin", "4.bin"]
    lenient = dataset("gone", on_error="skip", batch_size=2, drop_remainder=True)
    assert [path.decode() for _, batch in lenient for path in batch.numpy()] == ["0.bin", "2.bin", "3.bin", "4.bin"]


def _damage(shard: Path, how: str) -> None:
    data = shard.read_bytes()
    if how == "missing":
        shard.unlink()
    elif how == "cut short":
        shard.write_bytes(data[:-100])
    else:
        shard.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])


def test_a_store_that_is_away_or_lets_nobody_in_is_never_left_out(tf: Any) -> None:
    from datacache.loaders.tensorflow.dataset import TfOptions

    lenient = TfOptions(on_error="skip")
    assert lenient.skips(ObjectNotFoundError("gone"))
    assert not lenient.skips(StoreUnavailableError("away"))
    assert not lenient.skips(StoreAccessError("forbidden"))


@promise("A missing or damaged file or shard is a TensorFlow error that names it, or left out")
@pytest.mark.parametrize("how", ["missing", "cut short", "flipped"])
def test_a_damaged_shard_of_records_is_an_error_that_names_it_or_left_out(
    own: Callable[[str], Path], dataset: Callable[..., Any], tf: Any, how: str
) -> None:
    folder = own("tfrecord")
    opened, records = dataset(folder, target="path"), dataset(folder, parse=False)
    whole = _paths(opened)
    lost = ShardSet.decode((folder / SHARDS_JSON).read_bytes()).shards[2]
    _damage(folder / lost.name, how)
    for found in (opened, records):
        with pytest.raises(tf.errors.OpError, match=lost.name) as caught:
            list(found)
        assert "again" in str(caught.value)  # the hint
    if how != "flipped":
        with pytest.raises(ShardError, match=lost.name):
            dataset(folder)
    left = _paths(dataset(folder, target="path", on_error="skip"))
    first = sum(info.samples for info in ShardSet.decode((folder / SHARDS_JSON).read_bytes()).shards[:2])
    assert left == whole[:first] + whole[first + lost.samples :]
    shuffled = dataset(folder, target="path", on_error="skip", shuffle=True)
    assert set(_paths(shuffled)) == set(left)


def test_a_flipped_bit_in_a_tar_is_an_error_that_names_shard_and_sample(
    own: Callable[[str], Path], dataset: Callable[..., Any], tf: Any
) -> None:
    folder = own("webdataset")
    _damage(folder / "shard-000001.tar", "flipped")
    with pytest.raises(tf.errors.OpError, match=r"sample '.*' of shard-000001\.tar"):
        list(dataset(folder))
    assert len(list(dataset(folder, on_error="skip"))) == COUNT - 1


@promise("A missing or damaged file or shard is a TensorFlow error that names it, or left out")
def test_a_shard_in_a_bucket_that_is_not_what_the_set_says_is_an_error_that_names_it(
    world: World, own: Callable[[str], Path], dataset: Callable[..., Any], tf: Any
) -> None:
    folder = own("tfrecord")
    _damage(folder / "shard-000001.tfrecord", "flipped")
    api.create_snapshot("wrong", folder.as_uri(), settings=world.settings)
    first = dataset(folder, target=None).take(10)
    found = iter(dataset("wrong", target=None))
    assert [next(found).numpy() for _ in first] == [image.numpy() for image in first]
    with pytest.raises(tf.errors.OpError, match=r"ShardError: the bytes of shard-000001\.tfrecord in wrong@"):
        next(found)
    del found
    assert _held(world.settings) == []


def test_a_shard_that_its_owner_writes_to_while_it_is_read_is_an_error_that_names_it(
    world: World, own: Callable[[str], Path], dataset: Callable[..., Any], tf: Any
) -> None:
    folder = own("tfrecord")
    api.create_snapshot("written", folder.as_uri(), settings=world.settings)
    elements = iter(dataset("written", target=None))
    next(elements)
    os.utime(folder / "shard-000000.tfrecord", ns=(0, 0))
    with pytest.raises(tf.errors.OpError, match=r"shard-000000\.tfrecord of written@"):
        list(elements)


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": "captions"},
        {"batch_size": 0},
        {"on_error": "ignore"},
        {"parse": False},
        {"labels": "with_mask"},
        {"split": "dev"},
        {"seed": -1},
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant_are_refused(
    world: World, dataset: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        dataset(world.faces, **arguments)


def test_what_a_set_does_not_have_is_refused(world: World, tmp_path: Path, dataset: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="no classes"):
        dataset(world.shards["faces", "tfrecord"], target="classification")
    for format in FORMATS:
        with pytest.raises(UsageError, match="shard set"):
            dataset(world.shards["faces", format], labels=["with_mask"])
    with pytest.raises(UsageError, match="no boxes"):
        dataset(world.shards["pets", "tfrecord"], target="detection")
    with pytest.raises(UsageError, match="parse"):
        dataset(world.shards["pets", "webdataset"], parse=False)
    with pytest.raises(ShardError, match="no shard set"):
        dataset(tmp_path)
    with pytest.raises(SnapshotNotFoundError):
        dataset("nothing")
