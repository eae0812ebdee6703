"""The log of a job on a disk that is full: nothing that counts is lost, and no record stands behind a part of one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from datacache.core.errors import CacheError
from datacache.core.joblog import JobLog

FULL = """
import resource, sys
from pathlib import Path
from datacache.core.errors import CacheError
from datacache.core.joblog import JobLog

def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))  # then the kernel writes what has room

folder, taken = Path(sys.argv[1]), CacheError("taken")
room(20)
try:
    JobLog(folder, {"job": "x" * 40}, taken=taken)
except CacheError as exc:
    assert "File too large" in str(exc) or "No space" in str(exc), exc
else:
    raise AssertionError("half a first line was taken for one")
room(2**20)
log = JobLog(folder, {"job": "x" * 40}, taken=taken)
places = [log.add(b"first")]
room(log.path.stat().st_size + 10)
try:
    log.add(b"second" * 10)
except CacheError as exc:
    assert exc.hint
else:
    raise AssertionError("half a record was taken for one")
room(2**20)
places.append(log.add(b"third"))
assert [*log.read(iter(places))] == [b"first", b"third"]
"""


def test_on_a_full_disk_records_before_and_after_can_be_read(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], check=True, timeout=60)
    with closing(JobLog(tmp_path, {"job": "x" * 40}, taken=CacheError("taken"))) as log:
        assert [record for _, record in log.records()] == [b"first", b"third"]


def test_the_log_of_another_process_is_taken(tmp_path: Path) -> None:
    with closing(JobLog(tmp_path, {}, taken=CacheError("taken"))), pytest.raises(CacheError, match="taken"):
        JobLog(tmp_path, {}, taken=CacheError("taken"))
