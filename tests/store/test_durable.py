"""Durable means durable: the bytes and the names, as the kernel is asked for them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import program

WRITERS = {
    "put": "LocalStore().put(key, b'data')",
    "put in new folders": "LocalStore().put(key, b'data')",
    "put_file": "LocalStore().put_file(key, source)",
    "take_file": "LocalStore().take_file(key, source)",
    "bucket": "LocalBucket().write(key, b'data', {}, expect=None)",
    "pins": "write_pins(Path('/' + key), {'a@b': 'a'})",
    "journal": "make_segment(Path('/' + key).parent, None, first=1, sequence=1)",
}
_PRELUDE = """
import sys
from pathlib import Path
from datacache.store.local.store import LocalStore
from datacache.store.local.bucket import LocalBucket
from datacache.tiers.writer import write_pins
from datacache.writeback.journal.segments import make_segment
key, source = sys.argv[1], Path(sys.argv[2])
"""


@pytest.mark.parametrize("how", WRITERS)
def test_a_file_and_its_name_are_synced_before_the_writer_returns(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "new" / "newer" if "folders" in how else tmp_path
    source = tmp_path / "source"
    source.write_bytes(b"data")
    target, log = folder / ("00000001.log" if how == "journal" else "target"), tmp_path / "strace.log"
    subprocess.run(
        [program("strace", package="strace"), "-f", "-y", "-o", log, "-e", "trace=/fsync|fdatasync|rename|mkdir", "--",
         sys.executable, "-c", _PRELUDE + WRITERS[how], str(target)[1:], str(source)],
        check=True,
        timeout=120,
    )  # fmt: skip
    calls = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    renamed = next(n for n, call in enumerate(calls) if call.startswith("rename") and f'"{target}"' in call)
    beside = re.findall(r'"([^"]*)"', calls[renamed])[0]
    assert any(re.match(rf"f(data)?sync\(\d+<{re.escape(beside)}>\)", call) for call in calls[:renamed])
    assert any(re.match(rf"fsync\(\d+<{re.escape(str(folder))}>\) += 0", call) for call in calls[renamed:])
    assert target.exists()
    for made in (parent for parent in (folder, folder.parent) if parent not in (tmp_path, tmp_path.parent)):
        made_at = next(
            n for n, call in enumerate(calls) if call.startswith("mkdir") and f'"{made}"' in call and "= 0" in call
        )
        above = re.escape(str(made.parent))
        assert any(re.match(rf"fsync\(\d+<{above}>\)", call) for call in calls[made_at:renamed])
