"""`datacache.torch.mix` over real snapshots and shards: batches, classes, targets, workers, resuming, reading ahead."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from datacache import api
from datacache.core.errors import UsageError
from datacache.core.ids import block_id, object_id
from datacache.loaders.lookahead import publish
from datacache.loaders.sampler import EpochSampler
from datacache.settings import Settings
from datacache.tiers.local import LocalBlocks
from datacache.torch import MixedDataset, PackedBatch, ShardDataset, SnapshotDataset, collate, loader, mix
from dataset_cli.demo.faces import draw_faces
from tests.loaders.conftest import COUNT, read_until_here
from tests.loaders.test_lookahead import wait_for
from tests.promises import promise

pytestmark = pytest.mark.shared_home
OTHERS = 12


@pytest.fixture(scope="session")
def drawn_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 drawn images with a class of their own before one that the faces have."""
    folder = tmp_path_factory.mktemp("others")
    draw_faces(folder, count=OTHERS, seed=5, width=200, height=160)
    for file in (folder / "Annotations").iterdir():
        file.write_text(file.read_text().replace("with_mask", "a_hood").replace("outa_hood", "out_mask"))
    return folder


@pytest.fixture
def others_ref(drawn_others: Path, settings: Settings) -> str:
    return api.create_snapshot("others", drawn_others.as_uri(), settings=settings).ref


@pytest.fixture
def mixed(faces_ref: str, others_ref: str) -> MixedDataset:
    return mix({faces_ref: 0.7, others_ref: 0.3})


def _paths(dataset: MixedDataset, samples: list[int]) -> list[tuple[int, str]]:
    return [(dataset.part_of(sample)[0], dataset.path(sample)) for sample in samples]


def _order(dataset: MixedDataset, **how: Any) -> list[int]:
    return list(EpochSampler(dataset, lookahead=False, **how))


# --- samples ----------------------------------------------------------------------------------------------------------


@promise("A sample of a mix is its part's sample, with the class ids of the union of all classes")
def test_samples_are_those_of_the_parts_with_classes_by_name(
    mixed: MixedDataset, faces_ref: str, others_ref: str
) -> None:
    parts = SnapshotDataset(faces_ref), SnapshotDataset(others_ref)
    assert mixed.classes == ("with_mask", "without_mask", "a_hood")
    assert parts[1].classes == ("a_hood", "without_mask")
    seen = set()
    for sample in range(COUNT + OTHERS):
        part, own = mixed.part_of(sample)
        image, target = mixed[sample]
        expected, boxes = parts[part][own]
        assert image == expected
        assert mixed.path(sample) == parts[part].path(own)
        assert torch.equal(target["boxes"], boxes["boxes"])
        assert target["labels"].dtype == torch.int64
        names = [mixed.classes[label] for label in target["labels"].tolist()]
        assert names == [parts[part].classes[label] for label in boxes["labels"].tolist()]
        seen |= {(part, name) for name in names}
    assert {(0, "with_mask"), (1, "a_hood"), (1, "without_mask")} <= seen


def test_a_batch_has_the_samples_of_its_numbers_in_their_order(mixed: MixedDataset) -> None:
    numbers = [51, 0, 40, 39, 52, 56, 3, -1]
    batch = mixed.__getitems__(numbers)
    assert [image for image, _ in batch] == [mixed.read(number) for number in numbers]
    packed = mix([(part, 1) for part in mixed.parts])
    assert len(packed) == 2 * COUNT


def test_packed_batches_and_decoded_ones_are_those_of_all_parts(faces_ref: str, others_ref: str) -> None:
    packed = mix({faces_ref: 0.7, others_ref: 0.3}, packed=True)
    numbers = [51, 0, 40, 39, 52, 56, 3]
    batch = packed.__getitems__(numbers)
    assert isinstance(batch, PackedBatch)
    assert [bytes(sample.image.numpy()) for sample in batch] == [packed.read(number) for number in numbers]
    assert [len(target["labels"]) for target in batch.targets] == [
        len(packed.target(number)["labels"]) for number in numbers
    ]
    decoded = mix({faces_ref: 0.7, others_ref: 0.3}, decode="rgb", size=(32, 48))
    images, targets = collate(decoded.__getitems__(numbers))
    assert images.shape == (7, 32, 48, 3)
    assert all(target["boxes"].max() <= 48 for target in targets)


