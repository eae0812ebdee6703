"""Which links of a snapshot stay inside of it."""

from __future__ import annotations

from datacache.core.paths import stays_inside


def test_a_target_is_no_longer_than_the_kernel_takes() -> None:
    assert stays_inside(b"link", b"x" * 4095)
    assert not stays_inside(b"link", b"x" * 4096)
    assert not stays_inside(b"link", b"")
