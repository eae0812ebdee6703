"""Records and examples, read by the real TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datacache.shards import records as tfrecord
from datacache.shards.build import Sharded
from datacache.shards.index import ShardIndex, index_name
from tests.shards.conftest import COUNT

pytestmark = pytest.mark.shared_home


def features(tf: Any) -> dict[str, Any]:
    """Return what an example of ours holds, as `tf.io.parse_single_example` takes it."""
    text, number = tf.io.FixedLenFeature([], tf.string), tf.io.FixedLenFeature([], tf.int64)
    return {
        "image/encoded": text,
        "image/format": text,
        "image/filename": text,
        "image/key": text,
        "image/width": number,
        "image/height": number,
        "image/object/class/text": tf.io.VarLenFeature(tf.string),
        "image/object/class/label": tf.io.VarLenFeature(tf.int64),
    } | {f"image/object/bbox/{edge}": tf.io.VarLenFeature(tf.float32) for edge in ("xmin", "ymin", "xmax", "ymax")}


def test_every_kind_of_feature_is_what_tensorflow_writes(tf: Any) -> None:
    values = [0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1, -(2**63)]
    floats = [0.0, 0.1, 1.0, -2.5]
    texts = [b"", b"a", bytes(range(256)) * 3]
    parts = tfrecord.int64_feature("ints", values) + tfrecord.float_feature("floats", floats)
    parts += tfrecord.bytes_feature("texts", texts) + tfrecord.int64_feature("none", [])
    for image in (b"", b"x", b"y" * 127, b"z" * 40_000):
        example = tf.train.Example.FromString(tfrecord.example_head(parts, len(image)) + image)
        feature = example.features.feature
        assert list(feature["ints"].int64_list.value) == values
        assert list(feature["floats"].float_list.value) == pytest.approx(floats)
        assert list(feature["texts"].bytes_list.value) == texts
        assert list(feature["none"].int64_list.value) == []
        assert list(feature["image/encoded"].bytes_list.value) == [image]


@pytest.mark.parametrize("data", [b"", b"a", bytes(range(256)) * 100])
def test_a_record_is_the_one_that_tensorflow_writes(data: bytes, tf: Any, tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        writer.write(data)
    ours = tfrecord.record_head(len(data)) + data + tfrecord.record_foot(tfrecord.extend(0, data))
    assert ours == (tmp_path / "theirs").read_bytes()


def test_tf_data_reads_the_samples_of_a_set(
    make: Callable[..., str], shard: Callable[..., tuple[Path, Sharded]], drawn: Path, tf: Any
) -> None:
    ref = make(drawn)
    folder, done = shard(ref, format="tfrecord")
    tars, _ = shard(ref, "tars", max_size_bytes=10**9)
    assert len(done.built.set.shards) > 2
    files = sorted(map(str, folder.glob("*.tfrecord")))
    records = [record.numpy() for record in tf.data.TFRecordDataset(files)]
    assert len(records) == COUNT
    import tarfile

    with tarfile.open(tars / "shard-000000.tar") as opened:
        said = {}
        for member in opened:
            file = opened.extractfile(member)
            assert file is not None
            said[member.name] = file.read()
    for record in records:
        example = tf.io.parse_single_example(record, features(tf))
        key = example["image/key"].numpy().decode()
        expected = json.loads(said[f"{key}.json"])
        assert example["image/encoded"].numpy() == said[f"{key}.jpg"]
        assert example["image/format"].numpy() == b"jpeg"
        assert example["image/filename"].numpy().decode() == expected["path"]
        assert (example["image/width"], example["image/height"]) == (160, 120)
        boxes = expected["boxes"]
        assert example["image/object/class/text"].values.numpy().tolist() == [b["label"].encode() for b in boxes]
        assert example["image/object/class/label"].values.numpy().tolist() == [b["class"] for b in boxes]
        for edge, side, size in (("xmin", "x1", 160), ("ymin", "y1", 120), ("xmax", "x2", 160), ("ymax", "y2", 120)):
            found = example[f"image/object/bbox/{edge}"].values.numpy() * size
            assert found == pytest.approx([box[side] for box in boxes], abs=1e-4)


def test_the_index_says_where_each_records_data_is(
    make: Callable[..., str], shard: Callable[..., tuple[Path, Sharded]], drawn: Path, tf: Any
) -> None:
    folder, done = shard(make(drawn), format="tfrecord")
    for info in done.built.set.shards:
        raw = (folder / info.name).read_bytes()
        index = ShardIndex.decode((folder / index_name(info.name)).read_bytes(), info.name)
        records = [record.numpy() for record in tf.data.TFRecordDataset([str(folder / info.name)])]
        for sample, record in enumerate(records):
            (member,) = index.members(sample)
            assert member.extension == "tfrecord"
            assert raw[member.offset : member.offset + member.size_bytes] == record
            assert tf.train.Example.FromString(record).features.feature["image/key"].bytes_list.value == [
                index.key(sample).encode()
            ]