def test_what_is_not_here_of_some_parts_is_fetched_into_its_place(
    faces_ref: str, drawn_others: Path, settings: Settings, tmp_path: Path
) -> None:
    folder = shutil.copytree(drawn_others, tmp_path / "others")
    ref = api.create_snapshot(f"{tmp_path.name}-others", folder.as_uri(), settings=settings).ref
    faces = SnapshotDataset(faces_ref, packed=True, target=None)
    read_until_here(faces, range(COUNT))
    dataset = mix([(faces, 1), (SnapshotDataset(ref, packed=True, target=None), 1)])
    images = [file.read_bytes() for file in sorted((folder / "JPEGImages").iterdir())]
    batch = dataset.__getitems__([0, COUNT + 5, 1, COUNT + 2])
    assert [bytes(sample.image.numpy()) for sample in batch] == [faces.read(0), images[5], faces.read(1), images[2]]


def test_size_and_transform_are_each_parts_own(faces_ref: str, others_ref: str) -> None:
    small = SnapshotDataset(faces_ref, decode="rgb", size=8, transform=lambda image, _: ("small", image.shape))
    large = SnapshotDataset(others_ref, decode="rgb", size=16)
    dataset = mix([(small, 1), (large, 1)])
    assert dataset[0] == ("small", (8, 8, 3))
    assert dataset[COUNT][0].shape == (16, 16, 3)


def test_behind_all_samples_come_those_that_a_part_repeats(mixed: MixedDataset) -> None:
    assert mixed.places == (COUNT, 17)
    assert len(mixed) == 57
    assert _paths(mixed, [52, 53, 56]) == _paths(mixed, [40, 41, 44])
    assert mixed[52][0] == mixed[40][0]
    assert mixed.target(52)["labels"].tolist() == mixed.target(40)["labels"].tolist()
    with pytest.raises(IndexError, match="no sample 57 of 57"):
        mixed[57]
    batches = DataLoader(mixed, batch_size=10, shuffle=True, collate_fn=collate)
    given = Counter(image for images, _ in batches for image in images)
    assert sum(given.values()) == 57
    assert sorted(given.values()) == [1] * (COUNT + 7) + [2] * 5


def test_classes_are_in_the_order_that_is_asked_for(faces_ref: str, others_ref: str) -> None:
    names = ["a_hood", "bare", "without_mask", "with_mask"]
    dataset = mix({faces_ref: 1, others_ref: 1}, classes=names)
    assert dataset.classes == tuple(names)
    labels = {label for sample in range(52) for label in dataset.target(sample)["labels"].tolist()}
    assert labels == {0, 2, 3}
    with pytest.raises(UsageError, match="has the class 'without_mask', which `classes` does not name"):
        mix({faces_ref: 1, others_ref: 1}, classes=["with_mask", "a_hood"])


def test_classes_of_images_are_unified_as_well_and_none_stays_none(faces_ref: str, others_ref: str) -> None:
    dataset = mix({faces_ref: 1, others_ref: 1}, target="classification")
    for sample in range(COUNT, COUNT + OTHERS):
        own = dataset.parts[1].target(sample - COUNT)
        expected = -1 if own == -1 else dataset.classes.index(dataset.parts[1].classes[own])
        assert dataset.target(sample) == expected
    assert -1 in {dataset.target(sample) for sample in range(COUNT, COUNT + OTHERS)}


def test_styled_targets_have_the_mixs_numbers_and_classes(faces_ref: str, others_ref: str) -> None:
    seen = mix({faces_ref: 1, others_ref: 1}, style="torchvision").target(COUNT + 2)
    assert seen["image_id"].tolist() == [COUNT + 2]
    styled = mix({faces_ref: 1, others_ref: 1}, style="ultralytics")
    assert styled.target(COUNT)["cls"].dtype == torch.float32
    names = {styled.classes[int(each)] for at in range(COUNT, 52) for each in styled.target(at)["cls"][:, 0]}
    assert names == {"a_hood", "without_mask"}


@pytest.fixture
def faces_shards(faces_ref: str, settings: Settings, tmp_path: Path) -> Path:
    api.shard(faces_ref, to=str(tmp_path / "shards"), max_size_bytes=100_000, settings=settings)
    return tmp_path / "shards"


