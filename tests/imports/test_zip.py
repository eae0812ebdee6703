"""Zips of tools, and zips of people who mean harm."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from datacache.core.errors import ImportFailedError, UsageError
from datacache.imports.archives.members import UnpackLimits
from datacache.imports.export import open_export
from tests.imports.archives import MTIME, Raw, make_zip, raw_zip
from tests.promises import promise

FILES = {"Annotations/1.xml": b"<annotation/>" * 100, "JPEGImages/1.jpg": b"\xff\xd8" + bytes(5000), "empty": b""}
TIME_NS = 1_714_979_290 * 10**9
Unpack = Callable[..., dict[str, bytes]]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """The files of a zip, by path."""

    def read(data: bytes, limits: UnpackLimits | None = None) -> dict[str, bytes]:
        path = tmp_path / "export.zip"
        path.write_bytes(data)
        export = open_export(path, limits or UnpackLimits())
        try:
            return {member.path: data for member, data in export.read()}
        finally:
            export.close()

    return read


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("comment", [b"", b"PK\x05\x06 and so on"])
def test_a_zip_of_a_tool_is_read(unpack: Unpack, method: int, comment: bytes) -> None:
    assert unpack(make_zip(FILES, method=method, comment=comment)) == FILES


def test_a_large_member_is_read_in_parts(unpack: Unpack) -> None:
    files = {"a": bytes(range(256)) * 20_000, "b": zlib.compress(bytes(range(256)) * 40_000)}
    assert unpack(make_zip(files)) == files


def test_a_member_that_ends_shortly_after_a_part_is_whole(unpack: Unpack) -> None:
    for size in [*range((1 << 18) - 2, (1 << 18) + 300, 7), (1 << 23) + 1]:
        data = b"[" + b" " * (size - 1)
        assert unpack(make_zip({"a.json": data})) == {"a.json": data}


def test_zip64_and_something_before_the_archive_are_read(unpack: Unpack) -> None:
    entries = [Raw(name.encode(), data) for name, data in FILES.items()]
    assert unpack(raw_zip(*entries, zip64=True)) == FILES
    assert unpack(b"PK\x03\x04 a program that unpacks itself" + raw_zip(*entries)) == FILES


def test_a_zip_that_was_streamed_is_read(unpack: Unpack) -> None:
    """Sizes after the data (bit 3), as tools write that cannot seek."""

    class Pipe:
        def __init__(self) -> None:
            self.data = b""

        def write(self, data: bytes) -> int:
            self.data += data
            return len(data)

        def flush(self) -> None:
            """Nothing to do."""

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[arg-type]
        for name, data in FILES.items():
            archive.writestr(zipfile.ZipInfo(name, MTIME), data)
    assert unpack(pipe.data) == FILES


def test_times_are_those_of_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    unix = struct.pack("<2HBl", 0x5455, 5, 1, 1_600_000_000)
    path.write_bytes(raw_zip(Raw(b"dos"), Raw(b"unix", extra=unix), Raw(b"none", date=0, time=0)))
    export = open_export(path, UnpackLimits())
    assert {member.path: member.mtime_ns for member in export.members} == {
        "dos": TIME_NS,
        "unix": 1_600_000_000 * 10**9,
        "none": 0,
    }
    export.close()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["猫/1.xml".encode("gbk"), "标注.xml".encode("gbk")], ["猫/1.xml", "标注.xml"]),
        (["猫.xml".encode()], ["猫.xml"]),
        (["müll/é.xml".encode("cp437")], ["müll/é.xml"]),
        (["niño.xml".encode("cp437"), b"plain"], ["niño.xml", "plain"]),
        ([b"Annotations\\1.xml", b"a\\b\\c"], ["Annotations/1.xml", "a/b/c"]),
        ([b"./Annotations//1.xml"], ["Annotations/1.xml"]),
    ],
)
def test_names_in_the_encodings_of_tools_are_read(unpack: Unpack, names: list[bytes], expected: list[str]) -> None:
    assert set(unpack(raw_zip(*map(Raw, names)))) == set(expected)


def test_names_that_say_their_encoding_are_read(unpack: Unpack) -> None:
    raw = "猫.xml".encode("cp949", "replace")
    extra = "猫.xml".encode()
    field = struct.pack("<2HBL", 0x7075, 5 + len(extra), 1, zlib.crc32(raw)) + extra
    assert set(unpack(raw_zip(Raw(raw, extra=field)))) == {"猫.xml"}
    stale = struct.pack("<2HBL", 0x7075, 5 + len(extra), 1, 1) + extra
    assert set(unpack(raw_zip(Raw(b"renamed.xml", extra=stale)))) == {"renamed.xml"}
    assert set(unpack(raw_zip(Raw("é.xml".encode(), flags=0x800)))) == {"é.xml"}
    with pytest.raises(ImportFailedError, match="UTF-8"):
        unpack(raw_zip(Raw(b"\xff.xml", flags=0x800)))


@promise("A hostile archive is refused as a whole")
@pytest.mark.parametrize(
    "name",
    [
        *(b"../evil", b"a/../../evil", b"/etc/passwd", b"..\\evil", b"\\evil", b"\\\\server\\evil", b"C:\\evil"),
        *(b"C:/evil", b"evil\0.xml", b"a/..", b"x" * 300, b"", b".", b"./."),
    ],
)
def test_names_that_lead_out_are_refused(unpack: Unpack, name: bytes) -> None:
    with pytest.raises(ImportFailedError, match="cannot be taken"):
        unpack(raw_zip(Raw(b"good", b"x"), Raw(name, b"x")))


@pytest.mark.parametrize("names", [[b"a", b"a"], [b"a/b", b"a\\b"], [b"./a", b"a"], [b"a//b", b"a/b"]])
def test_names_that_are_there_twice_are_refused(unpack: Unpack, names: list[bytes]) -> None:
    with pytest.raises(ImportFailedError, match=r"there twice|are one path"):
        unpack(raw_zip(*map(Raw, names)))


@promise("A hostile archive is refused as a whole")
@pytest.mark.parametrize(
    ("mode", "what"), [(0o120777, "symbolic link"), (0o020666, "no file"), (0o010666, "no file"), (0o140777, "no file")]
)
def test_links_devices_and_pipes_are_refused(unpack: Unpack, mode: int, what: str) -> None:
    with pytest.raises(ImportFailedError, match=what):
        unpack(raw_zip(Raw(b"evil", b"/etc/passwd", mode=mode)))


def test_folders_are_passed_over_and_modes_of_files_do_not_matter(unpack: Unpack) -> None:
    entries = [Raw(b"a/", mode=0o040755), Raw(b"b\\"), Raw(b"a/x", b"1", mode=0o100600), Raw(b"y", b"2", mode=0o644)]
    assert unpack(raw_zip(*entries)) == {"a/x": b"1", "y": b"2"}


def test_an_encrypted_zip_says_so(unpack: Unpack) -> None:
    for flags in (0x1, 0x41, 0x2000):
        with pytest.raises(ImportFailedError, match="encrypted") as refused:
            unpack(raw_zip(Raw(b"secret", b"x", flags=flags)))
        assert "password" in refused.value.hint


@pytest.mark.parametrize(("method", "name"), [(9, "Deflate64"), (12, "bzip2"), (14, "LZMA"), (99, "AES"), (77, "77")])
def test_methods_no_tool_uses_are_named(unpack: Unpack, method: int, name: str) -> None:
    with pytest.raises(ImportFailedError, match=name):
        unpack(raw_zip(Raw(b"a", b"x", method=method)))


@promise("A hostile archive is refused as a whole")
def test_bytes_that_are_another_members_too_are_refused(unpack: Unpack) -> None:
    """Every name of the directory leads to one and the same large member, or into the middle of another."""
    kernel = Raw(b"a", b"\0" * 1000)
    with pytest.raises(ImportFailedError, match=r"there twice"):
        unpack(raw_zip(kernel, Raw(b"a", b"\0" * 1000, at=0)))
    with pytest.raises(ImportFailedError, match=r"another name"):
        unpack(raw_zip(kernel, Raw(b"b", b"\0" * 1000, at=0)))
    inner = raw_zip(Raw(b"b", b"x" * 10))[: 31 + 12]
    data = raw_zip(Raw(b"outer", inner, method=0), Raw(b"b", b"x" * 10, at=35))
    with pytest.raises(ImportFailedError, match=r"'outer'.*zip bomb"):
        unpack(data)
    with pytest.raises(ImportFailedError, match=r"the directory"):
        unpack(raw_zip(Raw(b"a", b"x", method=0, packed_bytes=40, size_bytes=40)))


@promise("Errors about limits of unpacking name the limit and the way to raise it")
def test_limits_are_named_with_the_way_to_raise_them(unpack: Unpack) -> None:
    data = make_zip({"a": b"\0" * 20_000_000, "b": b"x", "c": b"y"})
    for limits, name in [
        (UnpackLimits(members=2), "members"),
        (UnpackLimits(total_bytes=20_000_000, ratio=2000), "total"),
        (UnpackLimits(member_bytes=19_999_999, ratio=2000), "member"),
        (UnpackLimits(ratio=900), "ratio"),
    ]:
        with pytest.raises(ImportFailedError) as refused:
            unpack(data, limits)
        assert f"--unpack-limit {name}=" in refused.value.hint
    assert len(unpack(data, UnpackLimits(members=3, total_bytes=20_000_002, member_bytes=20_000_000, ratio=2000))) == 3


def test_a_directory_of_a_million_names_is_refused_before_it_is_read_to_its_end(unpack: Unpack) -> None:
    entry = Raw(b"a" * 40, b"")
    one = raw_zip(entry)
    body = one[: one.index(b"PK\x01\x02")]
    directory = one[one.index(b"PK\x01\x02") : one.index(b"PK\x05\x06")] * 200_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, len(directory), len(body), 0)
    with pytest.raises(ImportFailedError, match="more than 1,000 members"):
        unpack(body + directory + end, UnpackLimits(members=1000))


@promise("A damaged archive is an error that names the member")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"crc": 1}, "CRC-32"),
        ({"size_bytes": 5}, "more than the directory says"),
        ({"size_bytes": 5000}, "of 5,000 bytes"),
        ({"local_name": b"other"}, "another name"),
        ({"at": 7}, "not where the directory says"),
    ],
)
def test_a_damaged_member_is_named(unpack: Unpack, change: dict[str, object], why: str) -> None:
    entry = Raw(b"bad.xml", b"content" * 10)._replace(**change)
    with pytest.raises(ImportFailedError, match=rf"'bad\.xml' is damaged: .*{why}"):
        unpack(raw_zip(Raw(b"good", b"x"), entry))


@promise("A damaged archive is an error that names the member")
def test_a_zip_that_is_cut_short_is_damaged_wherever_it_is_cut(unpack: Unpack) -> None:
    whole = make_zip(FILES)
    for length in range(len(whole) - 1):
        with pytest.raises((ImportFailedError, UsageError)):
            unpack(whole[:length])


def test_a_part_of_several_is_refused(unpack: Unpack) -> None:
    data = bytearray(make_zip(FILES))
    at = data.rindex(b"PK\x05\x06")
    data[at + 4] = 1
    with pytest.raises(ImportFailedError, match="several files"):
        unpack(bytes(data))


def test_what_desktops_leave_behind_is_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(make_zip({"__MACOSX/._a.xml": b"x", "a.xml": b"y", ".DS_Store": b"z", "b/Thumbs.db": b"z"}))
    export = open_export(path, UnpackLimits())
    assert [member.path for member in export.members] == ["a.xml"]
    assert export.passed_over == 3
    export.close()


def test_archives_inside_are_files(unpack: Unpack) -> None:
    inner = make_zip({"../x": b"y"})
    assert unpack(make_zip({"inner.zip": inner})) == {"inner.zip": inner}


_WHOLE = raw_zip(
    Raw("é.xml".encode("cp437"), b"<a/>" * 20),
    Raw(b"b/c.jpg", bytes(50), method=0),
    Raw(b"d/"),
    Raw(b"e", zlib.compress(b"")),
    zip64=True,
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(_WHOLE) - 1), st.integers(0, 255)), max_size=6), st.integers(0, len(_WHOLE))
)
@example([(len(_WHOLE) - 10, 255)], len(_WHOLE))
@example([(363, 128)], 1)
def test_whatever_bytes_are_changed_it_is_read_or_refused(
    unpack: Unpack, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(_WHOLE)
    for at, value in changes:
        data[at] = value
    cut = bytes(data) if length % 3 else bytes(data[:length])
    try:
        files = unpack(cut)
    except (ImportFailedError, UsageError):
        return
    assert all(not {"", ".", ".."} & set(path.split("/")) for path in files)
    if cut == _WHOLE:
        assert len(files) == 3


def test_the_standard_library_reads_the_same(tmp_path: Path, unpack: Unpack) -> None:
    path = tmp_path / "same.zip"
    path.write_bytes(_WHOLE)
    with zipfile.ZipFile(path) as archive:
        theirs = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    assert unpack(_WHOLE) == theirs
