"""Imports from JSON lines, on a real web server, real S3 and the file system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datacache import api
from datacache.core.errors import (
    ImportFailedError,
    SettingsError,
    StoreAccessError,
    StoreUnavailableError,
    TagExistsError,
    UsageError,
)
from datacache.imports import fetching, jsonl
from datacache.imports.failures import Failure
from datacache.settings import Settings
from tests.conformance.faults import Answer, Fault, FaultProxy
from tests.imports.conftest import Request, WebServer, files_of
from tests.promises import promise
from tests.servers import RcloneS3

ROOT = Path(__file__).resolve().parents[2]
WriteLines = Callable[..., Path]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return replace(settings, store_timeout_s=1.0, concurrency=8)


def failures_of(file: Path, settings: Settings, **options: Any) -> list[Failure]:
    """Those of an import that has to fail, and commit nothing."""
    found: list[Failure] = []
    with pytest.raises(ImportFailedError) as failed:
        api.import_jsonl("faces", file, settings=settings, on_failure=found.append, **options)
    assert failed.value.failures == len(found)
    catalog = api.open_catalog(settings)
    assert catalog.datasets() == []
    catalog.close()
    return found


def test_web_objects_are_copied_and_store_objects_referenced(
    web: WebServer, rclone_s3: RcloneS3, tmp_path: Path, write_lines: WriteLines, settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = rclone_s3.make_bucket("jsonl-mixed")
    (bucket / "b.jpg").write_bytes(b"from s3")
    (tmp_path / "c.jpg").write_bytes(b"from here")
    file = write_lines(
        {"url": web.add("/x/a b.jpg", b"from the web" * 10_000).replace(" ", "%20"), "path": "web/a.jpg"},
        {"url": "s3://jsonl-mixed/b.jpg", "path": "s3/b.jpg"},
        {"url": "c.jpg"},
        {"url": (tmp_path / "c.jpg").as_uri(), "path": "d.jpg"},
        {"url": web.add("/empty", b"")},
    )
    made = api.import_jsonl("faces", file, settings=settings, tags=["v1"])
    assert (made.lines, made.left_out, made.resumed) == (5, 0, 0)
    expected = {
        "web/a.jpg": b"from the web" * 10_000,
        "s3/b.jpg": b"from s3",
        "c.jpg": b"from here",
        "d.jpg": b"from here",
        "empty": b"",
    }
    assert files_of(settings, "faces@v1") == expected
    with api.open_snapshot("faces", settings) as opened:
        assert {path: opened.read(path) for path in opened.paths()} == expected
    web.close()
    (bucket / "b.jpg").unlink()
    problems = list(api.verify_snapshot("faces", settings=settings))
    assert [problem.path for problem in problems] == [b"s3/b.jpg"]  # the only one that was there and is gone


def test_pinned_copies_outlive_their_origin_and_are_no_change(
    rclone_s3: RcloneS3, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = rclone_s3.make_bucket("jsonl-pin")
    rclone_s3.make_bucket("jsonl-copies")
    data = os.urandom(9 << 20)  # more than two parts
    (bucket / "a.jpg").write_bytes(data)
    (bucket / "b.jpg").write_bytes(b"b")
    file = write_lines({"url": "s3://jsonl-pin/a.jpg"}, {"url": "s3://jsonl-pin/b.jpg"})
    named = api.import_jsonl("faces", file, settings=settings)
    pinned = api.import_jsonl("faces", file, settings=settings, pin=True, objects="s3://jsonl-copies/x")
    assert list(api.diff_snapshots(named.record.ref, pinned.record.ref, settings=settings)) == []
    for path in bucket.iterdir():
        path.unlink()
    assert files_of(settings) == {"a.jpg": data, "b.jpg": b"b"}
    assert pinned.record.lineage is not None
    assert pinned.record.lineage.parameters["objects"].startswith("s3://jsonl-copies/x/")


def test_other_fields_are_in_metadata_sorted_by_path(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    url = web.add("/1.jpg", b"1")
    file = write_lines(
        {"url": url, "path": "z.jpg", "label": ["a", "b"]},
        {"url": url, "path": "a.jpg", "label": "猫", "width": 5.5, "who": {"x": None}},
        {"url": url, "path": "m.jpg"},
    )
    api.import_jsonl("faces", file, settings=settings)
    lines = files_of(settings)["metadata.jsonl"].decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"file_name": "a.jpg", "label": "猫", "width": 5.5, "who": {"x": None}},
        {"file_name": "m.jpg"},
        {"file_name": "z.jpg", "label": ["a", "b"]},
    ]
    assert list(json.loads(lines[0])) == ["file_name", "label", "width", "who"]


def test_without_other_fields_there_is_no_metadata(web: WebServer, write_lines: WriteLines, settings: Settings) -> None:
    api.import_jsonl("faces", write_lines({"url": web.add("/1.jpg", b"1")}), settings=settings)
    assert list(files_of(settings)) == ["1.jpg"]


@promise("Two lines never go to one path")
def test_metadata_never_takes_the_place_of_a_file(web: WebServer, write_lines: WriteLines, settings: Settings) -> None:
    url = web.add("/metadata.jsonl", b"data")
    for path in ("metadata.jsonl", "metadata.jsonl/x"):
        file = write_lines({"url": url, "path": path}, {"url": url, "path": "b", "label": "x"})
        with pytest.raises(UsageError, match=r"line 1 goes to metadata\.jsonl"):
            api.import_jsonl("faces", file, settings=settings)
    assert web.asked.total() == 0
    api.import_jsonl("faces", write_lines({"url": url}), settings=settings)
    assert files_of(settings) == {"metadata.jsonl": b"data"}


def test_large_metadata_is_stored_as_an_object(web: WebServer, write_lines: WriteLines, settings: Settings) -> None:
    url = web.add("/1.jpg", b"1")
    file = write_lines(*({"url": url, "path": f"{n}", "text": "x" * 100_000} for n in range(100)))
    api.import_jsonl("faces", file, settings=settings)
    assert len(files_of(settings)["metadata.jsonl"].splitlines()) == 100
    shared = replace(settings, objects="", home=settings.home / "other")
    image = file.parent / "1.jpg"
    image.write_bytes(b"1")
    for text, digits, count in (("x" * 100_000, 30, 100), ("", 240, 40_000)):
        named = write_lines(*({"url": str(image), "path": f"{n:0{digits}}", "t": text} for n in range(count)))
        with pytest.raises(SettingsError, match="new objects"):
            api.import_jsonl("faces", named, settings=shared, progress=lambda _: pytest.fail("it has begun"))
    few = write_lines(*({"url": str(image), "path": f"{n}", "t": "x" * 100_000} for n in range(70)))
    api.import_jsonl("faces", few, settings=shared)
    assert len(files_of(shared)["metadata.jsonl"].splitlines()) == 70


@promise("The same lines, in any order, and the same export give the same snapshot")
def test_the_same_lines_give_the_same_snapshot_in_any_order(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    lines = [{"url": web.add(f"/{n}.jpg", b"%d" % n), "label": f"l{n}"} for n in range(50)]
    first = api.import_jsonl("faces", write_lines(*lines), settings=settings)
    again = api.import_jsonl("faces", write_lines(*lines, name="other.gz", compress=True), settings=settings)
    back = api.import_jsonl("faces", write_lines(*reversed(lines)), settings=settings)
    assert first.record == again.record == back.record
    web.add("/7.jpg", b"changed")
    assert api.import_jsonl("faces", write_lines(*lines), settings=settings).record.id != first.record.id


@promise("Two lines never go to one path")
def test_two_lines_with_one_path_fail_and_name_each_other(
    web: WebServer, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.imports.lines._LINES_IN_MEMORY", 2)  # runs on disk
    url = web.add("/1.jpg", b"1")
    file = write_lines({"url": url}, {"url": url, "path": "b"}, {"url": url}, {"url": url, "path": "a"}, {"url": url})
    found = failures_of(file, settings)
    assert [(f.line, f.code, f.path) for f in found] == [(3, "duplicate", "1.jpg"), (5, "duplicate", "1.jpg")]
    assert all("line 1 " in f.reason for f in found)
    api.import_jsonl("faces", file, settings=settings, skip_failed=True)
    assert list(files_of(settings)) == ["1.jpg", "a", "b"]


def _slow(request: Request) -> None:
    """A byte now and then, as long as the client listens."""
    request.send_response_only(200)
    request.send_header("Content-Length", "900")
    request.end_headers()
    while not request.web.closing.wait(0.02):
        request.wfile.write(b"x")


def _endless_header(request: Request) -> None:
    """A header of which a byte comes now and then, as long as the client listens."""
    request.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: ")
    while not request.web.closing.wait(0.02):
        request.wfile.write(b"x")


def _redirect(to: str, status: int = 302) -> Callable[[Request], None]:
    return lambda request: request.answer(b"", status=status, Location=to)


@promise("What a web server sends is whole, within a size and a time, or a failure")
@promise("An import reports every failure, and commits nothing unless they are to be left out (`--skip-failed`)")
def test_every_line_is_tried_and_every_failure_is_reported(
    web: WebServer, tmp_path: Path, write_lines: WriteLines, settings: Settings
) -> None:
    good = web.add("/good.jpg", b"good")
    changing = tmp_path / "changing.jpg"
    changing.write_bytes(b"x")
    web.on("/denied", lambda r: r.answer(b"", status=403))
    web.on("/gone", lambda r: r.answer(b"", status=410))
    web.on("/broken", lambda r: r.answer(b"oops", status=500))
    web.on("/teapot", lambda r: r.answer(b"", status=418))
    web.on("/nothing", lambda r: r.answer(b"", status=204))
    web.on("/short", lambda r: r.answer(b"12345", length=10))
    web.on("/cut", lambda r: r.chunks(b"12345", end=False))
    web.on("/drip", _slow)
    web.on("/large", lambda r: r.answer(b"", length=2000))
    web.on("/endless", lambda r: r.chunks(*([b"x" * 600] * 3)))
    web.on("/circle", _redirect("/circle"))
    web.on("/file", _redirect(f"file://{changing}"))
    web.on("/nowhere", _redirect(""))
    web.on("/page.jpg", lambda r: r.answer(b"\n<!DOCTYPE html><p>Sign in", Content_Type="text/html; charset=utf-8"))
    web.on("/zstd", lambda r: r.answer(b"x", Content_Encoding="zstd"))
    rows: list[tuple[Any, str]] = [
        (b"{not json", "json"),
        ({"url": good}, ""),
        ({"path": "x"}, "field"),
        ({"url": good, "path": "../x"}, "path"),
        ({"url": f"{web.url}/missing?key=s3cret", "path": "missing"}, "not-found"),
        ({"url": f"{web.url}/gone"}, "not-found"),
        ({"url": f"{web.url}/denied"}, "access"),
        ({"url": f"{web.url}/broken"}, "unavailable"),
        ({"url": f"{web.url}/teapot"}, "store"),
        ({"url": f"{web.url}/nothing"}, "store"),
        ({"url": f"{web.url}/short"}, "unavailable"),
        ({"url": f"{web.url}/cut"}, "unavailable"),
        ({"url": f"{web.url}/drip"}, "too-slow"),
        ({"url": f"{web.url}/large"}, "too-large"),
        ({"url": f"{web.url}/endless"}, "too-large"),
        ({"url": f"{web.url}/circle"}, "store"),
        ({"url": f"{web.url}/file"}, "store"),
        ({"url": f"{web.url}/nowhere"}, "store"),
        ({"url": f"{web.url}/page.jpg"}, "store"),
        ({"url": f"{web.url}/zstd"}, "store"),
        ({"url": "http://127.0.0.1:9/refused"}, "unavailable"),
        ({"url": f"https://{web.url.removeprefix('http://')}/tls"}, "store"),
        ({"url": "missing.jpg"}, "not-found"),
        ({"url": str(tmp_path), "path": "folder"}, "not-found"),
        ({"url": "nobody://host/x"}, "url"),
        ({"url": "https://me:s3cret@host/x"}, "url"),
        ({"url": good}, "duplicate"),
    ]
    file = write_lines(*(line for line, _ in rows))
    found = failures_of(file, settings, max_object_bytes=1000, object_timeout_s=2.0)
    expected = [(number, code) for number, (_, code) in enumerate(rows, 1) if code]
    assert [(failure.line, failure.code) for failure in found] == expected
    assert "s3cret" not in repr(found)
    assert web.asked["/good.jpg"] == 1
    assert web.asked["/circle"] == 6
    assert web.asked["/broken"] > 1
    reasons = {failure.line: failure.reason for failure in found}
    assert "404" in reasons[5]
    assert "12,345" not in reasons[11]
    assert "redirects more than 5 times" in reasons[16]

    made = api.import_jsonl(
        "faces", file, settings=settings, max_object_bytes=1000, object_timeout_s=1.0, skip_failed=True
    )
    assert (made.lines, made.left_out, made.resumed) == (27, 26, 1)
    assert files_of(settings) == {"good.jpg": b"good"}
    assert made.record.warnings == ("26 of 27 lines were left out",)
    assert made.record.lineage is not None
    assert made.record.lineage.parameters["left_out"] == 26


def test_odd_answers_that_are_whole_are_taken(web: WebServer, write_lines: WriteLines, settings: Settings) -> None:
    import gzip

    web.add("/at last.jpg", b"moved")
    web.on("/moved", _redirect("/at%20last.jpg", 301))
    web.on("/other", _redirect(f"{web.url}/moved?signature=x", 307))
    web.on("/chunked", lambda r: r.chunks(b"a" * 70_000, b"b" * 5_000_000))
    web.on("/packed", lambda r: r.answer(gzip.compress(b"p" * 100_000), Content_Encoding="gzip"))
    web.on("/old", lambda r: r.answer(b"until the end", length=None))
    web.on("/page.html", lambda r: r.answer(b"<html>", Content_Type="text/html"))
    web.on("/called.jpg", lambda r: r.answer(b"\xff\xd8 a picture", Content_Type="text/html"))
    names = ["moved", "other", "chunked", "packed", "old", "page.html", "called.jpg"]
    api.import_jsonl("faces", write_lines(*({"url": f"{web.url}/{name}"} for name in names)), settings=settings)
    assert files_of(settings) == {
        "moved": b"moved",
        "other": b"moved",
        "chunked": b"a" * 70_000 + b"b" * 5_000_000,
        "packed": b"p" * 100_000,
        "old": b"until the end",
        "page.html": b"<html>",
        "called.jpg": b"\xff\xd8 a picture",
    }


@promise("An answer that is read whole takes bounded memory")
@promise("What a web server sends is whole, within a size and a time, or a failure")
def test_a_packed_answer_that_is_a_bomb_is_too_large(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    import gzip

    bomb = gzip.compress(b"\0" * 50_000_000)
    web.on("/bomb", lambda r: r.answer(bomb, Content_Encoding="gzip"))
    found = failures_of(write_lines({"url": f"{web.url}/bomb"}), settings, max_object_bytes=1_000_000)
    assert [failure.code for failure in found] == ["too-large"]


@promise("An import asks a busy server again")
def test_a_server_that_is_busy_or_breaks_off_is_asked_again(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    def at_first(*answers: Callable[[Request], None]) -> Callable[[Request], None]:
        left = list(answers)
        return lambda request: left.pop(0)(request) if left else request.answer(b"at last")

    def reset(request: Request) -> None:
        request.close_connection = True

    web.on("/503", at_first(lambda r: r.answer(b"", status=503), lambda r: r.answer(b"", status=503)))
    web.on("/429", at_first(lambda r: r.answer(b"", status=429, Retry_After="1")))
    web.on("/reset", at_first(reset, reset))
    web.on("/short", at_first(lambda r: r.answer(b"at", length=7), lambda r: r.chunks(b"at", end=False)))
    names = ["503", "429", "reset", "short"]
    file = write_lines(*({"url": f"{web.url}/{name}"} for name in names))
    api.import_jsonl("faces", file, settings=replace(settings, store_timeout_s=30.0))
    assert files_of(settings) == dict.fromkeys(sorted(names), b"at last")
    assert [web.asked[f"/{name}"] for name in names] == [3, 2, 3, 3]


def test_web_servers_are_asked_through_the_proxy_of_the_environment(
    web: WebServer, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.add("/a.jpg", b"by way of the proxy")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("http_proxy", web.url)
    api.import_jsonl("faces", write_lines({"url": "http://nowhere.invalid/a.jpg"}), settings=settings)
    assert files_of(settings) == {"a.jpg": b"by way of the proxy"}


@promise("What a web server sends is whole, within a size and a time, or a failure")
@pytest.mark.parametrize("by_proxy", [False, True])
def test_a_server_that_draws_out_its_headers_is_given_up(
    web: WebServer, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch, by_proxy: bool
) -> None:
    url = web.on("/endless.jpg", _endless_header)
    if by_proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("http_proxy", web.url)
        url = "http://nowhere.invalid/endless.jpg"
    patient = replace(settings, store_timeout_s=1.0)
    (failure,) = failures_of(write_lines({"url": url}), patient)
    assert failure.code == "unavailable", failure


@promise("An import asks a busy server again")
def test_a_host_that_is_gone_does_not_hold_up_a_million_lines(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    for n in range(60):
        web.on(f"/{n}", lambda r: r.answer(b"", status=500))
    file = write_lines(*({"url": f"{web.url}/{n}"} for n in range(60)))
    found = failures_of(file, replace(settings, store_timeout_s=0.3, concurrency=1))
    assert len(found) == 60
    assert sum(web.asked[f"/{n}"] > 1 for n in range(60)) == 10
    assert all(web.asked[f"/{n}"] for n in range(60))


def test_an_object_that_changes_while_it_is_copied_is_a_failure(
    rclone_s3: RcloneS3, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = rclone_s3.make_bucket("jsonl-changing")
    (bucket / "changing.bin").write_bytes(b"a" * (9 << 20))
    (bucket / "good.bin").write_bytes(b"good")
    with FaultProxy(rclone_s3.endpoint) as proxy:
        for name, value in (rclone_s3.env() | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)

        def overwrite(_answer: Answer) -> None:
            (bucket / "changing.bin").write_bytes(b"b" * (9 << 20))

        proxy.add(Fault(change=overwrite, only=lambda method, path: method == "GET" and "changing" in path))
        file = write_lines({"url": "s3://jsonl-changing/changing.bin"}, {"url": "s3://jsonl-changing/good.bin"})
        found = failures_of(file, settings, pin=True)
    assert [(failure.line, failure.code) for failure in found] == [(1, "changed")]


def test_only_so_many_lines_are_fetched_at_a_time(web: WebServer, write_lines: WriteLines, settings: Settings) -> None:
    together, lock, most = threading.Barrier(3, timeout=60), threading.Lock(), [0, 0]

    def wait(request: Request) -> None:
        with lock:
            most[0] += 1
            most[1] = max(most)
        together.wait()  # three have to be here at once for any of them to be answered
        with lock:
            most[0] -= 1
        request.answer(b"x")

    file = write_lines(*({"url": web.on(f"/{n}", wait)} for n in range(30)))
    api.import_jsonl("faces", file, settings=replace(settings, store_timeout_s=60), concurrency=3)
    assert most[1] == 3


_IMPORT = """
import sys
from datacache import api
made = api.import_jsonl(*sys.argv[1:3], concurrency=int(sys.argv[3]), skip_failed=len(sys.argv) > 4)
print(made.resumed)
"""


def start_import(file: Path, *, concurrency: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _IMPORT, "faces", str(file), str(concurrency)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@promise("A killed or failed import leaves nothing visible and goes on where it was")
@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_killed_import_goes_on_where_it_was(
    web: WebServer, write_lines: WriteLines, settings: Settings, concurrency: int
) -> None:
    lines = [{"url": web.add(f"/{n:03}.jpg", b"%d" % n * 1000), "label": str(n)} for n in range(100)]
    reached = threading.Event()

    def stall(request: Request) -> None:
        reached.set()
        request.web.closing.wait()

    for n in range(60, 60 + concurrency):  # every thread gets stuck
        web.on(f"/{n:03}.jpg", stall)
    file = write_lines(*lines)
    process = start_import(file, concurrency=concurrency)
    assert reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    catalog = api.open_catalog(settings)
    assert catalog.datasets() == []
    catalog.close()

    web.odd.clear()
    before = web.asked.copy()
    made = api.import_jsonl("faces", file, settings=settings, on_failure=print)
    again = [path for path, count in web.asked.items() if count > 1]
    assert len(again) <= concurrency  # what was in flight, and nothing else
    assert made.resumed >= 60 - concurrency
    assert made.resumed + (web.asked - before).total() == 100
    found = files_of(settings)
    assert found.pop("metadata.jsonl").count(b"\n") == 100
    assert found == {f"{n:03}.jpg": b"%d" % n * 1000 for n in range(100)}
    assert list((settings.home / "imports").iterdir()) == []

    clean = api.import_jsonl("clean", file, settings=settings)
    assert clean.record.id == made.record.id
    assert clean.resumed == 0


@promise("A killed or failed import leaves nothing visible and goes on where it was")
def test_after_a_failure_only_what_failed_is_tried_again(
    web: WebServer, tmp_path: Path, write_lines: WriteLines, settings: Settings
) -> None:
    (tmp_path / "here").write_bytes(b"here")  # a reference: it is looked up each time
    lines = [{"url": web.add(f"/{n}", b"%d" % n)} for n in range(20)]
    file = write_lines(*lines, {"url": f"{web.url}/late"}, {"url": "here"}, {"path": "x"})
    assert [failure.line for failure in failures_of(file, settings)] == [21, 23]
    web.add("/late", b"late")
    before = web.asked.copy()
    made = api.import_jsonl("faces", file, settings=settings, skip_failed=True)
    assert (made.left_out, made.resumed) == (1, 20)
    assert web.asked - before == {"/late": 1}


@promise("A resumed import looks again at what it refers to")
def test_what_is_referenced_and_changed_after_a_failure_is_imported_as_it_is_now(
    web: WebServer, tmp_path: Path, write_lines: WriteLines, settings: Settings
) -> None:
    (tmp_path / "a").write_bytes(b"one")
    file = write_lines({"url": "a"}, {"url": "b"}, {"url": web.add("/c", b"copied")})
    assert [failure.line for failure in failures_of(file, settings)] == [2]
    (tmp_path / "a").write_bytes(b"two, changed")
    (tmp_path / "b").write_bytes(b"new")
    made = api.import_jsonl("faces", file, settings=settings)
    assert made.resumed == 1
    assert files_of(settings) == {"a": b"two, changed", "b": b"new", "c": b"copied"}


def test_another_file_option_or_data_set_does_not_go_on_with_a_journal(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    lines = [{"url": web.add("/a", b"a")}, {"url": f"{web.url}/missing"}]
    failures_of(write_lines(*lines), settings)
    for name, file, options in [
        ("faces", write_lines(*lines, {"path": "x"}, name="more.jsonl"), {}),
        ("other", write_lines(*lines), {}),
        ("faces", write_lines(*lines), {"objects": str(settings.home / "elsewhere")}),
        ("faces", write_lines(*lines), {"max_object_bytes": 5}),
    ]:
        made = api.import_jsonl(name, file, settings=settings, skip_failed=True, **options)
        assert made.resumed == 0
    assert api.import_jsonl("faces", write_lines(*lines), settings=settings, skip_failed=True).resumed == 1


def test_a_copy_that_is_old_is_stored_anew_and_one_that_is_gone_fetched_again(
    web: WebServer, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"url": web.add(f"/{n}", b"%d" % n * 50)} for n in range(3)]
    file = write_lines(*lines, {"url": f"{web.url}/missing"})
    failures_of(file, settings)
    objects = sorted(path for path in (settings.home / "objects").rglob("*") if path.is_file())
    assert len(objects) == 3
    gone, rotten, kept = objects
    gone.unlink()
    rotten.write_bytes(b"x" * rotten.stat().st_size)
    for path in (rotten, kept):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(fetching, "REFRESH_AFTER_S", 0.0)  # whatever the journal has is old
    before = web.asked.copy()
    made = api.import_jsonl("faces", file, settings=settings, skip_failed=True)
    assert made.resumed == 1
    assert (web.asked - before).total() == 3  # the missing one, the one that is gone, the one that is another
    assert kept.stat().st_mtime > 1.5e9
    assert files_of(settings) == {str(n): b"%d" % n * 50 for n in range(3)}


def test_a_second_import_of_the_same_file_is_kept_out(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    reached, go = threading.Event(), threading.Event()

    def stall(request: Request) -> None:
        reached.set()
        go.wait(60)
        request.answer(b"x")

    file = write_lines({"url": web.on("/x", stall)})
    process = start_import(file)
    assert reached.wait(60)
    with pytest.raises(ImportFailedError, match="another process"):
        api.import_jsonl("faces", file, settings=settings)
    go.set()
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


def test_an_interrupted_import_ends_at_once_and_can_go_on(
    web: WebServer, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = threading.Event()

    def stall(request: Request) -> None:
        reached.set()
        request.web.closing.wait()

    lines = [{"url": web.add("/0", b"0")}, {"url": web.on("/1", stall)}, {"url": web.on("/2", stall)}]
    file = write_lines(*lines)
    monkeypatch.setenv("DATACACHE_STORE_TIMEOUT_S", "600")
    process = start_import(file)
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0  # the stalled request has 600 s
    assert process.stdout is not None
    process.stdout.close()
    web.odd.clear()
    web.add("/1", b"1")
    web.add("/2", b"2")
    assert api.import_jsonl("faces", file, settings=settings).resumed == 1


def test_names_and_tags_are_checked_before_anything_is_fetched(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    url = web.add("/a", b"a")
    first = write_lines({"url": url})
    api.import_jsonl("faces", first, settings=settings, tags=["v1"])
    before = web.asked.copy()
    other = write_lines({"url": url, "path": "b"}, name="other.jsonl")
    for name, tags, error in [
        ("no good", [], UsageError),
        ("faces", ["-"], UsageError),
        ("faces", ["v1"], TagExistsError),
    ]:
        with pytest.raises(error):
            api.import_jsonl(name, other, settings=settings, tags=tags)
    with pytest.raises(UsageError, match="size limit"):
        api.import_jsonl("faces", other, settings=settings, max_object_bytes=2**31)
    assert web.asked == before
    assert api.import_jsonl("faces", first, settings=settings, tags=["v1"]).record.files == 1
    moved = api.import_jsonl("faces", other, settings=settings, tags=["v1"], move_tags=True)
    assert list(files_of(settings, "faces@v1")) == ["b"]
    web.add("/a", b"changed")
    with pytest.raises(TagExistsError):
        api.import_jsonl("faces", other, settings=settings, tags=["v1"])
    assert list(files_of(settings, moved.record.ref)) == ["b"]


def test_storage_that_fails_ends_the_import_with_its_own_error(
    web: WebServer, write_lines: WriteLines, settings: Settings, monkeypatch: pytest.MonkeyPatch, rclone_s3: RcloneS3
) -> None:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    lines = [{"url": web.add(f"/{n}", b"x%d" % n)} for n in range(50)]
    file = write_lines(*lines)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreAccessError):
        api.import_jsonl("faces", file, settings=settings, objects="s3://nobody/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailableError):
        api.import_jsonl("faces", file, settings=settings, objects="s3://nobody/x")
    with pytest.raises(UsageError, match="credentials"):
        api.import_jsonl("faces", file, settings=settings, objects="s3://k:s@nobody/x")
    for thread in threading.enumerate():
        if thread.name.startswith("import-"):
            thread.join()  # those that were left behind end by themselves


def test_a_file_without_lines_is_wrong_usage_and_one_of_failures_commits_nothing(
    write_lines: WriteLines, settings: Settings
) -> None:
    with pytest.raises(UsageError, match="holds no lines"):
        api.import_jsonl("faces", write_lines(b"\n\n"), settings=settings)
    found = failures_of(write_lines(b"x", b"y"), settings, skip_failed=True)
    assert [failure.line for failure in found] == [1, 2]


def test_progress_says_how_far_it_is(web: WebServer, write_lines: WriteLines, settings: Settings) -> None:
    seen: list[jsonl.JsonlProgress] = []
    file = write_lines(*({"url": web.add(f"/{n}", b"12345")} for n in range(10)), b"x")
    api.import_jsonl("faces", file, settings=settings, skip_failed=True, progress=seen.append)
    assert seen[-1] == jsonl.JsonlProgress(10, 10, 1, 0, 50)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
