"""A staging area on a disk that others have filled to the last block, when its process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from datacache.settings import Settings
from tests.conftest import ROOT
from tests.promises import promise
from tests.writeback import upload_rig
from tests.writeback.upload_rig import Rig

_CHILD = """
import os, sys
from pathlib import Path
from datacache.settings import load_settings
from tests.writeback import upload_rig
upload_rig.PREFIX = sys.argv[2]
disk = Path(sys.argv[1])
rig = upload_rig.Rig(disk, "file://", load_settings())
for number in range(10):
    rig.put(f"large{number}", bytes([number]) * 300_000)
    rig.put(f"small{number}", bytes([number]) * 3_000)
if sys.argv[3] == "ended":
    rig.close()
with open(disk / "filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(bytes(4096))
    except OSError:
        pass
os._exit(9)
"""


@promise("On a full disk the next server starts, uploads what is there, and records that it did")
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_the_next_process_uploads_what_is_there_and_that_makes_room(
    settings: Settings, how: str, disk: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, bucket = disk("size=16m"), tmp_path / "bucket"
    bucket.mkdir()
    prefix = f"{bucket}/"[1:]
    monkeypatch.setattr(upload_rig, "PREFIX", prefix)
    child = [sys.executable, "-c", _CHILD, str(small), prefix, how]
    assert subprocess.run(child, cwd=ROOT, env=os.environ, check=False).returncode == 9
    assert os.statvfs(small).f_bavail == 0
    with Rig(small, "file://", settings) as rig:
        assert len(rig.engine.pendings()) == 20
        rig.start().uploader.flush(30)
        rig.engine.commit()
        number = rig.stage(b"new" * 1_000_000)  # in the place of what was uploaded
        rig.files.remove(number)
    found = {path.name: path.read_bytes() for path in bucket.iterdir()}
    expected = {f"large{number}": bytes([number]) * 300_000 for number in range(10)}
    assert found == expected | {f"small{number}": bytes([number]) * 3_000 for number in range(10)}
    with Rig(small, "file://", settings) as rig:
        assert rig.engine.pendings() == []
