"""Shard sets, read by the real webdataset package; and what happens when a build is stopped, repeated or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset

from datacache import api
from datacache.core.errors import ShardError, UsageError
from datacache.settings import Settings
from datacache.shards.build import UNFINISHED, Sharded
from datacache.shards.index import NO_CLASS, SHARDS_JSON, ShardIndex, ShardSet, index_name
from tests.conftest import ROOT
from tests.shards.conftest import COUNT, contents

pytestmark = pytest.mark.shared_home
Make = Callable[..., str]
Shard = Callable[..., tuple[Path, Sharded]]


def read(folder: Path) -> list[dict[str, Any]]:
    """The samples as the webdataset package gives them."""
    urls = sorted(map(str, folder.glob("*.tar")))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
    return [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in samples
    ]


def indexes(folder: Path, found: ShardSet) -> list[ShardIndex]:
    return [ShardIndex.decode((folder / index_name(s.name)).read_bytes(), s.name) for s in found.shards]


# --- what is in a set ------------------------------------------------------------------------------------------------


def test_webdataset_reads_every_image_with_its_boxes(make: Make, shard: Shard, drawn: Path) -> None:
    folder, done = shard(make(drawn))
    found = ShardSet.decode((folder / SHARDS_JSON).read_bytes())
    assert found == done.built.set
    assert found.samples == COUNT
    assert found.classes == ("with_mask", "without_mask")
    samples = read(folder)
    assert [sample["__key__"] for sample in samples] == [f"JPEGImages/{n:06d}" for n in range(1, COUNT + 1)]
    for sample in samples:
        assert set(sample) == {"__key__", "jpg", "json", "txt"}
        said = json.loads(sample["json"])
        assert sample["jpg"] == (drawn / said["path"]).read_bytes()
        assert (said["width"], said["height"], said["labels"]) == (160, 120, [])
        lines = sample["txt"].decode().split("\n")[:-1]
        assert len(lines) == len(said["boxes"]) > 0
        for line, box in zip(lines, said["boxes"], strict=True):
            id, cx, _, w, _ = line.split()
            assert found.classes[int(id)] == box["label"] == found.classes[box["class"]]
            assert float(cx) * 160 == pytest.approx((box["x1"] + box["x2"]) / 2, abs=1e-3)
            assert float(w) * 160 == pytest.approx(box["x2"] - box["x1"], abs=1e-3)


def test_the_sidecar_says_where_every_member_is(make: Make, shard: Shard, drawn: Path) -> None:
    folder, done = shard(make(drawn))
    assert len(done.built.set.shards) > 3
    samples = iter(read(folder))
    for info, index in zip(done.built.set.shards, indexes(folder, done.built.set), strict=True):
        raw = (folder / info.name).read_bytes()
        assert (info.size_bytes, info.samples) == (len(raw), len(index))
        assert len(raw) <= 20_000
        for sample in range(len(index)):
            expected = next(samples)
            assert index.key(sample) == expected["__key__"]
            members = index.members(sample)
            assert [member.extension for member in members] == ["jpg", "json", "txt"]
            for member in members:
                assert raw[member.offset : member.offset + member.size_bytes] == expected[member.extension]


def test_names_with_dots_and_of_every_alphabet_come_out_of_webdataset_as_samples(
    make: Make, shard: Shard, image: bytes
) -> None:
    paths = [
        "a.b/c.d.jpg",
        "a.b/c_d.jpg",
        "日本/語.jpg",
        "e\u0301.PNG",
        "x y/z.jpeg",
        "x y/z.jpg",
        "d" * 120 + "/n.jpg",
    ]
    folder, done = shard(make({path: image + path.encode() for path in paths}))
    samples = read(folder)
    assert len({sample["__key__"] for sample in samples}) == len(paths)
    assert done.built.counts is not None
    assert done.built.counts.renamed == 2
    by_path = {json.loads(sample["json"])["path"]: sample for sample in samples}
    assert set(by_path) == set(paths)
    for path, sample in by_path.items():
        extension = path.rpartition(".")[2].lower()
        assert sample[extension] == image + path.encode()
    assert by_path["a.b/c.d.jpg"]["__key__"] == "a.b/c_d"
    assert by_path["a.b/c_d.jpg"]["__key__"] == "a.b/c_d_jpg"


def test_a_path_that_is_no_text_is_in_the_json_exactly(make: Make, shard: Shard, image: bytes) -> None:
    path = os.fsdecode(b"a\xff/\xfe.jpg")
    folder, _ = shard(make({path: image, "b.jpg": image}))
    (sample, _) = sorted(read(folder), key=lambda sample: sample["__key__"])
    assert sample["__key__"] == "a%ff/%fe"
    assert json.loads(sample["json"])["path"] == path


def test_images_without_annotations_are_not_opened(make: Make, shard: Shard, settings: Settings) -> None:
    folder, done = shard(make({f"{n}.jpg": b"no image %d" % n for n in range(5)}))
    samples = read(folder)
    assert [sample["jpg"] for sample in samples] == [b"no image %d" % n for n in range(5)]
    assert [json.loads(sample["json"]) for sample in samples] == [{"path": f"{n}.jpg"} for n in range(5)]
    assert done.built.set.classes == ()


def test_an_image_that_cannot_be_used_is_left_out_and_counted(make: Make, shard: Shard, drawn: Path) -> None:
    files = {str(f.relative_to(drawn)): f.read_bytes() for f in drawn.rglob("*") if f.is_file()}
    files["JPEGImages/000003.jpg"] = b"no image"
    del files["Annotations/000005.xml"]
    folder, done = shard(make(files))
    counts = done.built.counts
    assert counts is not None
    assert (counts.samples, counts.unusable, counts.unannotated) == (COUNT - 1, 1, 1)
    assert sum(problem.times for problem in done.built.problems)
    by_key = {sample["__key__"]: sample for sample in read(folder)}
    assert "JPEGImages/000003" not in by_key
    lonely = by_key["JPEGImages/000005"]
    assert json.loads(lonely["json"])["annotated"] is False
    assert lonely["txt"] == b""


def test_labels_of_whole_images_are_class_ids(make: Make, shard: Shard, image: bytes) -> None:
    lines = [{"file_name": f"{n}.jpg", "label": label} for n, label in enumerate(["dog", "cat", ["cat", "dog"], "cat"])]
    files = {f"{n}.jpg": image for n in range(5)}
    folder, done = shard(make(files | {"metadata.jsonl": "\n".join(map(json.dumps, lines)).encode()}))
    assert done.built.set.classes == ("cat", "dog")
    samples = read(folder)
    assert [sample.get("cls") for sample in samples] == [b"1", b"0", None, b"0", None]
    assert not any("txt" in sample for sample in samples)
    classes = [id for index in indexes(folder, done.built.set) for id in index.classes.tolist()]
    assert classes == [1, 0, NO_CLASS, 0, NO_CLASS]


def test_folders_are_classes_where_that_is_asked_for(make: Make, shard: Shard) -> None:
    ref = make({"train/dog/1.jpg": b"1", "train/cat/2.jpg": b"2", "val/dog/3.jpg": b"3"})
    folder, done = shard(ref, classes_from_folders=True)
    assert done.built.set.classes == ("cat", "dog")
    assert [(s["cls"], json.loads(s["json"])["labels"]) for s in read(folder)] == [
        (b"0", ["cat"]),
        (b"1", ["dog"]),
        (b"1", ["dog"]),
    ]
    plain, _ = shard(ref, "plain")
    assert not any("cls" in sample for sample in read(plain))
    with pytest.raises(UsageError, match="classes-from-folders"):
        shard(make({"1.jpg": b"1", "dog/2.jpg": b"2"}, "uneven"), "uneven", classes_from_folders=True)


def test_only_classes_that_were_asked_for_are_in(make: Make, shard: Shard, drawn: Path) -> None:
    ref = make(drawn)
    folder, done = shard(ref, classes=["without_mask"])
    assert done.built.set.classes == ("without_mask",)
    assert set(done.built.left_out) == {"with_mask"}
    boxes = [box for sample in read(folder) for box in json.loads(sample["json"])["boxes"]]
    assert {(box["label"], box["class"]) for box in boxes} == {("without_mask", 0)}
    with pytest.raises(UsageError, match="none of the classes"):
        shard(ref, "none", classes=["horse"])


def test_files_that_are_no_images_are_grouped_as_webdataset_does(make: Make, shard: Shard) -> None:
    files = {
        "a.npy": b"1",
        "a.meta.json": b"2",
        "a.d/b.npy": b"3",
        "a.z": b"4",
        "c": b"5",
        "c-d.npy": b"6",
        "c.npy": b"7",
        "e.TXT": b"8",
        "e.txt": b"9",
        ".hidden": b"10",
    }
    folder, _ = shard(make(files))
    samples = {sample.pop("__key__"): sample for sample in read(folder)}
    assert samples == {
        "a": {"npy": b"1", "meta.json": b"2", "z": b"4"},
        "a.d/b": {"npy": b"3"},
        "c": {"bin": b"5"},
        "c-d": {"npy": b"6"},
        "c_2": {"npy": b"7"},
        "e": {"txt": b"9"},
        "e_2": {"txt": b"8"},
        "_hidden": {"bin": b"10"},
    }


def test_a_file_that_is_larger_than_a_block_and_a_shard_has_a_shard_alone(make: Make, shard: Shard) -> None:
    large = os.urandom(1000) * 9_500
    folder, done = shard(make({"a.bin": b"a", "b.bin": large, "c.bin": b"", "d.bin": b"d"}))
    assert [info.samples for info in done.built.set.shards] == [1, 1, 2]
    assert [sample["bin"] for sample in read(folder)] == [b"a", large, b"", b"d"]


def test_no_shard_is_larger_than_asked_for_and_none_could_take_another_sample(
    make: Make, shard: Shard, drawn: Path
) -> None:
    _, done = shard(make(drawn), max_size_bytes=30_000)
    sizes = [info.size_bytes for info in done.built.set.shards]
    assert max(sizes) <= 30_000
    assert min(sizes[:-1]) > 15_000


@pytest.mark.parametrize("format", ["webdataset", "tfrecord"])
def test_nothing_to_put_into_shards_is_wrong_usage(make: Make, shard: Shard, image: bytes, format: str) -> None:
    ref = make({"JPEGImages/1.jpg": b"broken", "Annotations/1.xml": b"<annotation/>"})
    with pytest.raises(UsageError, match="no sample"):
        shard(ref, format=format)
    if format == "tfrecord":
        with pytest.raises(UsageError, match="no images"):
            shard(make({"a.bin": b"1"}, "files"), format=format)


def test_an_image_that_cannot_be_read_is_named(make: Make, shard: Shard, tmp_path: Path) -> None:
    ref = make({"a/1.jpg": b"1", "a/2.jpg": b"2"})
    (tmp_path / "source/faces/a/2.jpg").unlink()
    with pytest.raises(ShardError, match=r"a/2\.jpg cannot be read") as caught:
        shard(ref)
    assert (caught.value.shard, caught.value.sample) == ("shard-000000.tar", "a/2")


# --- the same bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["webdataset", "tfrecord"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_bytes_do_not_depend_on_the_number_of_processes(
    make: Make, shard: Shard, drawn: Path, format: str, shuffle: bool
) -> None:
    ref = make(drawn)
    sets = [
        contents(shard(ref, f"{processes}", format=format, shuffle=shuffle, processes=processes)[0])
        for processes in (1, 2, 3)
    ]
    assert sets[0] == sets[1] == sets[2]


def test_a_seed_is_an_order(make: Make, shard: Shard, drawn: Path) -> None:
    ref = make(drawn)

    def keys(name: str, **options: Any) -> list[str]:
        return [sample["__key__"] for sample in read(shard(ref, name, **options)[0])]

    plain, zero, one = keys("p"), keys("0", shuffle=True), keys("1", shuffle=True, seed=1)
    assert plain == sorted(plain) == sorted(zero) == sorted(one)
    assert len({tuple(plain), tuple(zero), tuple(one)}) == 3
    assert zero[:4] == keys("again", shuffle=True, seed=0)[:4]
    # The order is a promise: it must not follow numpy's version.
    assert [int(key[-6:]) for key in zero[:6]] == [1, 22, 3, 12, 21, 18]


# --- again, and after an end -----------------------------------------------------------------------------------------


def test_a_set_that_is_there_is_not_made_again(make: Make, shard: Shard, drawn: Path) -> None:
    ref = make(drawn)
    folder, first = shard(ref)
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    _, again = shard(ref)
    assert (first.built.made, again.built.made) == (len(first.built.set.shards), 0)
    assert again.built.set == first.built.set
    assert times == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


def test_a_shard_that_is_lost_is_made_again_and_no_other(make: Make, shard: Shard, drawn: Path) -> None:
    ref = make(drawn)
    folder, _ = shard(ref)
    before = contents(folder)
    (folder / "shard-000001.tar").unlink()
    (folder / "shard-000002.index").unlink()
    (folder / "shard-000003.tar").write_bytes(b"cut")
    (folder / "shard-000000.index").write_bytes(before["shard-000000.index"][:-1])
    kept = (folder / "shard-000004.tar").stat().st_mtime_ns
    _, again = shard(ref)
    assert again.built.made == 4
    assert contents(folder) == before
    assert (folder / "shard-000004.tar").stat().st_mtime_ns == kept


def test_another_set_at_the_url_is_named_and_stays(make: Make, shard: Shard, drawn: Path) -> None:
    ref = make(drawn)
    folder, _ = shard(ref)
    before = contents(folder)
    with pytest.raises(UsageError, match=rf"another shard set already: \d+ webdataset shards of {ref.split('@')[0]}@"):
        shard(ref, max_size_bytes=50_000)
    assert contents(folder) == before
    _, done = shard(ref, max_size_bytes=50_000, overwrite=True)
    fresh, _ = shard(ref, "fresh", max_size_bytes=50_000)
    assert contents(folder) == contents(fresh)
    assert done.built.made == len(done.built.set.shards)


def test_shards_of_somebody_else_stay(make: Make, shard: Shard, drawn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "shard-000000.tar").write_bytes(b"theirs")
    (folder / "readme.txt").write_bytes(b"theirs")
    with pytest.raises(UsageError, match="nothing says of what"):
        shard(make(drawn))
    assert (folder / "shard-000000.tar").read_bytes() == b"theirs"
    shard("faces", overwrite=True)
    assert (folder / "readme.txt").read_bytes() == b"theirs"
    assert len(read(folder)) == COUNT


def test_overwrite_mends_a_damaged_shard_of_the_same_set(make: Make, shard: Shard, drawn: Path) -> None:
    ref = make(drawn)
    folder, _ = shard(ref)
    before = contents(folder)
    raw = bytearray(before["shard-000001.tar"])
    raw[600] ^= 1
    (folder / "shard-000001.tar").write_bytes(raw)
    assert shard(ref)[1].built.made == 0
    shard(ref, overwrite=True)
    assert contents(folder) == before


KILLED = """
import sys
from datacache import api
done = 0
def progress(what, count, total, size):
    if what == "writing":
        print(count, flush=True)
        if count >= 3:
            sys.stdin.read()
