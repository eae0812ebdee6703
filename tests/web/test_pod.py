"""The page in a pod: a shared catalog, images in buckets, an empty home, and no daemon within reach."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from datacache import api
from datacache.settings import load_settings
from tests.servers import Mongod, RcloneS3
from tests.web.conftest import opened_site, write_coco


def test_a_page_without_a_daemon_shows_images_of_a_bucket(
    tmp_path: Path, mongod: Mongod, rclone_s3: RcloneS3, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = f"pets-{uuid.uuid4().hex[:12]}"
    variables = rclone_s3.env() | {"DATACACHE_CATALOG": mongod.database_url(), "DATACACHE_DAEMON": "external"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    images = {b"a.jpg": [("cat", [10.0, 10.0, 30.0, 20.0])], b"b.jpg": [("dog", [5.0, 5.0, 20.0, 20.0])]}
    write_coco(rclone_s3.make_bucket(bucket), images)
    settings = load_settings()
    ref = api.create_snapshot("pets", f"s3://{bucket}", settings=settings).ref
    for site in opened_site(settings):
        page = site.get(f"/s/{ref}").text
        assert "cat" in page
        assert "b.jpg" in page
        for path in ("thumb/{}?path=a.jpg", "whole/{}?path=b.jpg", "cover/pets"):
            assert site.get("/" + path.format(ref)).header("content-type") == "image/jpeg"
        assert "DATACACHE_DAEMON=external" in site.get("/node").text
    assert not (home / "log" / "daemon.log").exists()
