"""Imports from JSON lines whose objects an engine's processes fetch: what an import here gives."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datacache import api
from datacache.core.engine import pickled
from datacache.core.errors import DatacacheError, ImportFailedError, StoreAccessError
from datacache.executors.queue import trusted
from datacache.imports import fetching, jsonl
from datacache.imports.failures import Failure
from datacache.imports.fetching import FetchRules, LineFetcher
from datacache.imports.jsonl import JsonlProgress
from datacache.imports.lines import Line
from datacache.imports.places import WEB
from datacache.settings import Settings
from tests.executors.trusting import spawned_pool
from tests.imports.conftest import Request, WebServer, files_of
from tests.promises import promise
from tests.servers import DaskCluster, RcloneS3

WriteLines = Callable[..., Path]


@pytest.fixture
def settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("DATACACHE_STORE_TIMEOUT_S", "1")  # elsewhere, too
    return replace(settings, store_timeout_s=1.0, concurrency=8)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Iterator[Executor]:
    with spawned_pool(tmp_path / "elsewhere", monkeypatch) as pool:
        yield pool


def many_lines(web: WebServer, count: int = 200) -> list[dict[str, Any]]:
    return [
        {"url": web.add(f"/{n}", b"image %d" % n) + "?signed" * (n % 3), "path": f"{n % 7}/{n}.jpg", "label": n}
        for n in range(count)
    ]


class _BrokenError(Exception):
    pass


class OutOfTurn(Executor):
    """Does parcels at once, but for those that are `lost`, by their number."""

    _max_workers = 4

    def __init__(self, *lost: int) -> None:
        self.lost, self.sent = lost, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.sent += 1
        if self.sent in self.lost:
            future.set_exception(_BrokenError())
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@promise("An import of JSON lines gives the same snapshot, and names the same failures, wherever they are fetched")
def test_an_import_elsewhere_gives_the_same_snapshot_and_names_the_same_failures(
    rclone_s3: RcloneS3, web: WebServer, tmp_path: Path, write_lines: WriteLines, settings: Settings,
    elsewhere: Executor, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    (rclone_s3.make_bucket("jsonl-engine") / "b.jpg").write_bytes(b"from s3")
    (tmp_path / "c.jpg").write_bytes(b"from here")

    def busy(request: Request) -> None:
        request.answer(b"", status=503)

    file = write_lines(
        *many_lines(web),
        {"url": "s3://jsonl-engine/b.jpg", "label": "s3"},
        {"url": "s3://jsonl-engine/gone.jpg"},
        {"url": "c.jpg"},
        {"url": web.add("/large", b"l" * 5000)},
        {"url": web.url + "/gone"},
        {"url": web.on("/busy", busy)},
        {"url": "c.jpg", "path": "1/1.jpg"},
        b"no JSON",
    )
    for copy in (False, True):
        made, failed = [], []
        for how in ({}, {"on": elsewhere}):
            found: list[Failure] = []
            imported = api.import_jsonl(
                f"faces-{len(made)}-{copy}", file, skip_failed=True, max_object_bytes=4000, copy=copy,
                settings=settings, on_failure=found.append, **how,
            )  # fmt: skip
            made.append((imported.record.id, imported.left_out, imported.record.warnings))
            failed.append(found)
        assert made[0] == made[1]
        assert failed[0] == failed[1]
        assert [failure.code for failure in failed[1]] == [
            "not-found", "too-large", "not-found", "unavailable", "duplicate", "json"
        ]  # fmt: skip
    assert not list((settings.home / "jobs").iterdir())
    assert not list((settings.home / "imports").iterdir())


def test_a_second_start_fetches_what_failed_and_what_had_not_come_back(
    web: WebServer, write_lines: WriteLines, settings: Settings, elsewhere: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_LINES_OF_A_TASK", 10)
    lines = many_lines(web)
    expected = api.import_jsonl("here", write_lines(*lines), settings=settings).record.id
    file = write_lines(*lines, name="again.jsonl")
    missing = [f"/{n}" for n in range(0, 200, 20)]
    kept = {path: web.files.pop(path) for path in missing}

    def stop(progress: JsonlProgress) -> None:
        if progress.done == 100:
            raise _BrokenError

    web.asked.clear()
    with pytest.raises(_BrokenError):
        api.import_jsonl("faces", file, on=elsewhere, progress=stop, settings=settings)
    with pytest.raises(ImportFailedError) as failed:
        api.import_jsonl("faces", file, on=elsewhere, settings=settings)
    assert failed.value.failures == len(missing)
    web.files |= kept
    web.asked.clear()
    made = api.import_jsonl("faces", file, on=elsewhere, settings=settings)
    assert made.record.id == expected
    assert made.resumed == 200 - len(missing)
    assert web.asked == dict.fromkeys(missing, 1)


def test_results_that_came_out_of_turn_are_kept_for_a_second_start(
    web: WebServer, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_LINES_OF_A_TASK", 10)
    file = write_lines(*many_lines(web, 60))

    missing = web.files.pop("/0")  # of the first task, whose other lines are noted
    with pytest.raises(DatacacheError, match="lost"):
        api.import_jsonl("faces", file, on=OutOfTurn(2, *range(7, 99)), settings=settings)
    came = sum(web.asked.values())
    assert 0 < came < 60
    web.files["/0"] = missing
    made = api.import_jsonl("faces", file, on=OutOfTurn(), settings=settings)
    assert made.resumed == came - 1
    assert web.asked == Counter(f"/{n}" for n in range(60)) + Counter(["/0"])

    monkeypatch.setattr(fetching, "REFRESH_AFTER_S", 0)
    with pytest.raises(DatacacheError, match="lost"):
        api.import_jsonl("other", file, on=OutOfTurn(1, *range(7, 99)), settings=settings)
    shutil.rmtree(settings.home / "objects")  # as a collection may, of what is so old
    api.import_jsonl("other", file, on=OutOfTurn(), settings=settings)
    assert not list(api.verify_snapshot("other", settings=settings))


@promise("Processes elsewhere go to private networks only where their own setting names these")
def test_a_process_elsewhere_goes_to_private_networks_only_where_both_sides_name_them(
    web: WebServer, write_lines: WriteLines, settings: Settings, elsewhere: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines({"url": web.add("/1.jpg", b"1")})
    found: list[Failure] = []

    def refused(**how: Any) -> str:
        found.clear()
        with pytest.raises(ImportFailedError):
            api.import_jsonl("faces", file, on=elsewhere, on_failure=found.append, **how)
        assert [failure.code for failure in found] == ["access"]
        return found[0].reason

    monkeypatch.setenv("DATACACHE_ALLOW_NETWORK", "10.0.0.0/8")  # that of the processes, which begin now
    assert "and DATACACHE_ALLOW_NETWORK of the process" in refused(settings=settings, allow_network=["127.0.0.1"])
    assert not web.asked


def test_a_process_that_may_go_there_does_not_for_a_list_that_may_not(
    web: WebServer, write_lines: WriteLines, settings: Settings, elsewhere: Executor
) -> None:
    file = write_lines({"url": web.add("/1.jpg", b"1")})
    closed = replace(settings, allow_network=())
    with pytest.raises(ImportFailedError):
        api.import_jsonl("faces", file, on=elsewhere, settings=closed)
    assert not web.asked
    host = web.url.removeprefix("http://")
    api.import_jsonl("faces", file, on=elsewhere, settings=closed, allow_network=[host])
    assert files_of(settings) == {"1.jpg": b"1"}


@promise("Processes elsewhere go to private networks only where their own setting names these")
def test_a_line_that_somebody_has_put_into_the_queue_leads_nowhere_that_the_worker_has_closed(
    web: WebServer, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(b"of the worker's machine")
    monkeypatch.setenv("DATACACHE_ALLOW_NETWORK", "10.0.0.0/8")
    monkeypatch.setenv("DATACACHE_SOURCES", "s3://open/")
    host = web.url.removeprefix("http://")
    rules = FetchRules(
        content="", copy=False, max_object_bytes=1000, object_timeout_s=10.0, concurrency=1,
        hosts=("0.0.0.0/0", host), numbers={}, copies_source=0,
    )  # fmt: skip
    worker = trusted.loads(pickled(LineFetcher(settings, None, rules)))
    lines = [
        Line(b"web", 1, web.add("/1.jpg", b"1"), WEB, "", b""),
        Line(b"store", 2, "", web.url, "1.jpg", b""),
        Line(b"ftp", 3, "", f"ftp://{host}", "1.jpg", b""),
        Line(b"file", 4, "", "file://", f"{tmp_path}/secret"[1:], b""),
        Line(b"file", 5, "", "local://x", "secret", b""),
        Line(b"bucket", 6, "", "s3://closed", "x", b""),
    ]
    with closing(worker):
        found = [line.outcome for line in trusted.loads(pickled(worker.work([(line, None) for line in lines]))).lines]
    assert [failure.code for failure in found] == ["access", "url", "access", "access", "url", "access"]
    assert ["DATACACHE_ALLOW_NETWORK" in failure.reason for failure in found] == [True, False, True] + [False] * 3
    assert not web.asked


def test_two_lists_are_fetched_from_one_home_at_the_same_time(
    web: WebServer, tmp_path: Path, write_lines: WriteLines, settings: Settings
) -> None:
    first, second = write_lines(*many_lines(web, 3)), write_lines(*many_lines(web, 4), name="second.jsonl")
    made: list[int] = []

    def meanwhile(_progress: JsonlProgress) -> None:
        if not made:
            made.append(0)
            made.append(api.import_jsonl("second", second, on=OutOfTurn(), settings=settings).lines)

    api.import_jsonl("first", first, on=OutOfTurn(), progress=meanwhile, settings=settings)
    assert made == [0, 4]


def test_storage_that_fails_elsewhere_ends_the_import_with_its_own_error(
    rclone_s3: RcloneS3, web: WebServer, write_lines: WriteLines, settings: Settings, elsewhere: Executor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    file = write_lines(*many_lines(web, 20))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreAccessError):
        api.import_jsonl("faces", file, objects="s3://nobody/x", on=elsewhere, settings=settings)


def test_dask_fetches_what_an_import_here_does(
    web: WebServer, write_lines: WriteLines, settings: Settings, tmp_path: Path
) -> None:
    file = write_lines(*many_lines(web))
    expected = api.import_jsonl("here", file, settings=settings).record.id
    web.asked.clear()
    with DaskCluster(tmp_path / "dask", workers=2) as dask:
        assert api.import_jsonl("there", file, on=dask.url, settings=settings).record.id == expected
    assert set(web.asked) == {f"/{n}" for n in range(200)}
