"""Test what a crash leaves of the journal: some prefix of the groups, up to the last acknowledged one at least."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.writeback.journal import segments as journal_segments
from datacache.writeback.journal.journal import Change, Journal
from tests.power_cut import cut_disk
from tests.promises import promise

State = dict[str, tuple[bytes, bytes]]

changes = st.builds(
    Change,
    st.sampled_from("abcdefgh"),
    st.one_of(st.none(), st.binary(max_size=20)),
    st.binary(max_size=60),
)
groups = st.lists(st.lists(changes, min_size=1, max_size=4), min_size=1, max_size=6)


class Crash(NamedTuple):
    """A folder as a crash may leave it, but for its newest segment's tail, and what may be found in it."""

    folder: Path
    newest: Path
    tail_at: int
    """What follows was written, and not synced."""
    states: list[State]
    """After each group."""
    durable: int
    """How many groups have to be there."""


def apply(state: State, group: list[Change]) -> State:
    found = dict(state)
    for key, header, blob in group:
        found.pop(key, None)
        if header is not None:
            found[key] = header, bytes(blob)
    return found


def contents(folder: Path) -> State:
    journal = Journal(folder, ballast_bytes=0)
    try:
        return {key: (header, journal.read(key)) for key, header, _ in journal.records()}
    finally:
        journal.close()


def crash(base: Path, committed: list[list[list[Change]]], last: list[list[Change]], segment_bytes: int) -> Crash:
    """Append each list of groups and commit it, then the last one. What was removed during the last commit is still
    there: nobody knows when a file system makes that durable."""
    folder = base / "journal"
    journal = Journal(folder, segment_bytes=segment_bytes, ballast_bytes=0)
    states: list[State] = [{}]
    tickets = [0]

    def write(some: list[list[Change]]) -> None:
        for group in some:
            states.append(apply(states[-1], group))
            tickets.append(journal.append(group))
        journal.commit(tickets[-1])

    for some in committed:
        write(some)
    acknowledged = tickets[-1]
    shutil.copytree(folder, base / "before")
    write(last)
    shutil.copytree(folder, base / "crashed")
    journal.close()
    for path in (base / "before").iterdir():
        if not (base / "crashed" / path.name).exists():
            path.rename(base / "crashed" / path.name)
    shutil.copytree(base / "crashed", base / "looked at")
    newest = journal_segments.open_segments(base / "looked at")[-1]
    with newest.path.open("rb") as file:
        frames = [(offset, head) for offset, head, _ in journal_segments.read_frames(file, newest)]
    synced = frames[-1][1].synced if frames else newest.header.sequence - 1
    tail_at = next((offset for offset, head in frames if head.sequence > synced), newest.size_bytes)
    durable = sum(ticket <= max(acknowledged, synced) for ticket in tickets) - 1
    return Crash(base / "crashed", base / "crashed" / newest.path.name, tail_at, states, durable)


def check(found: Crash, data: bytes, base: Path) -> None:
    """Start on what is left when the newest segment has these bytes: go on with it, and start again."""
    folder = base / "tried"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(found.folder, folder)
    (folder / found.newest.name).write_bytes(data)
    seen = contents(folder)
    assert seen in found.states[found.durable :]
    journal = Journal(folder, ballast_bytes=0)
    journal.commit(journal.append([Change("later", b"x"), Change("a", None)]))
    journal.close()
    assert contents(folder) == apply(seen, [Change("later", b"x"), Change("a", None)])


@promise("What a staging area holds is read back as written, or is an error that says where")
@settings(max_examples=25, deadline=None)
@given(
    committed=st.lists(groups, max_size=12),
    last=groups,
    segment_bytes=st.sampled_from([1, 300, 1 << 20]),
    data=st.data(),
)
def test_a_torn_tail_leaves_a_prefix_of_the_groups_with_all_that_was_acknowledged(
    tmp_path_factory: pytest.TempPathFactory,
    committed: list[list[list[Change]]],
    last: list[list[Change]],
    segment_bytes: int,
    data: st.DataObject,
) -> None:
    base = tmp_path_factory.mktemp("crash")
    found = crash(base, committed, last, segment_bytes)
    whole = found.newest.read_bytes()
    places = st.integers(found.tail_at, len(whole))
    for cut in data.draw(st.lists(places, min_size=1, max_size=4)):
        check(found, whole[:cut], base)
        check(found, whole[:cut] + bytes(len(whole) - cut), base)
    torn = bytearray(whole)
    for place in data.draw(st.lists(places, max_size=4)):
        if place < len(whole):
            torn[place] ^= data.draw(st.integers(1, 255))
    check(found, bytes(torn), base)
    shutil.rmtree(base)


