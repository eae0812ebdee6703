"""The page of the node shows what its daemon and mounts say, starts nothing, and tells a namespace nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import pytest

from datacache import api
from datacache.settings import Settings
from datacache.web.jobs import Jobs
from datacache.web.pages.node import HitRates
from tests.promises import promise
from tests.web.conftest import Site, opened_site, restricted

MOUNTS = [["rw mount /mnt/a  s3://<b>", "         conflict a/1.jpg: the bucket has another one"], ["mount    /mnt/c"]]


def csrf_of(site: Site) -> str:
    return re.findall('name="csrf" value="([0-9a-f]+)"', site.get("/node").text)[0]


def test_without_a_daemon_the_page_says_so_and_starts_none(site: Site, settings: Settings) -> None:
    page = site.get("/node").text
    assert "No daemon runs here" in page
    assert "dsctl daemon start" in page
    assert api.running_daemon(settings) is None
    assert not (settings.home / "log").exists()


def test_tiers_reads_jobs_and_pins_are_shown(site: Site, pets: str, settings: Settings) -> None:
    job = api.warm(pets, settings=settings)
    api.pin(pets, settings)
    page = site.get("/node").text
    assert "RAM" in page
    assert "SSD" in page
    assert "1 data set in the cache, 1 pinned" in page
    assert f'Warm-up of <a href="/s/{pets}">' in page
    assert "Cancel" not in page
    part = site.get("/node", hx_request="true").text
    assert "Warm-up of" in part
    assert "<html" not in part
    form = urlencode({"csrf": csrf_of(site)}).encode()
    done = site.post(f"/node/cancel/{job['id']}", form)
    assert (done.status, done.header("location")) == (303, "/node")
    assert site.post("/node/cancel/nosuch", form).status == 404
    assert site.post(f"/node/cancel/{job['id']}").status == 403


def test_a_job_that_runs_can_be_cancelled_where_the_page_may_write(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: dict[str, Any] = {"id": "f00", "ref": "a@1", "state": "running", "background": True, "error": "", "hint": ""}
    cache = {"jobs": [job | {"bytes_done": 5, "bytes_total": 10}], "plans": [], "tiers": [], "datasets": [], "pins": []}
    cache |= {"policy": "keep", "silent_stores": [], "reads": {"hits": 0, "misses": 0, "hit_rate": None}}
    daemon = {"pid": 1, "uptime_s": 75.0, "problems": ["the disk <is> full"], "hangs": ""}
    members = [{"node": "b", "address": "b:1", "zone": "", "state": "serving", "left": 0, "seen_s": 3.0, "this": True}]
    cluster = {"cluster": "lab", "listed": False, "problem": "", "members": [members[0] | {"problem": "refuses"}]}
    cluster |= {"from_nodes": {"blocks": 3, "bytes": 3_000_000, "missed": 1}}
    state = {"daemon": daemon, "cache": cache, "cluster": cluster, "error": None, "hint": None}
    monkeypatch.setattr(api, "look_at_node", lambda _settings: state)
    for read_only in (False, True):
        for site in opened_site(settings, read_only=read_only, mounts=lambda: MOUNTS):
            page = site.get("/node").text
            assert ('action="/node/cancel/f00"' in page) is not read_only
            assert '<progress value="5" max="10" aria-label="Warm-up of a@1">' in page
            assert "The daemon runs for 1 min 15 s" in page
            assert "the disk &lt;is&gt; full" in page
            assert "rw mount /mnt/a  s3://&lt;b&gt;" in page
            assert "<bdi>conflict a/1.jpg: the bucket has another one</bdi>" in page
            assert "Cluster <bdi>lab</bdi>" in page
            assert "3 blocks (3.0 MB) came from other nodes" in page
            form = urlencode({"csrf": csrf_of(site)}).encode()
            assert site.post("/node/cancel/f00", form).status == (403 if read_only else 404)


def test_jobs_of_the_page_are_listed_with_their_visitor(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs()
    monkeypatch.setattr("datacache.web.site.Jobs", lambda: jobs)
    for site in opened_site(settings):
        jobs.start("a", "Subset <pets>", lambda _tell: "/d/pets", user="Anna", datasets=["pets"]).done.result()
        assert "Subset &lt;pets&gt;</bdi></a> of <bdi>Anna</bdi>" in site.get("/node").text


@promise("A page of one namespace names no data set of others, and shows nothing of the node")
def test_a_namespace_is_shown_nothing_of_the_node(settings: Settings) -> None:
    for site in opened_site(restricted(settings, "team"), mounts=pytest.fail):
        assert "/node" not in site.get("/").text
        assert site.get("/node").status == 404
        form = urlencode({"csrf": re.findall('name="csrf" value="([0-9a-f]+)"', site.get("/").text)[0]}).encode()
        assert site.post("/node/cancel/f00", form).status == 404


def test_a_setting_that_no_daemon_starts_with_is_told(settings: Settings) -> None:
    for site in opened_site(replace(settings, cluster="lab")):
        assert "No daemon runs here" in site.get("/node").text


def test_hit_rates_are_of_the_time_between_looks() -> None:
    rates = HitRates()
    for second in range(0, 121, 2):
        rates.add(1000 + second, 1, 9 * second, second)
    rates.add(1200, 1, 9 * 120, 120)  # nothing was read
    rates.add(1202, 2, 50, 50)  # another daemon counts from 0
    rates.add(1262, 2, 50, 60)
    first, second, last = rates.spans(1300)
    assert (first.hits, first.reads, first.height) == (540, 600, 72)
    assert first.x + first.width == pytest.approx(second.x)
    assert (second.hits, second.reads, second.ago_s) == (540, 600, 180)
    assert (last.hits, last.reads, last.height) == (0, 10, 0)
    assert last.x == pytest.approx(600 * (1 - 98 / 3600))
    rates.add(5000, 2, 50, 60)
    assert rates.spans(5000) == []
    assert HitRates().spans(5.0) == []
