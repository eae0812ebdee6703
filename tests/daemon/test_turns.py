"""Turns at fetching: their order, their bytes, and who is not held up by whom."""

from __future__ import annotations

import threading

from datacache.daemon.turns import EXTRA_TURNS, QUANTUM_BYTES, FairQueue, Turn, TurnKind, Turns
from tests.promises import promise

BLOCK = QUANTUM_BYTES


class Log(list):
    """Turns in the order they began."""

    def turn(self, flow: str, size: int = BLOCK, kind: TurnKind = TurnKind.READ) -> Turn:
        turn = Turn(kind, flow, size, lambda: self.append(turn))
        return turn

    def flows(self) -> list[str]:
        return [turn.flow for turn in self]


def held_bytes(turns):
    return sum(use.held_bytes for use in turns._all.values())


def end(turns: Turns, turn: Turn) -> None:
    turns.fetched(turn)
    turns.release(turn)


def turns_of(fetching: int = 2, *, read_blocks: int = 100, fill_blocks: int = 100) -> Turns:
    return Turns(fetching, ahead=1, read_bytes=read_blocks * BLOCK, fill_bytes=fill_blocks * BLOCK)


@promise("Data sets take turns in bytes, however many readers one has")
def test_data_sets_take_turns_however_many_readers_one_has() -> None:
    queue, log = FairQueue(), Log()
    for _ in range(200):
        queue.put(log.turn("greedy"))
    for _ in range(3):
        queue.put(log.turn("small"))
    order = [queue.pop(lambda _turn: True).flow for _ in range(8)]
    assert order.count("small") == 3
    assert order[:6].count("small") >= 2
    assert len(queue) == 195


