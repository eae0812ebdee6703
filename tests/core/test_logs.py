"""Logs that stay small."""

from __future__ import annotations

import logging
import subprocess
import sys

from datacache.core import logs
from tests.promises import promise

UNLINKED = """
import os, sys
os.unlink(sys.argv[1])
from datacache.core import logs
logs.log_to_stderr("%(message)s")
print("started")
"""

FLOOD = """
import logging, sys
from datacache.core import logs
logs.MAX_BYTES = 100_000
logs.log_to_stderr("%(message)s")
for n in range(20_000):
    logging.getLogger("x").warning("line of its own " + str(n))
print("the end", file=sys.stderr)
"""


LEVELS = """
import logging, sys
from datacache.core import logs
logs.log_to_stderr("%(name)s %(levelname)s")
logs.set_level(sys.argv[1])
for name in ("datacache.x", "csi_driver.node", "botocore"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(name).log(level, "a line")
"""


def run(program, log):
    with log.open("ab") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, stderr=out, check=True)


@promise("Logs stay small")
def test_a_flood_of_lines_takes_two_files_of_bounded_size(tmp_path):
    log = tmp_path / "daemon.log"
    run(FLOOD, log)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.log", "daemon.log.1"]
    assert all(path.stat().st_size < 110_000 for path in tmp_path.iterdir())
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text().endswith("line of its own 19999\nthe end\n")


@promise("Logs stay small")
def test_the_same_line_is_written_a_few_times_and_then_counted(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    repeated = logs.Repeated()

    def say(number):
        return logging.LogRecord("x", logging.ERROR, "x.py", 7, "somebody cannot be let in: %d", (number,), None)

    assert sum(repeated.filter(say(n)) for n in range(10_000)) == 20
    assert repeated.filter(logging.LogRecord("x", logging.ERROR, "x.py", 8, "another line", None, None))
    now_s = 61.0
    last = say(10_000)
    assert repeated.filter(last)
    assert last.getMessage() == "somebody cannot be let in: 10000 (and 9,980 more like it)"


def test_a_line_about_one_thing_hides_none_about_another(monkeypatch):
    monkeypatch.setattr(logs.time, "monotonic", lambda: 0.0)
    repeated = logs.Repeated()

    def say(about):
        record = logging.LogRecord("x", logging.ERROR, "x.py", 7, "%s cannot be opened", (about,), None)
        record.about = about
        return record

    assert sum(repeated.filter(say("/mnt/noisy")) for _ in range(1_000)) == 20
    assert repeated.filter(say("/mnt/quiet"))


def test_a_process_starts_whose_log_was_removed_when_it_was_large(tmp_path):
    log = tmp_path / "daemon.log"
    log.write_bytes(bytes(logs.MAX_BYTES + 1))
    with log.open("ab") as file:
        done = subprocess.run(
            [sys.executable, "-c", UNLINKED, log], stderr=file, stdout=subprocess.PIPE, text=True, check=True
        )
    assert done.stdout == "started\n"


@promise("Logs stay small")
def test_a_process_whose_file_another_has_moved_goes_on_in_the_new_one(tmp_path):
    log = tmp_path / "daemon.log"
    with log.open("ab") as file:
        log.rename(f"{log}.1")
        log.touch(0o600)
        logs.bound(file.fileno(), 100)
        file.write(b"here\n")
    assert log.read_text() == "here\n"


def test_the_level_that_is_set_is_that_of_our_packages_alone():
    def lines(level):
        command = [sys.executable, "-c", LEVELS, level]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr.splitlines()

    others = ["botocore INFO", "botocore WARNING"]
    assert lines("warning") == ["datacache.x WARNING", "csi_driver.node WARNING", *others]
    assert len(lines("debug")) == 8
