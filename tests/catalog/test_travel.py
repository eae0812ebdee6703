"""Snapshots that are pushed to a bucket, read there and pulled from it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from datacache import api
from datacache.catalog.bucket import BucketCatalog
from datacache.core.errors import (
    CatalogError,
    CatalogUnavailableError,
    CorruptManifestError,
    OtherKindError,
    SettingsError,
    SnapshotNotFoundError,
    TagExistsError,
    UsageError,
)
from datacache.manifest.model import BlobId
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.store.open import open_store
from datacache.store.urls import split_url
from tests.conformance.faults import FaultProxy
from tests.promises import promise
from tests.store.conftest import WritableRclone

VOC = """<annotation><size><width>8</width><height>6</height><depth>3</depth></size>
<object><name>mask</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>4</ymax></bndbox></object></annotation>"""


def draw(folder: Path, count: int = 3, colour: str = "red") -> None:
    from PIL import Image

    for part in ("images", "annotations"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (8, 6), colour).save(folder / "images" / f"{number}.png")
        (folder / "annotations" / f"{number}.xml").write_text(VOC)


@pytest.fixture
def faces(tmp_path: Path, settings: Settings) -> Path:
    """A data set with annotations, `faces@v1`, and what it was converted to, `faces-yolo@v1`."""
    draw(tmp_path / "faces")
    api.create_snapshot("faces", str(tmp_path / "faces"), tags=["v1"], settings=settings)
    api.convert("faces@v1", to="yolo", name="faces-yolo", tags=["v1"], settings=settings)
    return tmp_path / "faces"


@pytest.fixture
def elsewhere(settings: Settings, tmp_path: Path) -> Settings:
    """Another machine: a home in which nothing is yet."""
    home = tmp_path / "elsewhere"
    return replace(settings, home=home, catalog=f"sqlite:///{home}/catalog.db")


def contents(ref: str, settings: Settings) -> dict[str, bytes]:
    with api.open_snapshot(ref, settings) as snapshot:
        return {path: bytes(snapshot.read(path)) for path in snapshot}


def keys(place: str, settings: Settings) -> list[str]:
    store_url, prefix = split_url(place)
    with closing(open_store(store_url, settings)) as store:
        return [info.key.removeprefix(prefix) for page in store.list(prefix) for info in page]


@promise(
    "A snapshot that was pushed to a bucket has the same id, files and annotations wherever it is opened or pulled"
)
def test_what_is_pushed_is_read_from_the_bucket_and_pulled(
    place: str, faces: Path, settings: Settings, elsewhere: Settings
) -> None:
    pushed = api.push_snapshot("faces-yolo@v1", place, tags=["best"], settings=settings)
    assert 0 < pushed.moved == pushed.blobs
    there = replace(elsewhere, catalog=BucketCatalog(place, settings).url)
    assert contents("faces-yolo@best", there) == contents("faces-yolo@v1", settings)
    assert [dataset.name for dataset in api.list_datasets(there)] == ["faces-yolo"]

    pulled = api.pull_snapshot("faces-yolo@v1", place, settings=elsewhere)
    assert pulled.record.id == pushed.record.id
    assert api.pull_snapshot("faces-yolo", place, settings=elsewhere).moved == 0
    assert contents("faces-yolo@v1", elsewhere) == contents("faces-yolo@v1", settings)


def test_annotations_travel_and_are_not_read_again(
    faces: Path, settings: Settings, elsewhere: Settings, tmp_path: Path
) -> None:
    place = f"{tmp_path}/catalog"
    api.push_snapshot("faces@v1", place, settings=settings)
    faces.rename(tmp_path / "moved away")
    there = replace(elsewhere, catalog=f"file://{place}")
    api.pull_snapshot("faces@v1", place, settings=elsewhere)
    for others in (there, elsewhere):
        assert api.stats("faces@v1", settings=others).boxes == 3


@promise("Only blobs that the other catalog lacks are moved")
def test_a_new_version_moves_what_changed(faces: Path, settings: Settings, elsewhere: Settings, tmp_path: Path) -> None:
    place = f"{tmp_path}/catalog"
    first = _many("many", 30_000, changed=-1, settings=settings)
    api.push_snapshot(first, place, settings=settings)
    assert api.pull_snapshot(first, place, settings=elsewhere).moved > 3
    second = _many("many", 30_000, changed=15_000, settings=settings)
    assert api.push_snapshot(second, place, settings=settings).moved == 2  # the root and one range
    assert api.pull_snapshot(second, place, settings=elsewhere).moved == 2


def _many(name: str, count: int, *, changed: int, settings: Settings) -> str:
    from datacache.catalog.commit import commit_manifest
    from datacache.manifest.builder import ManifestBuilder
    from datacache.manifest.model import Entry, Lineage, Naming, Source

    with closing(api.open_catalog(settings)) as catalog:
        builder = ManifestBuilder([Source("s3://nowhere", "many/")], catalog.put_blobs)
        for number in range(count):
            builder.add(Entry(b"%06d.jpg" % number, 1000, 1, "changed" if number == changed else "etag"))
        lineage = Lineage("create", {"from": "s3://nowhere/many"})
        record = commit_manifest(catalog, builder, Naming(name=name), origin="s3://nowhere/many", lineage=lineage)
    return f"{record.dataset}@{record.id}"


@promise("A catalog in a bucket is read only")
@pytest.mark.parametrize(
    "change",
    [
        lambda settings: api.tag_snapshot("faces@v1", "v2", settings=settings),
        lambda settings: api.untag_snapshot("faces", "v1", settings=settings),
        lambda settings: api.remove_snapshot("faces@v1", settings=settings),
        lambda settings: api.create_snapshot("faces", str(settings.home), settings=settings),
        lambda settings: api.convert("faces@v1", to="yolo", name="new", settings=settings),
        lambda settings: api.collect_garbage(settings=settings),
        lambda settings: api.pull_snapshot("faces@v1", settings.catalog, settings=settings),
    ],
)
def test_a_catalog_in_a_bucket_takes_no_versions(
    change: Callable[[Settings], object], faces: Path, settings: Settings, elsewhere: Settings, tmp_path: Path
) -> None:
    place = f"file://{tmp_path}/catalog"
    api.push_snapshot("faces@v1", place, settings=settings)
    before = keys(place, settings)
    with pytest.raises(UsageError, match="can only be read") as caught:
        change(replace(elsewhere, catalog=place))
    assert "dsctl snapshot push" in caught.value.hint
    assert keys(place, settings) == before


def test_a_task_queue_needs_a_catalog_that_can_be_written(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can only be read"):
        api.list_tasks(replace(settings, catalog=f"file://{tmp_path}/catalog"))


def test_annotations_that_were_not_pushed_are_kept_by_the_reader(
    faces: Path, settings: Settings, elsewhere: Settings, tmp_path: Path
) -> None:
    place = f"file://{tmp_path}/catalog"
    api.push_snapshot("faces-yolo@v1", place, settings=settings)
    there = replace(elsewhere, catalog=place)
    before = keys(place, settings)
    assert api.query("faces-yolo@v1", labels=["mask"], settings=there)
    with closing(api.open_catalog(there)) as catalog:
        assert catalog.derived_names(api.resolve(catalog, "faces-yolo").id)
    assert keys(place, settings) == before


@promise("A push that is killed is run again, and nothing half of it can be seen")
def test_a_push_that_was_killed_goes_on(
    catalog_rclone: WritableRclone, settings: Settings, elsewhere: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in catalog_rclone.env().items():
        monkeypatch.setenv(name, value)
    catalog_rclone.make_bucket(bucket := f"killed-{uuid.uuid4().hex[:12]}")
    place, ref = f"s3://{bucket}/catalog", _many("many", 2_000, changed=-1, settings=settings)
    id = ref.partition("@")[2]
    code = "import sys; from datacache import api; api.push_snapshot(sys.argv[1], sys.argv[2])"
    with FaultProxy(catalog_rclone.endpoint) as proxy:
        environment = os.environ | {"AWS_ENDPOINT_URL": proxy.url}
        for puts in range(1, 5):
            proxy.requests.clear()
            pushing = subprocess.Popen([sys.executable, "-c", code, ref, place], env=environment)
            while sum(each.startswith("PUT") for each in proxy.requests) < puts and pushing.poll() is None:
                time.sleep(0.001)
            pushing.kill()
            pushing.wait()
            with suppress(CatalogError), closing(api.open_catalog(replace(elsewhere, catalog=place))) as catalog:
                assert catalog.dataset("many") is None or len(Manifest.open(id, catalog.get_blobs).root.ranges) > 1
    api.push_snapshot(ref, place, settings=settings)
    assert api.pull_snapshot(ref, place, settings=elsewhere).blobs > 3
    assert len([key for key in keys(place, settings) if key.startswith("bundles/")]) == 2


@promise("Blobs in a bucket that have other bytes than their ids say are an error, and are not taken over")
def test_other_bytes_in_the_bucket_are_no_snapshot(
    faces: Path, settings: Settings, elsewhere: Settings, tmp_path: Path
) -> None:
    place = tmp_path / "catalog"
    api.push_snapshot("faces-yolo@v1", str(place), settings=settings)
    (bundle,) = [file for file in (place / "bundles").glob("*/*") if file.suffix != ".ids"]
    whole = bundle.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        bundle.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptManifestError):
            api.pull_snapshot("faces-yolo@v1", str(place), settings=elsewhere)
    bundle.write_bytes(bytes(len(whole)))
    with pytest.raises(CorruptManifestError):
        contents("faces-yolo@v1", replace(elsewhere, catalog=f"file://{place}"))
    bundle.unlink()
    with pytest.raises(CorruptManifestError, match="missing from"):
        api.pull_snapshot("faces-yolo@v1", str(place), settings=elsewhere)
    for file in (place / "index").iterdir():
        file.write_bytes(b"no index")
    with pytest.raises(CorruptManifestError, match="cannot be read"):
        api.pull_snapshot("faces-yolo@v1", str(place), settings=elsewhere)
    assert api.list_datasets(elsewhere) == []


def test_a_record_in_the_place_of_another_is_an_error(faces: Path, settings: Settings, tmp_path: Path) -> None:
    place = tmp_path / "catalog"
    record = api.push_snapshot("faces@v1", str(place), settings=settings).record
    file = place / "datasets/faces/@snapshots" / f"{record.id}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dataset": "masks"}))
    with closing(BucketCatalog(str(place), settings)) as catalog, pytest.raises(CatalogError, match="in the place of"):
        catalog.snapshot("faces", record.id)


def test_names_that_are_taken_there_stay(faces: Path, settings: Settings, elsewhere: Settings, tmp_path: Path) -> None:
    place = f"{tmp_path}/catalog"
    api.push_snapshot("faces@v1", place, settings=settings)
    draw(faces, 4)
    second = api.create_snapshot("faces", str(faces), settings=settings)
    with pytest.raises(TagExistsError):
        api.push_snapshot("faces", place, tags=["v1"], settings=settings)
    moved = api.push_snapshot("faces", place, tags=["v1"], move_tags=True, settings=settings)
    with closing(BucketCatalog(place, settings)) as catalog:
        dataset = catalog.dataset("faces")
        assert dataset is not None
        assert (dataset.latest, dataset.tags) == (second.id, {"v1": moved.record.id})
        assert [record.files for record in catalog.snapshots("faces")] == [6, 8]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("x")
    api.create_snapshot("faces", str(tmp_path / "other"), settings=elsewhere)
    with pytest.raises(OtherKindError, match="--replace"):
        api.pull_snapshot("faces@v1", place, settings=elsewhere)
    assert api.pull_snapshot("faces@v1", place, replace=True, settings=elsewhere).record.files == 8


def test_where_no_catalog_is_the_error_says_how_to_make_one(settings: Settings, tmp_path: Path) -> None:
    nowhere = replace(settings, catalog=f"file://{tmp_path}/nothing")
    with pytest.raises(CatalogError, match="no catalog at") as caught:
        api.list_datasets(nowhere)
    assert "dsctl snapshot push" in caught.value.hint
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "catalog.json").write_text('{"version": 2}')
    with pytest.raises(CatalogError, match="of version 2"):
        api.list_datasets(nowhere)
    with pytest.raises(UsageError):
        api.push_snapshot("faces@v1", "s3://key:secret@bucket/x", settings=settings)


def test_a_catalog_in_a_bucket_is_used_from_what_was_read_while_the_store_is_away(
    place: str, faces: Path, settings: Settings, elsewhere: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not place.startswith("s3://"):
        pytest.skip("a folder is not away")
    api.push_snapshot("faces@v1", place, settings=settings)
    with FaultProxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        there = replace(elsewhere, catalog=place.rstrip("/"), store_timeout_s=1.0)
        with api.open_snapshot("faces@v1", there) as snapshot:
            known = list(snapshot)
        proxy.refuse()
        with api.open_snapshot("faces@v1", there) as snapshot:
            assert list(snapshot) == known
        with pytest.raises(CatalogUnavailableError, match="cannot be reached"):
            api.list_datasets(there)


def test_a_catalog_in_a_bucket_is_pickled(faces: Path, settings: Settings, elsewhere: Settings, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/catalog"
    api.push_snapshot("faces@v1", place, settings=settings)
    with closing(api.open_catalog(replace(elsewhere, catalog=place))) as catalog:
        again = pickle.loads(pickle.dumps(catalog))
        assert again.datasets() == catalog.datasets()
        wanted = BlobId(bytes(16))
        assert again.has_blobs([wanted]) == set()
        again.close()


# --- lock files -----------------------------------------------------------------------------------------------------


@promise("A lock file names one snapshot, wherever its tag moves")
def test_a_lock_file_is_a_reference(faces: Path, settings: Settings, tmp_path: Path) -> None:
    lock = tmp_path / "data.lock"
    lock.write_text(api.lock_snapshot("faces@v1", settings=settings).encode())
    before = contents("faces@v1", settings)
    draw(faces, 5, "blue")
    api.create_snapshot("faces", str(faces), tags=["v1"], move_tags=True, settings=settings)
    with api.open_snapshot(str(lock), settings) as snapshot:
        assert set(snapshot) == before.keys()


def test_a_lock_file_knows_a_catalog_that_has_the_snapshot(
    faces: Path, settings: Settings, elsewhere: Settings, tmp_path: Path
) -> None:
    place, lock = f"{tmp_path}/catalog", tmp_path / "data.lock"
    with pytest.raises(CatalogError):
        api.lock_snapshot("faces-yolo@v1", catalog=place, settings=settings)
    api.push_snapshot("faces-yolo@v1", place, settings=settings)
    lock.write_text(api.lock_snapshot("faces-yolo@v1", catalog=place, settings=settings).encode())
    assert contents(str(lock), elsewhere) == contents("faces-yolo@v1", settings)
    with api.open_snapshot(str(lock), elsewhere) as snapshot:
        again = pickle.loads(pickle.dumps(snapshot))
        assert list(again) == list(snapshot)
        again.close()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "null", "[" * 100_000, '{"datacache_lock": 2, "id": "x"}'),
        '{"datacache_lock": 1, "dataset": "a/../b", "id": "' + "0" * 32 + '"}',
        '{"datacache_lock": 1, "dataset": "a", "id": 7, "ref": "", "files": 1}',
        '{"datacache_lock": 1, "dataset": "a", "id": "' + "0" * 32 + '", "ref": "a", "files": Infinity, "bytes": 1}',
    ],
)
def test_what_is_no_lock_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "data.lock"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        api.find_lock(str(file))
    assert caught.value.hint


def test_a_dataset_may_be_named_like_a_lock_file(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "a.txt").write_text("a")
    api.create_snapshot("data.lock", str(tmp_path / "some"), settings=settings)
    assert api.find_lock("data.lock") is None
    assert contents("data.lock", settings) == {"a.txt": b"a"}


def test_a_lock_file_that_is_not_there_is_named(tmp_path: Path, settings: Settings) -> None:
    for name in ("./missing.lock", f"{tmp_path}/missing.lock", "../some of mine.lock"):
        with pytest.raises(UsageError, match="there is no lock file") as caught:
            api.open_snapshot(name, settings)
        assert caught.value.hint == f"Make one: dsctl lock NAME@TAG > {name}"
    for reference in ("mask@v1/poetry.lock", "s3://bucket/data.lock", "lab/data.lock"):
        assert api.find_lock(reference) is None
    with pytest.raises(SnapshotNotFoundError) as unknown:
        api.open_snapshot("missing.lock", settings)
    assert unknown.value.hint.startswith("No lock file of that name is here, either.")
