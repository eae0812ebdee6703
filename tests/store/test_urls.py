"""Test what users type, cut into store and keys; and what is refused without repeating a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from datacache.core.errors import UsageError
from datacache.store.urls import split_object_url, split_url


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
    ],
)
def test_a_url_is_a_store_and_a_prefix(url: str, store: str, prefix: str) -> None:
    assert split_url(url) == (store, prefix)


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_url("./faces") == ("file://", f"{str(tmp_path)[1:]}/faces/")
    assert split_url("faces") == ("file://", f"{str(tmp_path)[1:]}/faces/")


def test_the_key_of_an_object_is_exactly_what_is_written() -> None:
    assert split_object_url("s3://bucket/a//b/../c?d") == ("s3://bucket", "a//b/../c?d")
    assert split_object_url("s3://bucket/folder/") == ("s3://bucket", "folder/")
    assert split_object_url("/data/a.jpg") == ("file://", "data/a.jpg")


@pytest.mark.parametrize("url", ["", "s3://", "s3:///key", "s3:/bucket/key", "file://host/data", "file://", "a\0b"])
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
