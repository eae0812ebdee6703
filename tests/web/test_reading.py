"""A page for reading only offers nothing that writes, whatever is followed, and refuses what is posted all the same."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from datacache import api
from datacache.settings import Settings
from datacache.web.access import INVITE, LEAVE, NAME
from tests.promises import promise
from tests.web.conftest import opened_site
from tests.web.test_pages import Read

pytestmark = pytest.mark.shared_home
_OF_A_KIND = 3


@promise("A page for reading only writes nothing, and offers nothing that does")
def test_pages_for_reading_have_no_form_that_writes_and_take_none(settings: Settings, pets: str) -> None:
    api.subset(pets, ["a/000.jpg"], name="few", settings=settings)
    for site in opened_site(settings, read_only=True):
        seen, left, kinds = {"/"}, ["/"], Counter[str]()
        offered: set[str] = set()
        while left:
            page = Read(site.get(left.pop(0)))
            offered |= {form.get("action", "itself") for form in page.all("form", method="post")}
            offered |= {has[name] for _, has in page.elements for name in ("hx-post", "formaction") if name in has}
            for link in (a.get("href", "").partition("#")[0] for a in page.all("a")):
                kind = link.partition("?")[0].partition("/")[2].partition("/")[0]
                if link not in seen and link.startswith("/") and kinds[kind] < _OF_A_KIND:
                    kinds[kind] += 1
                    seen.add(link)
                    left.append(link)
        assert {"d", "s", "image", "node", "name"} <= kinds.keys()
        assert "mark" not in kinds
        assert offered == {LEAVE, NAME, INVITE}
        csrf = re.findall('name="csrf" value="([0-9a-f]+)"', site.get("/").text)[0]
        for link in seen:
            path = link.partition("?")[0]
            assert site.post(path, x_csrf_token=csrf).status == (422 if path == NAME else 403), path
