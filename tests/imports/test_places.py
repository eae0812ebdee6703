"""Places that a list may lead to: what somebody wrote into it is read with the rights of whoever imports it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import ImportFailedError, UsageError
from datacache.imports.failures import Failure
from datacache.settings import Settings
from tests.imports.conftest import WebServer, files_of
from tests.promises import promise

WriteLines = Callable[..., Path]


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is none of the list's."""
    file = tmp_path_factory.mktemp("outside") / "shadow"
    file.write_bytes(b"root:secret")
    return file


def failures_of(file: Path, settings: Settings, **options: object) -> list[Failure]:
    """All failures of an import of which nothing is to be committed."""
    failures: list[Failure] = []
    with pytest.raises(ImportFailedError):
        api.import_jsonl("faces", file, settings=settings, on_failure=failures.append, **options)  # type: ignore[arg-type]
    return failures


@promise("A list names no file outside of its own folder unless that folder is allowed")
def test_files_outside_of_the_lists_folder_are_refused_unless_their_folder_is_named(
    write_lines: WriteLines, settings: Settings, outside: Path, tmp_path: Path
) -> None:
    os.symlink(outside, tmp_path / "link")
    os.symlink(outside.parent, tmp_path / "folder")
    (tmp_path / "own").write_bytes(b"own")
    os.symlink("own", tmp_path / "inside")
    up = os.path.relpath(outside, tmp_path)
    urls = [outside.as_uri(), str(outside), up, f"file://localhost{outside}", "link", "folder/shadow"]
    file = write_lines(*({"url": url, "path": f"{n}"} for n, url in enumerate(urls)), {"url": "own"}, {"url": "inside"})
    found = failures_of(file, settings)
    assert [(failure.line, failure.code) for failure in found] == [(n, "access") for n in range(1, 7)]
    assert all("--allow-local" in failure.reason for failure in found)
    api.import_jsonl("faces", file, settings=settings, allow_local=[outside.parent])
    files = files_of(settings)
    assert {files[str(number)] for number in range(6)} == {b"root:secret"}
    assert files["own"] == files["inside"] == b"own"


@promise("A list names no file outside of its own folder unless that folder is allowed")
def test_other_names_for_local_files_are_no_way_around(
    write_lines: WriteLines, settings: Settings, outside: Path
) -> None:
    below = f"/..{outside}"
    urls = [f"local://x{below}", f"file+x://x{below}", f"reference://x{below}", f"dir://x{below}", f"zip://x{below}"]
    found = failures_of(write_lines(*({"url": url, "path": str(n)} for n, url in enumerate(urls))), settings)
    assert [failure.code for failure in found] == ["url"] * 5


@promise("A list leads to no private address that is not allowed, nor does a redirect")
def test_private_addresses_are_refused_and_not_asked_unless_they_are_named(
    web: WebServer, write_lines: WriteLines, settings: Settings
) -> None:
    web.add("/metadata", b"secret")
    port = web.url.rpartition(":")[2]
    hosts = ["127.0.0.1", "localhost", "0.0.0.0", "2130706433", "[::ffff:127.0.0.1]"]
    urls = [f"http://{host}:{port}/metadata" for host in hosts]
    urls += ["http://169.254.169.254/latest/meta-data", "http://10.0.0.1/x", "sftp://127.0.0.1/x", "ftp://localhost/x"]
    file = write_lines(*({"url": url, "path": str(number)} for number, url in enumerate(urls)))
    closed = replace(settings, allow_network=())
    found = failures_of(file, closed)
    assert [failure.code for failure in found] == ["access"] * len(urls)
    assert all("--allow-network" in failure.reason for failure in found)
    assert web.asked.total() == 0
    one = write_lines({"url": urls[0]}, name="one.jsonl")
    failures_of(one, closed, allow_network=[f"127.0.0.1:{int(port) + 1}"])
    assert web.asked.total() == 0
    api.import_jsonl("faces", one, settings=closed, allow_network=[f"127.0.0.1:{port}"])
    assert files_of(settings)["metadata"] == b"secret"


@promise("A list leads to no private address that is not allowed, nor does a redirect")
def test_each_redirect_is_a_new_address(web: WebServer, write_lines: WriteLines, settings: Settings) -> None:
    other = WebServer()
    try:
        other.add("/metadata", b"secret")

        def redirect(to: str) -> Callable[..., None]:
            return lambda request: request.answer(b"", status=302, Location=to)

        web.on("/a", redirect(f"{other.url}/metadata?signature=s3cret"))
        web.on("/b", redirect("/c"))
        web.on("/c", redirect("http://169.254.169.254/x"))
        closed = replace(settings, allow_network=(web.url.removeprefix("http://"),))
        found = failures_of(write_lines({"url": f"{web.url}/a"}, {"url": f"{web.url}/b"}), closed)
        assert [failure.code for failure in found] == ["access", "access"]
        assert "it redirects to 127.0.0.1" in found[0].reason
        assert "s3cret" not in repr(found)
        assert other.asked.total() == 0
    finally:
        other.close()


def test_what_is_allowed_is_checked(write_lines: WriteLines, settings: Settings) -> None:
    with pytest.raises(UsageError, match=r"10\.0\.0\.0/99"):
        api.import_jsonl("faces", write_lines({"url": "x"}), settings=settings, allow_network=["10.0.0.0/99"])
