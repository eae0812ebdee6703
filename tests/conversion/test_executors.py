"""Work on an executor gives what processes of this machine give."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path

import pytest

from datacache import api
from datacache.conversion import pipeline
from datacache.core import engine
from datacache.core.errors import SettingsError, UsageError
from datacache.settings import Settings
from tests.executors.trusting import spawned_pool
from tests.promises import promise


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Iterator[Executor]:
    """Processes that have nothing of this one, and another home."""
    with spawned_pool(tmp_path / "elsewhere", monkeypatch) as pool:
        yield pool


@promise("A conversion gives the same snapshot wherever its tasks are done")
def test_a_conversion_elsewhere_gives_the_same_snapshot(
    settings: Settings, faces: Path, make: Callable[[Path], str], elsewhere: Executor
) -> None:
    ref = make(faces)

    def convert(name: str, **how: object) -> api.Conversion:
        return api.convert(
            ref, to="yolo", name=name, split="train=0.5,val=0.5", resize="32x32", settings=settings, **how
        )

    here, there = convert("here", processes=1), convert("there", on=elsewhere)
    assert there.record.id == here.record.id
    assert there.report.as_json() == here.report.as_json()


def test_every_command_on_an_engine_gives_what_it_gives_here(
    settings: Settings, faces: Path, make: Callable[[Path], str], elsewhere: Executor, tmp_path: Path
) -> None:
    made = {}
    for where, how in (("here", {"processes": 1}), ("there", {"on": elsewhere})):
        ref = make(faces)  # annotations are read anew
        with api.open_annotations(ref, settings=settings, decode=where == "here", **how) as (_, table):
            images = [row.path for row in table.rows()]
        folder = tmp_path / where
        sharded = api.shard(ref, to=str(folder), max_size_bytes=20_000, shuffle=True, settings=settings, **how)
        assert len(sharded.built.set.shards) > 3
        once, repeats = api.dedupe(ref, name=f"once-{where}", similar=8, settings=settings, **how)
        assert repeats
        merged = api.merge([ref, f"once-{where}"], name=f"merged-{where}", settings=settings, **how)
        mended = api.fix_problems(ref, name=f"mended-{where}", settings=settings, **how)
        made[where] = (
            {file.name: file.read_bytes() for file in folder.iterdir()},
            [once.id, merged.record.id, mended.record.id],
            api.subset(ref, images[:5], name=f"few-{where}", settings=settings, **how).id,
            api.stats(ref, settings=settings, on=how.get("on")).as_json(),
            list(api.problems(ref, settings=settings, **how)),
        )
    assert made["here"] == made["there"]


def test_shards_that_were_written_elsewhere_and_are_not_here_make_no_set(
    settings: Settings, faces: Path, make: Callable[[Path], str], elsewhere: Executor, tmp_path: Path
) -> None:
    class Losing:
        _max_workers = 2

        def submit(self, *call: object) -> Future[bytes]:
            done = elsewhere.submit(*call)  # type: ignore[arg-type]
            done.result()
            (tmp_path / "shards" / "shard-000001.tar").unlink(missing_ok=True)
            return done

    ref = make(faces)
    with pytest.raises(UsageError, match=r"1 shard of \d+ were written elsewhere"):
        api.shard(ref, to=str(tmp_path / "shards"), max_size_bytes=20_000, on=Losing(), settings=settings)
    whole = api.shard(ref, to=str(tmp_path / "shards"), max_size_bytes=20_000, on=elsewhere, settings=settings)
    assert whole.built.made == 1
    assert not api.verify_shards(str(tmp_path / "shards"), settings=settings)[1]


def test_images_that_are_gone_when_it_is_started_again_are_made_again(
    settings: Settings, faces: Path, make: Callable[[Path], str], elsewhere: Executor
) -> None:
    ref = make(faces)
    how = {"to": "yolo", "resize": "16x16", "settings": settings}
    expected = api.convert(ref, name="expected", processes=1, **how).record.id
    stored = settings.home / "objects"
    shutil.rmtree(stored)

    class BrokenError(Exception):
        pass

    def fail(what: str, done: int, _total: int) -> None:
        if done > 20 and "writing" in what:
            raise BrokenError

    with pytest.raises(BrokenError):
        api.convert(ref, name="again", on=elsewhere, progress=fail, **how)
    assert list((settings.home / "jobs").iterdir())
    for file in sorted(stored.rglob("*-*"))[::2]:
        file.unlink()
    assert api.convert(ref, name="again", on=elsewhere, **how).record.id == expected
    assert not list(api.verify_snapshot("again", read=True, settings=settings))


def test_verifying_elsewhere_finds_what_verifying_here_does(
    settings: Settings, faces: Path, make: Callable[[Path], str], elsewhere: Executor
) -> None:
    ref = make(faces)
    small = api.convert(ref, to="yolo", resize="16x16", name="small", settings=settings, processes=1).record.ref
    images = sorted((settings.home / "objects").rglob("*-*"))
    images[3].unlink()
    images[5].write_bytes(bytes(images[5].stat().st_size))
    (faces / "JPEGImages" / "000001.jpg").write_bytes(b"other")
    for each, kinds in ((ref, ["changed"]), (small, ["changed", "missing"])):
        counts: dict[bool, list[int]] = {True: [], False: []}
        found = [
            sorted(
                api.verify_snapshot(
                    each, read=True, settings=settings, unchecked=counts[where is None].append, on=where
                )
            )
            for where in (None, elsewhere)
        ]
        assert found[0] == found[1]
        assert [problem.kind for problem in found[0]] == kinds
        assert counts[True] == counts[False]
    with pytest.raises(UsageError, match="an engine reads objects"):
        list(api.verify_snapshot(ref, settings=settings, on=elsewhere))


def test_a_password_of_the_catalog_does_not_travel(settings: Settings, elsewhere: Executor) -> None:
    secret = replace(settings, catalog="mongodb://user:secret@nowhere/catalog")
    travelled = engine.pickled(secret)
    assert b"secret" not in travelled
    with pytest.raises(SettingsError, match="has a password, which is not sent"):
        elsewhere.submit(pickle.loads, travelled).result()


def test_new_images_without_a_place_are_refused_before_annotations_are_read(
    settings: Settings, faces: Path, make: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = make(faces)
    monkeypatch.setattr(pipeline, "Inputs", lambda *_, **__: pytest.fail("annotations were read"))
    with pytest.raises(SettingsError, match="it is not set where"):
        api.convert(ref, to="yolo", name="none", resize="32x24", settings=replace(settings, objects=""))


def test_an_engine_that_cannot_be_had_is_named(settings: Settings, faces: Path, make: Callable[[Path], str]) -> None:
    ref = make(faces)
    for on in ("spark://host:1", "dask://", "nonsense", ""):
        with pytest.raises(UsageError, match=f"{on or repr(on)} is no engine"):
            api.convert(ref, to="yolo", name="none", on=on, settings=settings)
    with pytest.raises(UsageError, match="has processes of its own"):
        api.convert(ref, to="yolo", name="none", on="dask://localhost:1", processes=3, settings=settings)