def test_shards_and_snapshots_are_mixed(faces_shards: Path, others_ref: str) -> None:
    dataset = mix([(ShardDataset(faces_shards), 0.5), (others_ref, 0.5)])
    assert dataset.classes == ("with_mask", "without_mask", "a_hood")
    batch = dataset.__getitems__([COUNT, 0, COUNT + 1, 1])
    assert [image for image, _ in batch] == [dataset.read(number) for number in (COUNT, 0, COUNT + 1, 1)]
    assert dataset.plan_source() is not None
    with pytest.raises(UsageError, match="lie together"):
        EpochSampler(dataset, shuffle="blocks")
    blocks = mix([(ShardDataset(faces_shards), 0.5), (ShardDataset(faces_shards), 0.5)])
    assert blocks.plan_source() is None
    assert Counter(number % COUNT for number in _order(blocks, shuffle="blocks", window=1)) == dict.fromkeys(
        range(COUNT), 2
    )


# --- what does not go together ----------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_an_error_that_names_it(faces_ref: str, others_ref: str) -> None:
    faces = SnapshotDataset(faces_ref)
    others = SnapshotDataset(others_ref, target="path")
    with pytest.raises(UsageError, match=r"targets of one kind, and .*others.* has others than .*faces") as caught:
        mix([(faces, 1), (others, 1)])
    assert "target=" in str(caught.value.hint)
    with pytest.raises(UsageError, match="targets of one kind"):
        mix([(faces, 1), (SnapshotDataset(others_ref, style="torchvision"), 1)])
    with pytest.raises(UsageError, match=r"packed is False for .* and True for"):
        mix([(faces, 1), (SnapshotDataset(others_ref, packed=True), 1)])
    with pytest.raises(UsageError, match="part 1 of this mix has the weight 0"):
        mix({faces_ref: 1, others_ref: 0})
    with pytest.raises(UsageError, match="a mix of nothing"):
        mix({})
    with pytest.raises(UsageError, match="no part that is a list"):
        mix([([1, 2], 1)])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="no part that is a MixedDataset"):
        mix([(mix([(faces, 1)]), 1)])
    with pytest.raises(UsageError, match="decode: these are for parts that are opened here"):
        mix([(faces, 1)], decode="rgb")
    with pytest.raises(UsageError, match="know their groups"):
        EpochSampler(mix([(faces, 1)]), groups=[40], shuffle="blocks")
    with pytest.raises(UsageError, match="not dealt out as tasks"):
        mix([(faces, 1)]).spans()


def test_a_broken_image_of_one_part_is_skipped_and_counted(tmp_path: Path, faces_ref: str, settings: Settings) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "one.jpg").write_bytes(b"no image")
    ref = api.create_snapshot(f"{tmp_path.name}-broken", (tmp_path / "broken").as_uri(), settings=settings).ref
    dataset = mix({faces_ref: 1, ref: 1}, target="path", decode="rgb", on_error="skip")
    batch = dataset.__getitems__([0, COUNT, 1])
    assert [path for _, path in batch] == [dataset.path(0), dataset.path(1)]
    assert dataset.skipped == 1


# --- in loaders -------------------------------------------------------------------------------------------------------


@promise("A mix's batches follow from seed, epoch and position alone")
def test_batches_are_the_same_for_any_number_of_workers_and_have_the_shares(mixed: MixedDataset) -> None:
    found = []
    for workers in (0, 2):
        with loader(mixed, 16, seed=3, num_workers=workers, report_every=0) as batches:
            found.append([list(images) for _ in range(2) for images, _ in batches])
    assert found[0] == found[1]
    orders = [_order(mixed, seed=3), []]
    sampler = EpochSampler(mixed, seed=3, lookahead=False)
    sampler.set_epoch(1)
    orders[1] = list(sampler)
    assert [image for batch in found[0] for image in batch] == [mixed.read(at) for order in orders for at in order]
    for order in orders:
        for begin in (0, 16, 32):
            assert sum(number >= COUNT for number in order[begin : begin + 16]) in (4, 5, 6)


