"""Which links of a snapshot stay inside of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.core.paths import stays_inside
from tests.promises import promise

_MOST_LINKS = 40
"""Links that the kernel follows in one path (path_resolution(7))."""


def test_a_target_is_no_longer_than_the_kernel_takes() -> None:
    assert stays_inside(b"link", b"x" * 4095)
    assert not stays_inside(b"link", b"x" * 4096)
    assert not stays_inside(b"link", b"")


@promise("Reading a snapshot of a folder never leads out of it")
@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        (b"link", b"a", True),
        (b"link", b"./a/./b", True),
        (b"a/link", b".././b", True),
        (b"a/b/link", b"../../c", True),
        (b"a/b/link", b"../..", True),
        (b"link", b"..", False),
        (b"a/link", b"../../b", False),
        (b"a/link", b"b/..", False),
        (b"a/b/link", b"../c/../d", False),
        (b"link", b"/a", False),
        (b"link", b"a\0", False),
    ],
)
def test_a_link_may_climb_to_the_root_and_then_only_go_down(path: bytes, target: bytes, inside: bool) -> None:
    assert stays_inside(path, target) is inside


def leads_out(links: dict[bytes, bytes], path: bytes) -> bool:
    """Follow a path from the root as the kernel does, where every name that is no link is a folder."""
    at: list[bytes] = []
    left, followed = path.split(b"/")[::-1], 0
    while left:
        name = left.pop()
        if name == b"..":
            if not at:
                return True
            at.pop()
        elif name not in (b"", b"."):
            target = links.get(b"/".join([*at, name]))
            if target is None:
                at.append(name)
                continue
            followed += 1
            if followed > _MOST_LINKS:
                return False
            left += target.split(b"/")[::-1]
    return False


_PATHS = st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=3).map(b"/".join)
_TARGETS = st.lists(st.sampled_from([b"a", b"b", b"..", b"..", b"."]), min_size=1, max_size=4).map(b"/".join)


@promise("Reading a snapshot of a folder never leads out of it")
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_PATHS, _TARGETS, min_size=1, max_size=8))
def test_links_that_all_stay_inside_lead_nowhere_else_together(drawn: dict[bytes, bytes]) -> None:
    links = {path: target for path, target in drawn.items() if stays_inside(path, target)}
    assert [path for path in links if leads_out(links, path)] == []
