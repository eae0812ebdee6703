"""Test what a fork does to a value."""

from __future__ import annotations

import os

from datacache.core.concurrency import PerProcess


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
