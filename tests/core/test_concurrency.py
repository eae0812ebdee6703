"""Test what a fork does to a value, and what trouble does to something repeated."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from datacache.core.concurrency import PerProcess, RepeatedCall


def test_a_child_makes_its_own_value_and_the_parent_keeps_its():
    value = PerProcess(os.getpid)
    assert value.get() == os.getpid()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if value.peek() is None and value.get() == os.getpid() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert value.get() == os.getpid()
    assert value.take() == os.getpid()
    assert value.peek() is None


def test_trouble_of_something_repeated_is_logged_once_until_it_has_gone_well(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = iter([OSError("away"), OSError("away"), None, ValueError("odd")])
    ended = threading.Event()

    def call() -> None:
        outcome = next(outcomes, ended)
        if outcome is ended:
            ended.set()
        elif outcome is not None:
            raise outcome

    repeated = RepeatedCall("test", call, 0.0, trouble="nothing is done", log=logging.getLogger("test"))
    repeated.start()
    assert ended.wait(60)
    repeated.stop(60)
    assert [record.getMessage() for record in caplog.records] == ["nothing is done: away", "nothing is done: odd"]
