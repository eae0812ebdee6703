"""Turns at sending: one large answer at a time of each data set while several are read."""

from __future__ import annotations

import threading

import pytest

from datacache.daemon import turns
from datacache.daemon.turns import Sends
from tests.promises import promise


@pytest.fixture
def sends():
    sends = Sends()
    for flow in ("greedy", "small"):
        sends.note_read(flow)
    return sends


def begin(sends, flow):
    """Take a turn in a thread; return what shows that it has come, and what ends it."""
    come, end = threading.Event(), threading.Event()

    def send():
        with sends.turn(flow):
            come.set()
            end.wait(60)

    threading.Thread(target=send, daemon=True).start()
    return come, end


@promise("Large blocks go one at a time to each of several data sets")
def test_a_second_answer_of_a_data_set_waits_for_the_first_and_one_of_another_does_not(sends, monkeypatch):
    monkeypatch.setattr(turns, "SLOW_S", 60.0)
    first, end_first = begin(sends, "greedy")
    assert first.wait(30)
    second, end_second = begin(sends, "greedy")
    other, end_other = begin(sends, "small")
    assert other.wait(30)
    assert not second.is_set()
    end_first.set()
    assert second.wait(30)
    end_second.set()
    end_other.set()


@promise("Large blocks go one at a time to each of several data sets")
def test_a_data_set_that_is_read_alone_has_no_turns(monkeypatch):
    monkeypatch.setattr(turns, "SLOW_S", 60.0)
    sends = Sends()
    sends.note_read("greedy")
    begun = [begin(sends, "greedy") for _ in range(5)]
    assert all(come.wait(30) for come, _ in begun)
    for _, end in begun:
        end.set()


@promise("Large blocks go one at a time to each of several data sets")
def test_a_slow_reader_keeps_others_waiting_once(sends, monkeypatch):
    monkeypatch.setattr(turns, "SLOW_S", 0.02)
    slow, end_slow = begin(sends, "greedy")
    assert slow.wait(30)
    second, end_second = begin(sends, "greedy")
    assert second.wait(30)
    end_second.set()
    monkeypatch.setattr(turns, "SLOW_S", 60.0)
    third, end_third = begin(sends, "greedy")
    assert third.wait(30)
    end_third.set()
    end_slow.set()
