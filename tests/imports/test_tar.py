"""Tars of tools, tars of people who mean harm, and folders."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datacache.core.errors import ImportFailedError, UsageError
from datacache.imports.archives.members import UnpackLimits
from datacache.imports.export import open_export
from tests.imports.archives import make_tar, tar_member, tar_of
from tests.promises import promise

FILES = {"Annotations/1.xml": b"<annotation/>" * 100, "JPEGImages/1.jpg": bytes(range(256)) * 400, "empty": b""}
Unpack = Callable[..., dict[str, bytes]]


def unpacked(path: Path, limits: UnpackLimits | None = None) -> dict[str, bytes]:
    export = open_export(path, limits or UnpackLimits())
    try:
        read = {member.path: data for member, data in export.read()}
        assert sorted(read) == sorted(member.path for member in export.members)
        return read
    finally:
        export.close()


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """The files of a tar, by path."""

    def read(data: bytes, limits: UnpackLimits | None = None) -> dict[str, bytes]:
        path = tmp_path / "export.tar"
        path.write_bytes(data)
        return unpacked(path, limits)

    return read


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_a_tar_of_a_tool_is_read(unpack: Unpack, mode: str, format: int) -> None:
    assert unpack(make_tar(FILES, mode=mode, format=format)) == FILES


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_archives_one_after_the_other_are_refused_with_the_way_out(unpack: Unpack, mode: str) -> None:
    first, second = make_tar(FILES, mode=mode), make_tar({"other.xml": b"<annotation/>"}, mode=mode)
    with pytest.raises(UsageError, match="several archives") as caught:
        unpack(first + second)
    assert "--ignore-zeros" in (caught.value.hint or "")
    assert unpack(first + (b"" if ":" in mode else bytes(10240))) == FILES


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_read(unpack: Unpack, format: int) -> None:
    files = {"x" * 200 + "/" + "y" * 150: b"long", "猫/é.xml": b"cat", os.fsdecode(b"\xe9.xml"): b"latin"}
    assert unpack(make_tar(files, format=format)) == files


def test_folders_dots_and_times_are_understood(tmp_path: Path) -> None:
    folder = tar_member("./a/", tarfile.DIRTYPE)
    file = tar_member("./a/b.xml", tarfile.REGTYPE)
    file.size, file.mtime = 1, 1_700_000_000.5
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of([(folder, b""), (file, b"x")]))
    export = open_export(path, UnpackLimits())
    assert [(member.path, member.mtime_ns) for member in export.members] == [("a/b.xml", 1_700_000_000_500_000_000)]
    export.close()


def _changed(tar: bytes, at: int, field: bytes) -> bytes:
    """The archive with a field of its first header written over, and the checksum made right again."""
    block = bytearray(tar[:512])
    block[at : at + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + tar[512:]


def test_names_in_an_incremental_archive_of_gnu_tar_have_no_prefix(tmp_path: Path) -> None:
    image = tmp_path / "images" / "1.jpg"
    image.parent.mkdir()
    image.write_bytes(b"image")
    tar = ["tar", "--format=gnu", "-g", tmp_path / "snar", "-C", tmp_path, "-cf", tmp_path / "a.tar", "images/1.jpg"]
    subprocess.run(tar, check=True)
    assert unpacked(tmp_path / "a.tar") == {"images/1.jpg": b"image"}


def test_a_file_is_no_folder_because_its_long_name_is_cut_at_a_slash(unpack: Unpack) -> None:
    name = "x" * 99 + "/" + "y" * 50
    tar = make_tar({name: b"file"}, format=tarfile.GNU_FORMAT)
    assert unpack(tar[:1024] + _changed(tar[1024:], 156, b"\0")) == {name: b"file"}


@pytest.mark.parametrize(("field", "at"), [("mode", 100), ("uid", 108), ("gid", 116), ("mtime", 136), ("device", 329)])
def test_fields_that_nobody_asks_for_may_say_anything(unpack: Unpack, field: str, at: int) -> None:
    later = make_tar({"b": b"file"})
    for tar in (make_tar({"a": b"file"}), make_tar({"a": b"file"}, format=tarfile.GNU_FORMAT)):
        assert unpack(_changed(tar, at, b"\xfe no 8 \0"[: 7 if at < 136 else 8])) == {"a": b"file"}
        assert unpack(tar[:1024] + _changed(later, at, b"nobody\0")) == {"a": b"file", "b": b"file"}


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_that_is_empty_leaves_the_name_of_the_header(unpack: Unpack, format: int) -> None:
    tar = bytearray(make_tar({"a/" + "x" * 120: b"file"}, format=format))
    if format == tarfile.GNU_FORMAT:
        tar[512:1024] = bytes(512)
    else:
        tar = bytearray(_changed(bytes(tar), 124, b"%011o" % len(b"8 path=\n")))
        tar[512:1024] = b"8 path=\n".ljust(512, b"\0")
    (name,) = unpack(bytes(tar))
    assert ("a/" + "x" * 120).startswith(name)


@pytest.mark.parametrize("size", [b"none       ", b"-0000000777", b"\xff" * 12])
def test_a_header_without_a_size_is_damaged(unpack: Unpack, size: bytes) -> None:
    with pytest.raises(ImportFailedError, match="no size"):
        unpack(_changed(make_tar({"a": b"file"}), 124, size))


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/passwd", "..\\evil", "C:\\evil", "a/.."])
def test_names_that_lead_out_are_refused(unpack: Unpack, name: str) -> None:
    with pytest.raises(ImportFailedError, match="cannot be taken"):
        unpack(make_tar({"good": b"x", name: b"x"}))


@promise("A hostile archive is refused as a whole")
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.FIFOTYPE, "pipe"),
        (b"S", "kind"),
    ],
)
def test_links_devices_and_pipes_are_refused(unpack: Unpack, kind: bytes, what: str) -> None:
    with pytest.raises(ImportFailedError, match=what):
        unpack(tar_of([(tar_member("evil", kind, "/etc/passwd"), b"")]))
    long = tar_member("evil", kind, "/" + "x" * 300)
    with pytest.raises(ImportFailedError, match=what):
        unpack(tar_of([(long, b"")], format=tarfile.GNU_FORMAT))


def test_names_that_are_there_twice_are_refused(unpack: Unpack) -> None:
    with pytest.raises(ImportFailedError, match="there twice"):
        unpack(tar_of([(tar_member("a", tarfile.REGTYPE), b"")] * 2))


def test_sparse_files_and_endless_headers_are_refused(unpack: Unpack) -> None:
    sparse = tar_member("a", tarfile.REGTYPE)
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "99999999999"}
    with pytest.raises(ImportFailedError, match="sparse"):
        unpack(tar_of([(sparse, b"")]))
    long = tar_member("a", tarfile.REGTYPE)
    long.pax_headers = {"comment": "x" * 2_000_000}
    with pytest.raises(ImportFailedError, match="header of"):
        unpack(tar_of([(long, b"")]))


@promise("Errors about limits of unpacking name the limit and the way to raise it")
def test_limits_are_named_with_the_way_to_raise_them(unpack: Unpack) -> None:
    data = make_tar({"a": b"\0" * 40_000_000, "b": b"x", "c": b"y"}, mode="w:gz")
    for limits, name in [
        (UnpackLimits(members=2, ratio=5000), "members"),
        (UnpackLimits(total_bytes=40_000_000, ratio=5000), "total"),
        (UnpackLimits(member_bytes=39_999_999), "member"),
        (UnpackLimits(ratio=400), "ratio"),
    ]:
        with pytest.raises(ImportFailedError) as refused:
            unpack(data, limits)
        assert f"--unpack-limit {name}=" in refused.value.hint
    assert len(unpack(data, UnpackLimits(ratio=5000))) == 3


@promise("A damaged archive is an error that names the member")
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_a_tar_that_is_cut_short_is_damaged_wherever_it_is_cut(unpack: Unpack, mode: str) -> None:
    whole = make_tar({"a": bytes(3000), "b": b"y" * 700}, mode=mode)
    end = len(whole) if mode != "w" else 512 + 3072 + 512 + 1024 + 512  # both files, and one block of the end mark
    step = 1 if mode != "w" else 64
    for length in range(0, end - 1, step):
        with pytest.raises((ImportFailedError, UsageError)):
            unpack(whole[:length])


def test_a_checksum_that_is_wrong_is_noticed(unpack: Unpack) -> None:
    plain = bytearray(make_tar(FILES))
    plain[3] ^= 1
    with pytest.raises((ImportFailedError, UsageError)):
        unpack(bytes(plain))
    packed = bytearray(make_tar(FILES, mode="w:gz"))
    packed[-6] ^= 1  # of the CRC-32, after all data
    with pytest.raises(ImportFailedError, match="damaged"):
        unpack(bytes(packed))


_WHOLE = make_tar({"x" * 120: b"1" * 600, "b/c.jpg": bytes(50)}, format=tarfile.PAX_FORMAT)[:6144]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(_WHOLE) - 1), st.integers(0, 255)), max_size=6))
def test_whatever_bytes_are_changed_it_is_read_or_refused(unpack: Unpack, changes: list[tuple[int, int]]) -> None:
    data = bytearray(_WHOLE)
    for at, value in changes:
        data[at] = value
    try:
        files = unpack(bytes(data))
    except (ImportFailedError, UsageError):
        return
    assert all(not {"", ".", ".."} & set(path.split("/")) for path in files)


# --- folders and files ---------------------------------------------------------------------------------------------


def test_a_folder_is_read_with_links_inside_it(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "1.xml").write_bytes(b"1")
    (folder / "a" / "back\\slash").write_bytes(b"2")
    (folder / os.fsdecode(b"\xe9")).write_bytes(b"3")
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "link").symlink_to("a/1.xml")
    (folder / "again").symlink_to(folder / "a")
    assert unpacked(folder) == {
        "a/1.xml": b"1",
        "a/back\\slash": b"2",
        os.fsdecode(b"\xe9"): b"3",
        "link": b"1",
        "again/1.xml": b"1",
        "again/back\\slash": b"2",
    }
    (tmp_path / "way").symlink_to(folder)
    assert len(unpacked(tmp_path / "way")) == 6


@promise("A folder import refuses links that lead out of the folder")
@pytest.mark.parametrize("target", ["/etc/passwd", "..", "../outside", "/", "missing", "../export-2/x", "loop", "."])
def test_a_link_that_leads_out_or_nowhere_is_refused(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    for name in ("outside", "export-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"x")
    (folder / "loop").symlink_to(target)
    with pytest.raises(ImportFailedError, match=r"'loop'.*(leads out|looked at|above it)"):
        unpacked(folder)


def test_pipes_and_devices_in_a_folder_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ImportFailedError, match="no file or folder"):
        unpacked(tmp_path)


def test_a_file_that_changes_after_it_was_looked_at_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    file = folder / "a.xml"
    for change in ("grow", "shrink", "link", "pipe", "gone"):
        file.unlink(missing_ok=True)
        file.write_bytes(b"12345")
        export = open_export(folder, UnpackLimits())
        if change in ("grow", "shrink"):
            file.write_bytes(b"123456" if change == "grow" else b"1")
        else:
            file.unlink()
        if change == "link":
            file.symlink_to("/etc/passwd")
        elif change == "pipe":
            os.mkfifo(file)
        with pytest.raises(ImportFailedError, match=r"'a\.xml' is damaged"):
            list(export.read())
        export.close()


def test_limits_hold_for_folders(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / str(n)).write_bytes(b"12345")
    with pytest.raises(ImportFailedError, match="members"):
        unpacked(tmp_path, UnpackLimits(members=4))
    with pytest.raises(ImportFailedError, match="unpacks to more"):
        unpacked(tmp_path, UnpackLimits(total_bytes=24))


@pytest.mark.parametrize(
    ("name", "data"), [("a.json", b"[]"), ("a.txt", b"{}"), ("a.xml", b"<a/>"), ("a.rar", b"Rar!\x1a\x07"), ("a", b"")]
)
def test_what_is_no_export_is_wrong_usage(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match="no export"):
        open_export(tmp_path / name, UnpackLimits())


def test_an_export_must_be_here(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not on this machine"):
        open_export("s3://bucket/export.zip", UnpackLimits())
    with pytest.raises(UsageError, match="opened"):
        open_export(tmp_path / "missing", UnpackLimits())
