"""The log that a server keeps for its successor: whole records or none, in little memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from datacache.writeback.sections import Defer, Load, SectionLock, complete
from datacache.writeback.state_log import MAGIC, SLOT_BYTES, Item, MemfdStateLog, Slots


class Numbers:
    """A source of numbers by name."""

    def __init__(self, log: MemfdStateLog) -> None:
        self.now: dict[str, int] = {}
        self.keep_in(log)

    def keep_in(self, log: MemfdStateLog) -> None:
        self.log = log
        log.watch(self)

    def set(self, name: str, number: int) -> None:
        self.now[name] = number
        self.log.changed.add(name)

    def describe(self, changed: set[str]) -> list[Item]:
        return [("number", name, self.now[name]) for name in changed if name in self.now]

    def everything(self) -> Iterator[Item]:
        return (("number", *item) for item in self.now.items())


def found(log: MemfdStateLog) -> dict[str, int]:
    return {name: number for _, name, number in log.items()}


def again(log: MemfdStateLog) -> MemfdStateLog:
    """Open the same memory as the next process does."""
    return MemfdStateLog(os.dup(log.fileno()))


def allocated(log: MemfdStateLog) -> int:
    return os.fstat(log.fileno()).st_blocks * 512


def test_what_is_changed_in_a_section_is_found_when_its_outermost_end_is_reached():
    log = MemfdStateLog.make()
    numbers = Numbers(log)
    lock = SectionLock(log)
    with lock:
        with lock:
            numbers.set("a", 1)
        assert found(again(log)) == {}
        numbers.set("b", 2)
    assert found(again(log)) == {"a": 1, "b": 2}
    with pytest.raises(OSError), lock:  # noqa: PT011, PT012 - whatever is raised
        numbers.set("a", 3)
        raise OSError
    assert found(again(log)) == {"a": 3, "b": 2}


def test_a_call_that_needs_something_is_made_again_and_may_not_have_changed_anything():
    numbers = Numbers(log := MemfdStateLog.make())
    lock, wanted, loaded = SectionLock(log), [1, 2], list[int]()

    def call() -> int:
        with lock:
            if wanted:
                raise Load(lambda: loaded.append(wanted.pop()))
            numbers.set("a", 1)
            raise Defer(lambda: sum(loaded))

    assert complete(call) == 3
    assert found(again(log)) == {"a": 1}
    with pytest.raises(RuntimeError), lock:  # noqa: PT012 - both belong to one section
        numbers.set("a", 2)
        raise Load(lambda: None)


def test_what_a_record_could_not_be_written_for_is_in_the_next_one():
    log = MemfdStateLog.make()
    numbers = Numbers(log)
    log.begin_anew()
    lock = SectionLock(log)
    numbers.set("a", 1)
    log.noted.append(("number", object()))
    with pytest.raises(ValueError, match="unmarshallable"), lock:
        pass
    with lock:
        pass
    assert found(again(log)) == {"a": 1}


def test_a_log_is_not_written_anew_before_all_are_there_that_have_something_in_it():
    log = MemfdStateLog.make()
    early, late = Numbers(log), Numbers(log)
    log.begin_anew()
    late.set("late", 1)
    for number in range(10_000):
        early.set(f"{number}" + 1000 * "x", number)
    log.end_section()
    after = again(log)
    early.keep_in(after)
    early.set("early", 2)
    after.end_section()
    assert found(again(after)) == early.now | late.now


def test_a_log_that_is_written_for_long_stays_small_and_says_the_same():
    log = MemfdStateLog.make()
    numbers = Numbers(log)
    log.begin_anew()
    lock = SectionLock(log)
    for number in range(60_000):
        with lock:
            numbers.set(f"{number % 100}" + 1000 * "x", number)
    assert found(again(log)) == numbers.now
    assert allocated(log) <= 12 * 2**20  # of 60 MB
    assert len(log._map) <= 24 * 2**20


def test_what_is_live_may_be_much():
    log = MemfdStateLog.make()
    numbers = Numbers(log)
    log.begin_anew()
    lock = SectionLock(log)
    for number in range(30_000):
        with lock:
            numbers.set(f"{number}" + 1000 * "x", number)
    assert found(again(log)) == numbers.now


def test_a_record_that_its_writer_was_killed_at_is_not_there_and_does_no_harm():
    log = MemfdStateLog.make()
    numbers = Numbers(log)
    lock = SectionLock(log)
    with lock:
        numbers.set("a", 1)
    end = log._end
    with lock:
        numbers.set("b" * 5000, 2)
    os.pwrite(log.fileno(), bytes(4), end)  # its length is written last
    after = again(log)
    assert found(after) == {"a": 1}
    numbers = Numbers(after)
    numbers.set("c", 3)
    after.end_section()
    assert found(again(after)) == {"a": 1, "c": 3}


def test_a_log_that_is_being_written_anew_is_the_old_one_until_it_is_done():
    log = MemfdStateLog.make()
    numbers = Numbers(log)
    lock = SectionLock(log)
    with lock:
        numbers.set("a", 1)

    class Killed(Numbers):
        def everything(self) -> Iterator[Item]:
            yield "number", "a", 5
            raise KeyboardInterrupt

    Killed(log)
    with pytest.raises(KeyboardInterrupt), lock:
        log.begin_anew()
    assert found(again(log)) == {"a": 1}
    assert allocated(log) <= 8192


def test_memory_of_another_version_is_refused():
    log = MemfdStateLog.make()
    os.pwrite(log.fileno(), bytes(reversed(MAGIC)), 0)
    with pytest.raises(ValueError, match="another version"):
        again(log)


def test_the_bytes_of_a_slot_are_there_for_the_next_process_and_others_get_other_slots():
    log = MemfdStateLog.make()
    slots = [log.slots.take() for _ in range(40)]
    assert len({slot.number for slot in slots}) == 40
    for slot in slots:
        slot.memory[:4] = slot.number.to_bytes(4, "big")
    after = again(log).slots
    assert after.look(33, 4) == b"\0\0\0\x21"
    kept = [after.take_up(number) for number in (33, 7)]
    assert [bytes(slot.memory[:4]) for slot in kept] == [b"\0\0\0\x21", b"\0\0\0\x07"]
    others = {after.take().number for _ in range(60)}
    assert len(others) == 60
    assert not others & {33, 7}


@pytest.mark.parametrize("make", [MemfdStateLog.make, Slots], ids=["kept", "alone"])
def test_free_slots_give_memory_back_but_for_some(make: Callable[[], MemfdStateLog | Slots]):
    def resident() -> int:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Rss:")) * 1024

    slots = alone = make()
    if isinstance(slots, MemfdStateLog):
        slots = slots.slots
    before = resident()
    taken = [slots.take() for _ in range(200)]
    for slot in taken:
        slot.memory[:] = bytes(SLOT_BYTES)
    assert resident() - before > 180 * SLOT_BYTES
    for slot in taken:
        slot.memory[:4] = slot.number.to_bytes(4, "big")
        slots.give_back(slot)
    if slots is not alone:  # the log says still that somebody has them: a process that begins now reads them
        assert slots.look(taken[-1].number, 4) == taken[-1].number.to_bytes(4, "big")
    slots.end_section()
    assert resident() - before < 30 * SLOT_BYTES
    assert {slots.take().number for _ in range(208)} == set(range(208))