@promise("Data sets take turns in bytes, however many readers one has")
def test_turns_are_counted_in_bytes() -> None:
    queue, log = FairQueue(), Log()
    for _ in range(1000):
        queue.put(log.turn("large"))
        queue.put(log.turn("pieces", BLOCK // 4))
    order = [queue.pop(lambda _turn: True) for _ in range(200)]
    sizes = {flow: sum(turn.size_bytes for turn in order if turn.flow == flow) for flow in ("large", "pieces")}
    assert 0.7 < sizes["large"] / sizes["pieces"] < 1.5


def test_who_wants_nothing_saves_nothing_up() -> None:
    queue, log = FairQueue(), Log()
    for _ in range(50):
        queue.put(log.turn("busy"))
    for _ in range(30):
        queue.pop(lambda _turn: True)
    for _ in range(20):
        queue.put(log.turn("late"))
    order = [queue.pop(lambda _turn: True).flow for _ in range(10)]
    assert 4 <= order.count("late") <= 6


def test_what_does_not_fit_holds_up_no_other_data_set() -> None:
    queue, log = FairQueue(), Log()
    queue.put(log.turn("large"))
    queue.put(log.turn("small", 1))
    assert queue.pop(lambda turn: turn.size_bytes < 10).flow == "small"
    assert queue.pop(lambda turn: turn.size_bytes < 10) is None


def test_bytes_count_until_they_were_stored_and_sent() -> None:
    turns, log = turns_of(8, read_blocks=3), Log()
    for _ in range(10):
        turns.queue(log.turn("a"))
    assert (len(log), held_bytes(turns)) == (3, 3 * BLOCK)
    for turn in log[:]:
        turns.fetched(turn)
    assert len(log) == 3  # fetched, and not sent yet
    turns.release(log[0])
    assert (len(log), held_bytes(turns), sum(map(len, turns._waiting.values()))) == (4, 3 * BLOCK, 6)


@promise("Data sets take turns in bytes, however many readers one has")
def test_a_data_set_that_has_all_turns_keeps_no_other_one_waiting() -> None:
    turns, log = turns_of(4), Log()
    for _ in range(20):
        turns.queue(log.turn("greedy"))
    assert log.flows() == ["greedy"] * 4
    turns.queue(log.turn("small"))  # its store is another one, and answers
    assert log.flows()[4:] == ["small"]
    end(turns, log[4])
    turns.queue(log.turn("small"))
    assert log.flows()[4:] == ["small"] * 2


def test_the_reserve_is_bounded() -> None:
    turns, log = turns_of(4), Log()
    for _ in range(20):
        turns.queue(log.turn("greedy"))
    for number in range(10):
        for _ in range(10):
            turns.queue(log.turn(f"other-{number}"))
    assert len(log) == 4 + EXTRA_TURNS


@promise("Reads that somebody waits for go before reads ahead and warm-ups")
def test_reads_go_before_what_is_read_ahead_and_before_fills() -> None:
    turns, log = turns_of(1), Log()
    first = log.turn("a")
    turns.queue(first)
    turns.queue(log.turn("a", kind=TurnKind.AHEAD))  # nobody waits: it begins
    turns.queue(log.turn("a", kind=TurnKind.AHEAD))
    turns.queue(log.turn("a"))
    end(turns, log[1])
    assert [turn.kind for turn in log] == [TurnKind.READ, TurnKind.AHEAD]  # the read waits, and what is ahead behind it
    end(turns, first)
    assert [turn.kind for turn in log][2] is TurnKind.READ


@promise("Reads that somebody waits for go before reads ahead and warm-ups")
def test_few_fills_begin_while_reads_wait_and_all_when_none_does() -> None:
    turns, log = turns_of(16), Log()
    for _ in range(40):
        turns.queue(log.turn("a"))
    for _ in range(16):
        turns.queue(log.turn("b", kind=TurnKind.FILL))
    assert [turn.kind for turn in log].count(TurnKind.FILL) == 2
    for turn in log:  # grows meanwhile: each that ends lets another one begin
        if turn.kind is TurnKind.READ:
            end(turns, turn)
    assert [turn.kind for turn in log].count(TurnKind.FILL) == 16


def test_fills_of_data_sets_take_turns() -> None:
    turns, log = turns_of(1), Log()
    for _ in range(20):
        turns.queue(log.turn("greedy", kind=TurnKind.FILL))
    turns.queue(log.turn("small", kind=TurnKind.FILL))
    end(turns, log[0])
    end(turns, log[1])
    assert "small" in log.flows()[1:3]


def test_a_turn_can_be_waited_for() -> None:
    turns = turns_of(1)
    first = turns.wait(TurnKind.FILL, "a", BLOCK)
    second = []
    waiting = threading.Thread(target=lambda: second.append(turns.wait(TurnKind.FILL, "a", BLOCK)))
    waiting.start()
    end(turns, first)
    waiting.join(30)
    assert len(second) == 1


def test_what_other_nodes_wait_for_has_room_of_its_own() -> None:
    turns, log = turns_of(2, read_blocks=2), Log()
    for kind in (TurnKind.READ, TurnKind.READ, TurnKind.READ, TurnKind.NODE, TurnKind.NODE, TurnKind.NODE):
        turns.queue(log.turn("a", kind=kind))
    assert [turn.kind for turn in log] == [TurnKind.READ, TurnKind.READ, TurnKind.NODE, TurnKind.NODE]


@promise("A reader that takes nothing of an answer keeps no other one waiting")
def test_turns_are_crowded_while_they_wait_for_nothing_but_the_room_that_others_have() -> None:
    turns, log = turns_of(3, read_blocks=2), Log()
    turns.queue(log.turn("a"))
    turns.queue(log.turn("a"))
    for turn in log:
        turns.fetched(turn)
    assert not turns.crowded(TurnKind.READ)  # nobody waits
    turns.queue(log.turn("a"))
    assert turns.crowded(TurnKind.READ)
    assert not turns.crowded(TurnKind.NODE)
    turns.release(log[0])
    assert not turns.crowded(TurnKind.READ)
    busy = turns_of(1)
    for _ in range(2):
        busy.queue(log.turn("a"))
    assert not busy.crowded(TurnKind.READ)  # the one waits for a get that is under way


def test_nothing_is_left_of_what_has_ended() -> None:
    turns, log = turns_of(2), Log()
    for number in range(50):
        turns.queue(log.turn(f"d{number}", kind=TurnKind(number % 4)))
    for turn in log:
        end(turns, turn)
    assert (len(log), held_bytes(turns), sum(map(len, turns._waiting.values())), turns._by_flow) == (50, 0, 0, {})
