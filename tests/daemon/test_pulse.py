"""A daemon that is there and says nothing: who notices, who waits, and what goes on without it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from datacache import connect, create_snapshot, open_snapshot
from datacache.core import logs
from datacache.core.errors import DaemonSilentError, DaemonUnavailableError
from datacache.core.ids import ObjectRef
from datacache.daemon import paths
from datacache.daemon import pulse as pulse_module
from datacache.daemon.client import DaemonClient
from datacache.daemon.pulse import PulseWatch
from datacache.daemon.server import Daemon
from datacache.daemon.starting import DaemonProcess
from datacache.tiers.recovery import open_tiers
from tests.promises import promise

DATA = {f"{n:03d}.bin": bytes([n]) * 5_000 for n in range(60)}


class NoCatalog:
    url = "sqlite:///x"

    def get_blobs(self, ids):
        return {}


@pytest.fixture
def settings(settings):
    """Without warm-ups."""
    return dataclasses.replace(settings, prefetch=False)


@pytest.fixture
def snapshot(settings, tmp_path):
    """A snapshot of a folder, of which nothing is on the node."""
    (tmp_path / "bucket").mkdir()
    for name, data in DATA.items():
        (tmp_path / "bucket" / name).write_bytes(data)
    create_snapshot("mask", str(tmp_path / "bucket"), tags=["v1"], settings=settings)
    return "mask@v1"


def until(true, what):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.fixture
def stopped(settings):
    """A daemon that is stopped (SIGSTOP) and known to be silent; gives its pid."""
    client = connect(settings)
    pid = client.health()["pid"]
    until(client.beats, "no pulse")
    os.kill(pid, signal.SIGSTOP)
    yield pid
    os.kill(pid, signal.SIGCONT)


@promise("A hanging or stopped daemon costs a node's reads three seconds once")
def test_reads_past_a_stopped_daemon_wait_once_and_use_it_again_when_it_goes_on(settings, snapshot, stopped):
    # Three seconds are promised. Waiting for an answer takes 2 T + 10 s, here 130.
    settings = dataclasses.replace(settings, store_timeout_s=60.0)
    names = sorted(DATA)
    begun = time.monotonic()
    with open_snapshot(snapshot, settings) as reader:
        for name in names[:20]:
            assert reader.read(name) == DATA[name]
        assert time.monotonic() - begun < 60
        os.kill(stopped, signal.SIGCONT)
        until(lambda: PulseWatch(settings.home).silent_s() is None, "still silent")
        for name in names[20:30]:
            assert reader.read(name) == DATA[name]
    # On a busy machine it may seem silent once more while the last ten are read.
    assert 20 <= connect(settings).cache_status()["reads"]["direct_reads"] < 30


@promise("A hanging or stopped daemon costs a node's reads three seconds once")
def test_a_process_that_comes_later_does_not_wait_at_all(settings, snapshot, stopped):
    until(lambda: DaemonClient(settings).silence(), "not silent")
    late = DaemonClient(settings)
    late._once = lambda *_: pytest.fail("it was asked")  # type: ignore[assignment]
    with pytest.raises(DaemonSilentError, match=str(stopped)):
        late.block(ObjectRef("file://", "x", 1, "", ""), 0, "d", "s")


def test_a_watch_that_is_left_to_the_end_of_the_interpreter_closes_its_file(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "daemon.pulse").touch()
    watch = PulseWatch(tmp_path)
    assert not watch.beats()
    assert os.path.exists(file := f"/proc/self/fd/{watch._fd}")
    with monkeypatch.context() as patch:
        patch.setattr(pulse_module, "os", None)
        del watch
    assert not os.path.exists(file)


@promise("A daemon whose writer or gets hang counts as silent")
def test_commands_and_probes_say_so_within_seconds(settings, stopped):
    until(lambda: DaemonClient(settings).silence(), "not silent")
    environment = os.environ | settings.environment()

    def run(*command):
        return subprocess.run(
            [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    shown = run("dataset_cli.main", "status")
    assert shown.returncode == 0
    assert "does not answer" in shown.stdout
    assert f"kill -CONT {stopped}" in shown.stderr
    for command in (
        ("dataset_cli.main", "daemon", "status"),
        ("dataset_cli.main", "daemon", "stop"),
        ("datacache.daemon", "--check"),
    ):
        failed = run(*command)
        assert failed.returncode == 1, command
        assert f"pid {stopped}" in failed.stderr
    os.kill(stopped, signal.SIGCONT)
    until(DaemonClient(settings).beats, "no pulse")
    assert run("datacache.daemon", "--check").returncode == 0
    assert run("dataset_cli.main", "daemon", "status").returncode == 0


@promise("A daemon whose writer or gets hang counts as silent")
def test_without_a_daemon_the_probe_fails_and_starts_none(settings):
    environment = os.environ | settings.environment()
    command = [sys.executable, "-m", "datacache.daemon", "--check"]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode == 1
    assert not paths.lock_path(settings.home).exists()


@promise("Liveness probes notice a driver, mount host or daemon that hangs, and wait for one that opens its cache")
def test_a_daemon_that_is_opening_its_tiers_still_passes_the_probe_unless_it_is_stopped(settings, tmp_path):
    environment = os.environ | settings.environment() | {"GO_ON": str(tmp_path / "go-on")}
    program = (
        "import os, sys, time; from datacache.daemon import __main__, running; opened = running.open_tiers\n"
        "def slowly(settings):\n"
        "    while not os.path.exists(os.environ['GO_ON']): time.sleep(0.02)\n"
        "    return opened(settings)\n"
        "running.open_tiers = slowly; sys.exit(__main__.main())"
    )
    daemon = subprocess.Popen([sys.executable, "-c", program], env=environment)
    command = [sys.executable, "-m", "datacache.daemon", "--check"]

    def passes():
        return not subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode

    try:
        until(paths.keeper_socket_path(settings.home).exists, "it does not start")
        assert passes()
        assert not DaemonClient(settings).alive()
        daemon.send_signal(signal.SIGSTOP)
        assert not passes()
        daemon.send_signal(signal.SIGCONT)
        (tmp_path / "go-on").touch()
        until(DaemonClient(settings).beats, "it does not serve")
        assert passes()
    finally:
        daemon.kill()
        daemon.wait()


@promise("A hanging or stopped daemon costs a node's reads three seconds once")
def test_a_killed_daemon_is_not_silent_but_gone_and_the_next_read_starts_another(settings, snapshot):
    client = connect(settings)
    until(client.beats, "no pulse")
    pid = client.health()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not client.beats(), "a dead daemon beats")
    assert client.silence() is None
    with open_snapshot(snapshot, settings) as reader:
        assert reader.read("001.bin") == DATA["001.bin"]
    assert connect(settings).health()["pid"] != pid


@promise("A daemon whose writer or gets hang counts as silent")
def test_a_daemon_that_hangs_shows_no_pulse(settings, monkeypatch):
    monkeypatch.setattr(pulse_module, "SILENT_S", 0.5)
    monkeypatch.setattr("datacache.daemon.server._WRITER_STUCK_S", 0.2)
    (settings.home / "run").mkdir()
    go_on = threading.Event()
    with open_tiers(settings) as writer:
        daemon = Daemon(settings, writer, NoCatalog(), None)
        daemon.begin()
        watch = PulseWatch(settings.home)
        until(watch.beats, "no pulse")
        hanging = writer.call(lambda: go_on.wait(30))
        until(watch.silent_s, "it beats though its writer hangs")
        # A starved thread may miss a beat before that: the reason comes when the writer was looked at.
        until(lambda: "has taken nothing" in daemon._pulse.problem, "it says no reason")
        go_on.set()
        hanging.result()
        until(watch.beats, "it goes on")
        daemon.close()
    assert not PulseWatch(settings.home).beats()


@promise("A daemon whose writer or gets hang counts as silent")
def test_gets_that_never_end_count_as_hanging(settings, monkeypatch):
    from datacache.daemon.fetcher import Fetcher

    begun, go_on = threading.Event(), threading.Event()

    class Store:
        def read(self, ref, start, stop):
            begun.set()
            go_on.wait(30)
            return b"x" * (stop - start)

    with open_tiers(settings) as writer:
        from datacache.tiers.local import LocalBlocks

        local = LocalBlocks(settings.home, settings.ram_dir)
        fetcher = Fetcher(writer, local, lambda _: Store(), 2)
        assert fetcher.stuck_s() == 0
        waiting = fetcher.read(ObjectRef("s3://b", "k", 10, "e", ""), 0, "d").data
        assert begun.wait(30)
        until(lambda: fetcher.stuck_s() > 0.1, "no get is under way")
        go_on.set()
        waiting.result(30)
        until(lambda: fetcher.stuck_s() == 0, "it ended")
        fetcher.close()


@promise("What keeps a daemon from starting is not found out by each read anew")
def test_a_daemon_that_cannot_be_started_is_not_tried_by_each_read_anew(settings, monkeypatch):
    (settings.home / "cache").write_text("in the way")
    log = paths.log_path(settings.home)
    log.parent.mkdir()
    log.touch()
    os.truncate(log, 2 * logs.MAX_BYTES)  # the daemon begins a fresh one
    spawned = []
    spawn = DaemonProcess._spawn
    monkeypatch.setattr(DaemonProcess, "_spawn", lambda self: spawned.append(1) or spawn(self))
    monkeypatch.setattr("datacache.daemon.starting._FAILURE_S", 300.0)
    ref = ObjectRef("file://", "x", 1, "", "")
    for _ in range(10):
        with pytest.raises(DaemonUnavailableError, match="File exists"):
            DaemonClient(settings).block(ref, 0, "d", "s")
    assert len(spawned) == 1
    with pytest.raises(DaemonUnavailableError, match="File exists"):
        connect(settings)  # who asks for a daemon has it tried again
    assert len(spawned) == 2


def test_a_daemon_that_begins_to_beat_where_an_ended_one_has_left_its_last_beat_is_never_silent(settings, monkeypatch):
    file = settings.home / "run" / "daemon.pulse"
    file.parent.mkdir(parents=True)
    watch, seen = PulseWatch(settings.home), []
    held = PulseWatch._held

    def begins(self):  # between the two looks of a reader, and as far as the lock
        pulse = pulse_module.Pulse(settings.home, str)
        monkeypatch.setattr(PulseWatch, "_held", held)
        monkeypatch.setattr(pulse_module.fcntl, "fcntl", lambda *_: seen.append(watch._age_s()))
        os.close(pulse._open())
        return True

    monkeypatch.setattr(PulseWatch, "_held", begins)
    file.write_bytes(bytes(8))
    assert watch.silent_s() is None
    assert len(seen) == 1
    assert seen[0] < 3


def test_a_daemon_that_ends_without_a_word_is_not_given_the_words_of_one_before_it(settings, monkeypatch):
    log = paths.log_path(settings.home)
    log.parent.mkdir(parents=True)
    log.write_text("error: the disk was full yesterday\n")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DaemonUnavailableError, match=r"it ended \(1\) and said nothing"):
        connect(settings)


@promise("A pin of a snapshot of a million files is waited for")
def test_what_takes_long_is_waited_for_whatever_the_patience_with_stores(settings, monkeypatch):
    """A pin of a million files takes the daemon longer than a store may take for an answer."""
    waited: list[float] = []

    def once(_self, _talk, timeout_s, **_more):
        waited.append(timeout_s)
        return {"ref": "many@1", "pinned": True, "freed_bytes": 0}

    monkeypatch.setattr(DaemonClient, "_once", once)
    client = DaemonClient(dataclasses.replace(settings, store_timeout_s=0.5))
    client.pin("many")
    client.unpin("many")
    client.evict("many")
    assert len(waited) == 3
    assert min(waited) > 500
