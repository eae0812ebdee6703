"""README.md and docs/COMMANDS.md do what they say: their commands run as they are written, from a fresh clone.

Only the addresses of the user's own servers are filled in. What needs a cluster (docker, kubectl, helm) is not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dataset_cli.demo.faces import draw_faces
from tests.promises import promise
from tests.servers import RcloneS3

ROOT = Path(__file__).resolve().parent.parent
_CLUSTER = re.compile(r"\b(docker|kubectl|helm)\b")


def blocks(language: str) -> list[str]:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/COMMANDS.md"))
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def literal(lines: list[str], server: dict[str, str]) -> list[str]:
    """The lines as they stand, with the user's own endpoint and keys in place of the README's."""
    filled = []
    for line in lines:
        if line.startswith("export AWS_ENDPOINT_URL="):
            line = "export " + " ".join(f"{name}={value}" for name, value in server.items())
        command = line.partition("#")[0]
        assert "…" not in command, f"nobody can type this: {line}"
        assert "&&" not in command, f"bash goes on after a failure in: {line}"
        filled.append(line)
    return filled


@promise("README and guide run as they are written, from a fresh clone")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readme_runs_as_it_is_written(rclone_s3: RcloneS3, home: Path, tmp_path: Path) -> None:
    draw_faces(rclone_s3.make_bucket("faces") / "mask", count=20)
    rclone_s3.make_bucket("runs")
    clone = tmp_path / "datacache"
    files = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in filter(None, files.decode().split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
            (clone / name).chmod((ROOT / name).stat().st_mode)
    setup, *sections = [block for block in blocks("bash") if not _CLUSTER.search(block)]
    lines = [line for line in setup.splitlines() if not line.startswith("scripts/test.sh")]  # which runs this test
    assert [line.split()[0] for line in lines] == ["scripts/quickstart.sh"]
    lines += [line for block in sections for line in block.splitlines()]
    assert sum(line.startswith("dsctl ") for line in lines) > 20
    # Not the checkout's package, nor its settings: what a user has who begins here.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PIP_NO_COMPILE"] = "no"  # which pip takes for yes: most of what is installed is never imported
    done = subprocess.run(
        ["bash", "-eux", "-c", "\n".join(literal(lines, rclone_s3.env()))],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert (clone / "preview.png").read_bytes().startswith(b"\x89PNG")
    assert (clone / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert "names:" in done.stdout
    assert (clone / "exported" / "JPEGImages").is_dir()
    assert (rclone_s3.root / "runs" / "exp-7" / "log.txt").read_text() == "loss 0.1\n"
    # Python's blocks with this interpreter, which has PyTorch.
    program = "\n".join(["if True:", *(f"    {line}" for block in blocks("python") for line in block.splitlines())])
    python = subprocess.run(
        [sys.executable, "-c", program],
        cwd=home,  # not beside the clone, whose folder is called as the package is
        env=os.environ | rclone_s3.env(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert python.returncode == 0, python.stderr[-4000:]
    assert "mask-yolo@" in python.stdout
