"""Growing pauses."""

from __future__ import annotations

import pytest

from datacache.core.breaker import pause_s


def test_a_pause_doubles_with_each_failure_up_to_the_longest() -> None:
    pauses = [pause_s(failures, first_s=0.3, longest_s=2.0) for failures in range(6)]
    assert pauses == pytest.approx([0.0, 0.3, 0.6, 1.2, 2.0, 2.0])


def test_what_fails_for_days_is_paused_for_as_well() -> None:
    assert pause_s(100_000, first_s=0.05, longest_s=5.0) == 5.0