def test_the_last_commit_may_be_cut_at_every_byte(tmp_path: Path) -> None:
    committed = [[[Change("a", b"1", b"x"), Change("b", b"2")]], [[Change("a", b"3")], [Change("b", None)]]]
    last = [[Change("c", b"4", b"yy"), Change("a", None)], [Change("b", b"5", b"z" * 20)], [Change("c", None)]]
    found = crash(tmp_path, committed, last, 1 << 20)
    whole = found.newest.read_bytes()
    end = len(whole.rstrip(b"\0")) + 1
    assert found.durable == 3
    assert len(whole) > end, "there are zeros behind the frames"
    for cut in range(found.tail_at, end + 1):
        check(found, whole[:cut], tmp_path)
        if cut % 10 == 0:
            check(found, whole[:cut] + bytes(len(whole) - cut), tmp_path)


@promise("`close`, `fsync` and `fdatasync` make all that was written durable, with attributes")
def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(6)
    state: State = {}
    after: State = {}
    rotate = journal_segments.Log.rotate
    with cut_disk(tmp_path) as disk:
        cuts: list[tuple[Path, list[State]]] = []

        def rotate_and_look(log: journal_segments.Log, *args: Any, **options: Any) -> journal_segments.Segment:
            made = rotate(log, *args, **options)
            if draw.random() < 0.2:
                cuts.append((disk.cut(), [state, after]))  # the new segment has its name, and nothing is in it
            return made

        monkeypatch.setattr(journal_segments.Log, "rotate", rotate_and_look)

        def look_before_it_is_durable() -> None:
            if draw.random() < 0.1:
                disk.sync()  # of what is only written any part may be on the disk, what was removed included
                cuts.append((disk.cut(), [state, after]))

        journal = Journal(
            disk.folder / "journal", segment_bytes=4096, ballast_bytes=0, before_write=look_before_it_is_durable
        )
        for number in range(200):
            group = [
                Change(str(draw.randrange(20)), None if draw.random() < 0.3 else b"%d" % number, draw.randbytes(300))
                for _ in range(3)
            ]
            after = apply(state, group)
            journal.commit(journal.append(group))
            state = after
            if draw.random() < 0.1:
                cuts.append((disk.cut(), [state]))
        assert min((disk.folder / "journal").glob("*.log")).name > "00000010.log", "nothing was cleaned"
        journal.close()
        for cut, allowed in cuts:
            with disk.after(cut) as folder:
                assert contents(folder / "journal") in allowed


# The child: threads write groups that belong together and say which were acknowledged. Thread t, group n: "t" says n,
# "t/n%7" is written, "t/(n+3)%7" dropped.
_CHILD = """
import sys, threading
from pathlib import Path
from datacache.writeback.journal.journal import Change, Journal
journal = Journal(Path(sys.argv[1]), segment_bytes=int(sys.argv[2]), ballast_bytes=0)
at = {key: int(header) for key, header, _ in journal.records() if "/" not in key}
lock = threading.Lock()
def work(who):
    n = at.get(who, 0)
    while True:
        n += 1
        mine = b"%d" % n
        ticket = journal.append([Change(who, mine), Change(f"{who}/{n % 7}", mine, mine * (n % 300)),
                                 Change(f"{who}/{(n + 3) % 7}", None)])
        if n % 3:
            journal.commit(ticket)
            with lock:
                sys.stdout.write(f"{who} {n}\\n")
                sys.stdout.flush()
print("ready", 0, flush=True)
for who in "pqrs":
    threading.Thread(target=work, args=(who,)).start()
"""


def expected(who: str, number: int) -> State:
    state: State = {}
    for n in range(max(1, number - 20), number + 1):
        mine = b"%d" % n
        group = [
            Change(who, mine),
            Change(f"{who}/{n % 7}", mine, mine * (n % 300)),
            Change(f"{who}/{(n + 3) % 7}", None),
        ]
        state = apply(state, group)
    return state


@promise("`close`, `fsync` and `fdatasync` make all that was written durable, with attributes")
@pytest.mark.parametrize("segment_bytes", [2000, 32 << 20])
def test_kill_9_loses_nothing_that_was_acknowledged_and_shows_nothing_in_halves(
    tmp_path: Path, segment_bytes: int
) -> None:
    draw = random.Random(segment_bytes)
    acknowledged = dict.fromkeys("pqrs", 0)
    folder = tmp_path / "journal"
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, folder, str(segment_bytes)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        with child:
            wait_for = draw.randrange(1, 400)
            for line in child.stdout:
                who, _, number = line.partition(" ")
                acknowledged[who] = int(number)
                wait_for -= 1
                if not wait_for:
                    child.send_signal(signal.SIGKILL)  # and read on what it had said before
        assert child.returncode == -signal.SIGKILL
        found = contents(folder)
        for who in "pqrs":
            number = int(found[who][0]) if who in found else 0
            assert number >= acknowledged[who]
            assert {key: value for key, value in found.items() if key[0] == who} == expected(who, number)
    if segment_bytes < 10_000:
        assert min(folder.glob("*.log")).name > "00000020.log", "nothing was cleaned"
        assert sum(path.stat().st_size for path in folder.glob("*.log")) < 200_000
