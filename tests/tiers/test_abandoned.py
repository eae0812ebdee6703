"""Folders in memory whose homes were removed: they go, and no other does."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest

from datacache.core.counters import totals
from datacache.daemon import running
from datacache.tiers import memory
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import abandoned_dirs, memory_dir, remove_abandoned_dirs
from datacache.tiers.recovery import open_tiers
from dataset_cli.commands import doctor
from tests.promises import promise
from tests.tiers.test_tiers import make_block, put, read


@pytest.fixture
def settings(settings, tmp_path):
    """With a folder for memory of its own."""
    folder = tmp_path / "ram"
    folder.mkdir()
    return replace(settings, ram_dir=folder)


@pytest.fixture
def other(settings, tmp_path):
    """The folder in memory of another home, which a daemon has filled."""
    home = tmp_path / "other" / "home"
    home.mkdir(parents=True)
    with open_tiers(replace(settings, home=home)) as writer:
        assert put(writer, make_block(1, 20_000)) == [True]
    return memory_dir(home, settings.ram_dir)


@promise("A removed home's folder in memory goes when another daemon starts")
def test_the_folder_of_a_removed_home_is_told_and_removed(settings, other, tmp_path):
    assert abandoned_dirs(settings.ram_dir) == []
    shutil.rmtree(tmp_path / "other")
    found = doctor.ram(settings)
    assert (found.state, str(other) in found.hint) == ("warn", True)
    block = make_block(1, 20_000)
    with open_tiers(settings) as writer:
        assert put(writer, block) == [True]
        remove_abandoned_dirs(settings.ram_dir)
        assert read(settings, block) == block.data
    assert list(settings.ram_dir.iterdir()) == [memory_dir(settings.home, settings.ram_dir)]


@promise("A removed home's folder in memory goes when another daemon starts")
def test_what_a_reader_has_made_where_no_daemon_has_been_goes_too(settings, tmp_path):
    home = tmp_path / "third"
    home.mkdir()
    LocalBlocks(home, settings.ram_dir).counters.miss(10)
    folder = memory_dir(home, settings.ram_dir)
    assert totals(folder / "counters")["misses"] == 1
    assert abandoned_dirs(settings.ram_dir) == []
    home.rmdir()
    remove_abandoned_dirs(settings.ram_dir)
    assert not folder.exists()


def test_a_daemon_removes_it_when_it_starts(settings, other, tmp_path, monkeypatch):
    shutil.rmtree(tmp_path / "other")

    def opened(_settings):
        raise InterruptedError

    monkeypatch.setattr(running, "open_tiers", opened)
    with pytest.raises(InterruptedError):
        running.run(settings)
    assert not other.exists()


@pytest.mark.parametrize("why", ["lives", "held", "namespace", "disk", "unsaid", "foreign", "unreadable"])
def test_a_folder_stays_that_may_be_of_a_living_home(settings, other, tmp_path, monkeypatch, why):
    home, note = tmp_path / "other" / "home", other / "home.json"
    fields = json.loads(note.read_text())
    if why != "lives":
        shutil.rmtree(home.parent)
    if why == "held":
        home.mkdir(parents=True)
        with open_tiers(replace(settings, home=home)):
            shutil.rmtree(home)
            remove_abandoned_dirs(settings.ram_dir)
            assert other.exists()
            home.mkdir()
        return
    if why == "namespace":
        monkeypatch.setattr(memory, "_namespace", lambda: "mnt:[1]")
    elif why == "disk":  # that is not mounted
        note.write_text(json.dumps(fields | {"device": fields["device"] + 1}))
    elif why == "unsaid":
        note.unlink()
    elif why == "foreign":
        other.chmod(0o777)
    elif why == "unreadable":
        note.write_text(json.dumps(fields | {"home": f"{settings.ram_dir}/{'x' * 300}"}))
    before = sorted(os.listdir(other))
    remove_abandoned_dirs(settings.ram_dir)
    assert sorted(os.listdir(other)) == before
    assert doctor.ram(settings).hint == "" or "removed" not in doctor.ram(settings).message