api.shard(sys.argv[1], to=sys.argv[2], max_size_bytes=1, processes=int(sys.argv[3]), shuffle=True, progress=progress)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_build_that_was_killed_goes_on_where_it_was(
    make: Make, shard: Shard, drawn: Path, tmp_path: Path, processes: int, settings: Settings
) -> None:
    ref = make(drawn)
    whole, _ = shard(ref, "whole", max_size_bytes=1, shuffle=True)
    folder = tmp_path / "killed"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, ref, str(folder), str(processes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 3:
            break
    child.kill()
    child.communicate()
    left = contents(folder)
    assert SHARDS_JSON not in left
    assert UNFINISHED in left
    assert 3 <= len([name for name in left if name.endswith(".index")]) < COUNT
    (folder / ".datacache-put-0123").write_bytes(b"somebody else's")
    with pytest.raises(UsageError, match="unfinished shard set of faces"):
        shard(ref, "killed", max_size_bytes=2, shuffle=True)
    _, done = shard(ref, "killed", max_size_bytes=1, shuffle=True)
    assert done.built.made <= COUNT - 3
    (folder / ".datacache-put-0123").unlink()
    assert contents(folder) == contents(whole)


def test_two_builders_do_not_write_to_one_place(
    make: Make, shard: Shard, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datacache.shards import place

    monkeypatch.setattr(place, "_LOCK_WAIT_S", 0.0)
    ref = make(drawn)

    def begin_another(what: str, count: int, _total: int, _size: int) -> None:
        if what == "writing" and count < COUNT:
            with pytest.raises(UsageError, match=r"written to .* already"):
                shard(ref)

    shard(ref, progress=begin_another)


# --- snapshots of shards ---------------------------------------------------------------------------------------------


def test_a_set_can_be_a_snapshot_of_its_own(make: Make, shard: Shard, drawn: Path, settings: Settings) -> None:
    ref = make(drawn)
    folder, done = shard(ref, name="faces-shards", tags=["v1"])
    (folder / "readme.txt").write_bytes(b"not of the set")
    record = done.record
    assert record is not None
    assert record.lineage is not None
    assert (record.lineage.command, record.lineage.parameters["max_size"]) == ("shard", 20_000)
    with api.open_snapshot("faces-shards@v1", settings) as snapshot:
        files = {path: snapshot.read(path) for path in snapshot.paths()}
        assert record.lineage.inputs == (done.built.set.source,)
    assert files == {name: data for name, data in contents(folder).items() if name != "readme.txt"}
    assert shard(ref, name="faces-shards")[1].record == record


def test_a_bad_name_is_told_before_any_work(make: Make, shard: Shard, drawn: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        shard(make(drawn), name="../x")
    with pytest.raises(UsageError, match="none is asked for"):
        shard("faces", tags=["v1"])
    assert not (tmp_path / "shards").exists()
