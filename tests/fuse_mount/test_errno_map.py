"""Failures are told apart by errno and logged once."""

from __future__ import annotations

import errno
import logging

import pytest

from datacache.core.errors import DaemonUnavailableError, ObjectChangedError, StoreUnavailableError
from datacache.core.logs import Repeated
from fuse_mount.errno_map import FailureLog, errno_of
from tests.promises import promise


def test_unknown_errors_are_eio() -> None:
    assert errno_of(ValueError("x")) == errno.EIO
    assert errno_of(StoreUnavailableError("x")) == errno_of(DaemonUnavailableError("x")) == errno.EIO
    assert errno_of(ObjectChangedError("x")) == errno.ESTALE


def test_the_same_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    with caplog.at_level(logging.ERROR, "fuse_mount"):
        assert [log.report("a.jpg", ValueError("broken")) for _ in range(3)] == [True, False, False]
        assert log.report("b.jpg", ValueError("broken"))
    assert [record.getMessage() for record in caplog.records] == [
        "a.jpg: ValueError: broken",
        "b.jpg: ValueError: broken",
    ]


def test_a_flood_of_failures_is_counted_instead(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    log = FailureLog(burst=2)
    with caplog.at_level(logging.ERROR, "fuse_mount"):
        assert [log.report(str(number), ValueError("x")) for number in range(5)] == [
            True,
            True,
            False,
            False,
            False,
        ]
        now = 101.0
        assert log.report("later", ValueError("x"))
    assert "(3 other failures were not logged)" in caplog.records[-1].getMessage()


@promise("A mount with many failing reads hides no failure of another in the log they share")
def test_a_mount_with_many_failures_hides_no_failure_of_another_in_the_log_that_they_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noisy, quiet = FailureLog(prefix="/mnt/noisy: ", burst=1_000), FailureLog(prefix="/mnt/quiet: ")
    caplog.handler.addFilter(repeated := Repeated())
    try:
        for number in range(100):
            noisy.report(f"{number}.jpg", ValueError("broken"))
        quiet.report("a.jpg", ValueError("broken"))
    finally:
        caplog.handler.removeFilter(repeated)
    assert caplog.records[-1].getMessage() == "/mnt/quiet: a.jpg: ValueError: broken"
    assert len(caplog.records) == 21
