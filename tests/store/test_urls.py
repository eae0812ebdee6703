"""Test what users type, cut into store and keys; and what is refused without repeating a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import UsageError
from datacache.settings import Settings
from datacache.store.urls import join_url, split_object_url, split_url


@pytest.mark.parametrize(
    ("url", "store", "prefix"),
    [
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/", "s3://bucket", ""),
        ("s3://bucket/a/b", "s3://bucket", "a/b/"),
        ("s3://bucket/a/b/", "s3://bucket", "a/b/"),
        ("S3://bucket/a", "s3://bucket", "a/"),
        ("s3a://bucket/a", "s3://bucket", "a/"),
        ("s3://bucket//lead", "s3://bucket", "/lead/"),
        ("s3://bucket/a/../b", "s3://bucket", "a/../b/"),
        ("s3://bucket/a%20b?c#d", "s3://bucket", "a%20b?c#d/"),
        ("s3://bucket/mail@home:1/x", "s3://bucket", "mail@home:1/x/"),
        ("gcs://bucket/a", "gs://bucket", "a/"),
        ("memory://name", "memory://name", ""),
        ("https://host:8080/a", "https://host:8080", "a/"),
        ("https://[::1]:8080/a?page=2", "https://[::1]:8080", "a?page=2/"),
        ("sftp://me@host/data", "sftp://me@host", "data/"),
        (
            "abfs://container@account.dfs.core.windows.net/a",
            "abfs://container@account.dfs.core.windows.net",
            "a/",
        ),
        ("file:///data/faces", "file://", "data/faces/"),
        ("file://localhost/data", "file://", "data/"),
        ("file:///", "file://", ""),
        ("/data/faces", "file://", "data/faces/"),
        ("/data/./x/../faces/", "file://", "data/faces/"),
        ("/", "file://", ""),
        ("/data/a b%20#?", "file://", "data/a b%20#?/"),
        ("file:///data/a b%20#?%25", "file://", "data/a b #?%/"),
        ("file:///data/x/%2e%2E/y", "file://", "data/y/"),
        ("file:///100%/%zz", "file://", "100%/%zz/"),
    ],
)
def test_a_url_is_a_store_and_a_prefix(url: str, store: str, prefix: str) -> None:
    assert split_url(url) == (store, prefix)


@pytest.mark.parametrize("name", ["a b", "a%20b", "100%", "?#&", "é", os.fsdecode(b"\xff%\xfe")])
def test_a_path_and_its_url_are_the_same_place(name: str) -> None:
    path = Path("/data", name)
    there = split_url(str(path))
    assert split_url(path.as_uri()) == there == ("file://", f"data/{name}/")
    assert split_url(join_url(*there)) == there


def test_a_folder_with_a_percent_sign_in_its_name_is_read_by_either_name(tmp_path: Path, settings: Settings) -> None:
    for n, name in enumerate(["a%20b", "a b"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(str(n))
        for url in (str(tmp_path / name), (tmp_path / name).as_uri()):
            record = api.create_snapshot(f"data-{n}", url, settings=settings)
            assert split_url(record.origin) == split_url(str(tmp_path / name))
            with api.open_snapshot(record.ref, settings) as snapshot:
                assert snapshot.read("x") == str(n).encode()
            with api.open_url(record.origin, settings) as opened:
                assert opened.read("x") == str(n).encode()


def test_keys_of_buckets_are_joined_as_they_are() -> None:
    assert join_url("s3://bucket", "a%20b/") == "s3://bucket/a%20b/"


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_url("./faces") == ("file://", f"{str(tmp_path)[1:]}/faces/")
    assert split_url("faces") == ("file://", f"{str(tmp_path)[1:]}/faces/")


def test_the_key_of_an_object_is_exactly_what_is_written() -> None:
    assert split_object_url("s3://bucket/a//b/../c?d") == ("s3://bucket", "a//b/../c?d")
    assert split_object_url("s3://bucket/folder/") == ("s3://bucket", "folder/")
    assert split_object_url("/data/a.jpg") == ("file://", "data/a.jpg")


@pytest.mark.parametrize(
    "url", ["", "s3://", "s3:///key", "s3:/bucket/key", "file://host/data", "file://", "a\0b", "file:///a%00b"]
)
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        split_url(url)


@pytest.mark.parametrize("url", ["datacache://faces", "datacache://faces@v1", "datacache://faces@v1/images/"])
def test_a_snapshot_is_no_place_and_the_error_says_what_to_do_instead(url: str) -> None:
    with pytest.raises(UsageError, match="a snapshot, not a bucket or folder") as caught:
        split_url(url)
    assert "dsctl convert" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:SECRETSECRET@bucket/a",
        "s3://AKIAKEY:SECRET/SECRET@bucket/a",
        "s3://AKIAKEY:12345678/SECRET@bucket/a",
        "s3://SECRET@bucket/a",
        "https://me:SECRET@host/a",
        "https://SECRET@host/a",
        "sftp://me:SECRET@host/a",
        "https://host/a?X-Amz-Algorithm=x&X-Amz-Signature=SECRET",
        "https://host/a?sv=1&sig=SECRET",
        "s3://bucket/a?X-Amz-Security-Token=SECRET",
        "https://host/a?token=SECRET",
        "https://host?token=SECRET",
    ],
)
def test_a_url_with_credentials_is_refused_and_they_are_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_url(url)
    said = f"{caught.value!r} {caught.value} {caught.value.hint}"
    assert "SECRET" not in said
    assert "AKIAKEY" not in said
    assert "12345678" not in said
    assert "credentials" in said
