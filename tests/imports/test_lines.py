"""Lines and paths: what is taken, what is refused, and why."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datacache.core.errors import UsageError
from datacache.imports.failures import Failure, shown_url
from datacache.imports.lines import MAX_LINE_BYTES, Line, LinesFile, parse_line
from datacache.imports.places import WEB, Places, from_archive, is_junk, unusable
from tests.promises import promise

PLACES = Places("/data/list", allow_local=["/"], allow_network=["host"])


def parse(value: Any) -> Line | Failure:
    return parse_line(7, value if isinstance(value, bytes) else json.dumps(value).encode(), PLACES)


def failure(value: Any) -> Failure:
    result = parse(value)
    assert isinstance(result, Failure), result
    assert result.line == 7
    return result


def line(value: Any) -> Line:
    result = parse(value)
    assert isinstance(result, Line), result
    return result


@pytest.mark.parametrize(
    ("url", "store", "key", "path"),
    [
        ("s3://bucket/a/b.jpg", "s3://bucket", "a/b.jpg", b"b.jpg"),
        ("gs://bucket/a%20b.jpg", "gs://bucket", "a%20b.jpg", b"a%20b.jpg"),
        ("file:///mnt/x/1.jpg", "file://", "mnt/x/1.jpg", b"1.jpg"),
        ("/mnt/x/1.jpg", "file://", "mnt/x/1.jpg", b"1.jpg"),
        ("images/1.jpg", "file://", "data/list/images/1.jpg", b"1.jpg"),
        ("../1.jpg", "file://", "data/1.jpg", b"1.jpg"),
        ("memory://lab/1.jpg", "memory://lab", "1.jpg", b"1.jpg"),
        ("sftp://user@host/1.jpg", "sftp://user@host", "1.jpg", b"1.jpg"),
        ("https://host/a/my%20cat.jpg?width=5#x", WEB, "", b"my cat.jpg"),
        (" http://host:8080/å.jpg ", WEB, "", "å.jpg".encode()),
    ],
)
def test_every_kind_of_url_is_taken(url: str, store: str, key: str, path: bytes) -> None:
    found = line({"url": url})
    assert (found.store, found.key, found.path) == (store, key, path)
    assert found.number == 7


def test_path_and_file_name_say_where_it_goes() -> None:
    assert line({"url": "s3://b/1.jpg", "path": "train/cat.jpg"}).path == b"train/cat.jpg"
    assert line({"url": "s3://b/1.jpg", "file_name": "train/cat.jpg"}).path == b"train/cat.jpg"
    assert line({"url": "s3://b/1.jpg", "path": None, "file_name": None}).path == b"1.jpg"
    assert line({"url": "s3://b/1.jpg", "path": "a", "file_name": "a"}).fields == b""
    assert failure({"url": "s3://b/1.jpg", "path": "a", "file_name": "b"}).code == "field"


@pytest.mark.parametrize("label", ["cat", ["cat", "dog"], [], 3, [1, 2], None])
def test_labels_and_other_fields_are_kept_as_they_are(label: Any) -> None:
    found = line({"url": "s3://b/1.jpg", "label": label, "z": {"深": [1.5, None]}, "a": "é"})
    assert json.loads(b"{%s}" % found.fields) == {"label": label, "z": {"深": [1.5, None]}, "a": "é"}
    assert found.fields.startswith(b'"label"')
    assert "深".encode() in found.fields


@pytest.mark.parametrize(
    ("value", "code", "reason"),
    [
        (b"{", "json", "not JSON"),
        (b'{"url": "s3://b/1"} x', "json", "not JSON"),
        (b'{"url": "s3://b/1", "x": NaN}', "json", "NaN"),
        (b'{"url": "s3://b/1", "x": 1e999}', "json", "too large"),
        (b'{"url": "s3://b/1", "x": ' + b"9" * 5000 + b"}", "json", "not JSON"),
        (b"[" * 100_000, "json", "nested"),
        (b'{"url": "s3://b/1", "x": "\\ud800"}', "json", "half a character"),
        (b'{"url": "s3://b/\xff"}', "json", "UTF-8"),
        (None, "json", "longer"),
        ([1], "json", "a list"),
        ("s3://b/1.jpg", "json", "a string"),
        ({"path": "a"}, "field", "no url"),
        ({"url": ""}, "field", "no url"),
        ({"url": None}, "field", "no url"),
        ({"url": 5}, "field", "a number"),
        ({"url": ["s3://b/1"]}, "field", "a list"),
        ({"url": "s3://b/1.jpg", "path": 1}, "field", "path is not a string"),
        ({"url": "s3://b/1.jpg", "file_name": {}}, "field", "file_name"),
        ({"url": "s3://b/1.jpg", "label": {"a": 1}}, "field", "an object"),
        ({"url": "s3://b/1.jpg", "label": True}, "field", "true or false"),
        ({"url": "s3://b/1.jpg", "label": [["a"]]}, "field", "a list"),
        ({"url": "s3://b/1.jpg", "label": 1.5}, "field", "a number"),
        ({"url": "s3://b/folder/"}, "url", "folder"),
        ({"url": "s3://b"}, "url", "folder"),
        ({"url": "s3:///x"}, "url", "no bucket"),
        ({"url": "s3:/b/x"}, "url", "neither a URL nor a path"),
        ({"url": "http://"}, "url", "no bucket or host"),
        ({"url": "http://host:99999/x"}, "url", "host"),
        ({"url": "file://host/x"}, "url", "host"),
        ({"url": "s3://b/" + "x" * 9000}, "url", "longer"),
        ({"url": "s3://b/a\0b"}, "url", "NUL"),
        ({"url": "https://host/"}, "path", "without a name"),
        ({"url": "https://host/a%2Fb/..%2f..%2fetc"}, "path", "leads out"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(value: Any, code: str, reason: str) -> None:
    found = parse_line(7, None, PLACES) if value is None else parse(value)
    assert isinstance(found, Failure), found
    assert found.code == code
    assert reason in found.reason


@pytest.mark.parametrize(
    "path",
    ["", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a/./b", "a\\b", "..\\a", "C:/a", "c:", "a\0b", "x" * 256],
)
def test_paths_that_leave_the_snapshot_or_fit_no_file_system_are_refused(path: str) -> None:
    assert failure({"url": "s3://b/1.jpg", "path": path}).code == "path"
    assert failure({"url": "s3://b/1.jpg", "path": 2100 * "a/" + "a"}).code == "path"


@pytest.mark.parametrize("path", ["a", "a b/ü.jpg", "..a", "a..", "...", "a:b", "x" * 255, " "])
def test_other_paths_are_taken(path: str) -> None:
    assert line({"url": "s3://b/1.jpg", "path": path}).path == path.encode()


@promise("Credentials in a URL are refused and repeated nowhere")
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:s3cret@host/a.jpg?x=s3cret", "https://…@host/a.jpg?…"),
        ("https://s3cret@host/a.jpg", "https://…@host/a.jpg"),
        ("https://host/a.jpg?X-Amz-Signature=s3cret#s3cret", "https://host/a.jpg?…"),
        ("https://host/a.jpg?sig=s3cret", "https://host/a.jpg?…"),
        ("s3://KEY:s3/cret@bucket/a.jpg", "s3://…@bucket/a.jpg"),
        ("s3://bucket/a.jpg?X-Amz-Credential=s3cret", "s3://bucket/a.jpg?…"),
    ],
)
def test_credentials_in_a_url_are_refused_and_repeated_nowhere(url: str, shown: str) -> None:
    found = failure({"url": url, "path": "a.jpg"})
    assert found.code == "url"
    assert "credentials" in found.reason
    assert found.url == shown
    assert "cret" not in repr(found)


def test_what_is_no_secret_is_shown() -> None:
    assert shown_url("s3://bucket/icon@2x.png?v=1") == "s3://bucket/icon@2x.png?v=1"
    assert shown_url("images/a@b.jpg") == "images/a@b.jpg"
    assert shown_url("https://host/a@b.jpg") == "https://host/a@b.jpg"
    assert shown_url("https://host/a.jpg?token_of_some_other_kind=x") == "https://host/a.jpg?…"


def read(data: bytes, tmp_path: Path) -> list[tuple[int, bytes | None]]:
    path = tmp_path / "lines"
    path.write_bytes(data)
    file = LinesFile(path)
    try:
        return list(file.lines())
    finally:
        file.close()


def test_bom_windows_line_ends_blank_lines_and_gzip_are_read(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n\t{"b": 2} \n{"c": 3}'
    lines = [(1, b'{"a": 1}'), (4, b'{"b": 2}'), (5, b'{"c": 3}')]
    assert read(data, tmp_path) == lines
    assert read(gzip.compress(data), tmp_path) == lines


def test_a_pipe_is_read_once_and_whole() -> None:
    data = b'{"a": 1}\n' * 100_000
    reader, writer = os.pipe()
    with open(writer, "wb") as end:
        thread = threading.Thread(target=lambda: (end.write(data), end.close()))
        thread.start()
        file = LinesFile(f"/dev/fd/{reader}")
        thread.join()
    os.close(reader)
    assert sum(1 for _ in file.lines()) == sum(1 for _ in file.lines()) == 100_000
    file.close()


def test_a_line_that_is_too_long_is_passed_over_and_the_next_one_read(tmp_path: Path) -> None:
    for end in (b"\n", b"\r\n"):
        data = b'{"a":"' + b"x" * (3 * MAX_LINE_BYTES) + b'"}' + end + b'{"b": 2}' + end
        assert read(data, tmp_path) == [(1, None), (2, b'{"b": 2}')]
    assert read(b"x" * (MAX_LINE_BYTES + 1), tmp_path) == [(1, None)]
    assert read(b"x" * (MAX_LINE_BYTES - 1) + b"\n", tmp_path) == [(1, b"x" * (MAX_LINE_BYTES - 1))]


def test_what_is_no_text_file_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="UTF-16"):
        read('{"a": 1}'.encode("utf-16"), tmp_path)
    with pytest.raises(UsageError, match="decompressed"):
        read(gzip.compress(b'{"a": 1}\n' * 10_000)[:-20], tmp_path)
    with pytest.raises(UsageError, match="decompressed"):
        read(b"\x1f\x8b" + b"junk" * 100, tmp_path)
    with pytest.raises(UsageError, match="opened"):
        LinesFile(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"opened|read"):
        LinesFile(tmp_path)


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b'{"url": {}}')
def test_any_bytes_are_a_line_or_a_failure(data: bytes) -> None:
    assert isinstance(parse_line(1, data, PLACES), Line | Failure)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@promise("No path of a line and no name in an archive leads out of the snapshot")
@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["url", "path", "file_name", "label", "x"]),
        _JSON | st.text(alphabet="ab/.\\:@?\0é ", max_size=12) | st.sampled_from(["s3://b/k", "http://h/x.jpg"]),
    )
)
def test_whatever_a_line_says_its_path_stays_inside(value: dict[str, Any]) -> None:
    found = parse(value)
    if isinstance(found, Line):
        parts = found.path.decode().split("/")
        assert not {"", ".", ".."} & set(parts)
        assert b"\0" not in found.path
        assert b"\\" not in found.path


@promise("No path of a line and no name in an archive leads out of the snapshot")
@settings(deadline=None)
@given(st.text(alphabet="ab/.\\:\0é ", max_size=20))
def test_a_name_from_an_archive_is_refused_or_stays_inside(name: str) -> None:
    path = from_archive(name)
    if not unusable(path):
        assert not {"", ".", ".."} & set(path.split("/"))
        assert not path.startswith("/")
        assert "\\" not in path
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        assert unusable(path)


def test_names_of_windows_tools_become_paths() -> None:
    assert from_archive("Annotations\\1.xml") == "Annotations/1.xml"
    assert from_archive("./a//b/./c") == "a/b/c"
    assert unusable(from_archive("C:\\a")) != ""
    assert unusable(from_archive("\\\\server\\share")) != ""
    assert unusable(from_archive("..\\..\\a")) != ""


def test_what_desktops_leave_behind_is_known() -> None:
    junk = ["__MACOSX/a/._1.xml", "a/.DS_Store", "Thumbs.db", "x/desktop.ini", "a/._b.jpg"]
    assert all(map(is_junk, junk))
    assert not any(map(is_junk, ["a.jpg", "DS_Store", "a/_b.jpg", ".hidden"]))
