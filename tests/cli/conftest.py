"""`dsctl` as a process of its own, with the environment of the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from tests.cli import forked

ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err.splitlines()[-1])["error"]


class Dsctl(Protocol):
    def __call__(self, *arguments: str | Path, **variables: str) -> Result: ...


@pytest.fixture(scope="session")
def _forked(_session: None) -> None:
    forked.start()


@pytest.fixture
def dsctl(_forked: None, home: Path) -> Dsctl:
    def run(*arguments: str | Path, **variables: str) -> Result:
        words, environment = [str(word) for word in arguments], os.environ | {"PYTHONPATH": str(ROOT)} | variables
        if not any(name.startswith(("PYTHON", "_DSCTL")) for name in variables):
            code, out, err = forked.run(words, environment, timeout_s=120)
            return Result(code, os.fsdecode(out), os.fsdecode(err))
        done = subprocess.run(
            [sys.executable, "-m", "dataset_cli", *words],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            env=environment,
            timeout=120,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket"
    for name, data in {
        "images/1.jpg": b"one" * 100,
        "images/2.jpg": b"two" * 200,
        "labels.txt": b"x\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