@promise("A mix resumes as one data set does")
def test_a_loader_goes_on_in_the_middle_of_an_epoch_on_another_number_of_ranks(mixed: MixedDataset) -> None:
    def make(rank: int, world: int) -> Any:
        how: Any = {"num_workers": 0, "report_every": 0, "even": "uneven", "seed": 8, "lookahead": False}
        return loader(mixed, 4, rank=rank, world=world, **how)

    seen, states = [], []
    for rank in range(2):
        with make(rank, 2) as batches:
            for _, (images, _) in zip(range(3 + rank), batches, strict=False):
                seen += images
            states.append(json.loads(json.dumps(batches.state_dict())))
    for rank in range(3):
        with make(rank, 3) as batches:
            batches.load_state_dict(states)
            seen += [image for images, _ in batches for image in images]
    assert Counter(seen) == Counter(mixed.read(number) for number in _order(mixed, seed=8))


def test_it_can_be_pickled(mixed: MixedDataset) -> None:
    copy = pickle.loads(pickle.dumps(mixed))
    assert copy[45][0] == mixed[45][0]
    assert _order(copy, seed=2) == _order(mixed, seed=2)


def test_one_snapshot_may_be_two_parts_in_orders_of_their_own(faces_ref: str) -> None:
    dataset = mix([(faces_ref, 1), (faces_ref, 3)])
    assert dataset.parts[0] is dataset.parts[1]
    assert dataset.places == (COUNT, 3 * COUNT)
    order = _order(dataset)
    first, second = ([n % COUNT for n in order if n // COUNT == part] for part in (0, 1))
    assert sorted(first) == list(range(COUNT))
    assert Counter(second) == dict.fromkeys(range(COUNT), 3)
    assert first != second[:COUNT]


# --- what is read ahead -----------------------------------------------------------------------------------------------


def _is_here(settings: Settings, dataset: MixedDataset) -> bool:
    local = LocalBlocks(settings.home, settings.ram_dir)
    for part in dataset.parts:
        assert isinstance(part, SnapshotDataset)
        for row in part.plan_items(np.arange(len(part)))[:, 0].tolist():
            manifest = part.snapshot.manifest
            if not local.has(block_id(object_id(manifest.object_ref(manifest.entry(row))), 0)):
                return False
    return True


@promise("What a mix will read next is fetched from all of its parts")
def test_the_order_of_each_part_is_published(
    drawn_faces: Path, drawn_others: Path, settings: Settings, tmp_path: Path
) -> None:
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in (drawn_faces, drawn_others)]
    refs = [
        api.create_snapshot(f"{tmp_path.name}-{folder.name}", folder.as_uri(), settings=settings).ref
        for folder in folders
    ]
    dataset = mix({refs[0]: 0.7, refs[1]: 0.3})
    assert not _is_here(settings, dataset)
    order = np.array(_order(dataset))
    with publish(settings, dataset, order) as plan:
        assert plan.wait_sent()
        wait_for(lambda: _is_here(settings, dataset), 60)
        plan.advance(9)
        states = [p for p in api.connect(settings).cache_status()["plans"] if p["dataset"].startswith(tmp_path.name)]
        assert sorted((p["items"], p["position"]) for p in states) == [(57, 9), (57, 9)]


def test_a_part_is_asked_only_for_what_is_read_of_it(mixed: MixedDataset) -> None:
    samples = np.array([41, 0, 39, 52])
    first, second = mixed.plan_parts()
    rows = [part.plan_items(np.array([own])).item() for part, own in ((mixed.parts[0], 0), (mixed.parts[0], 39))]
    assert first.plan_items(samples).tolist() == [[0, 0, 0], [rows[0], 0, 1], [rows[1], 0, 1], [0, 0, 0]]
    other = mixed.parts[1].plan_items(np.array([1, 0])).ravel().tolist()
    assert second.plan_items(samples).tolist() == [[other[0], 0, 1], [0, 0, 0], [0, 0, 0], [other[1], 0, 1]]


def test_the_order_of_a_subset_of_a_mix_is_published_as_well(mixed: MixedDataset) -> None:
    sampler = EpochSampler(Subset(mixed, [50, 3, 51]), shuffle=False)
    given = iter(sampler)
    next(given)
    assert sampler._lookahead is not None
    assert sampler._lookahead.wait_sent()
    sampler.close()
