"""Every benchmark runs to its end at a tiny size and prints a table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ("mount_epochs", "reader", "large_file", "warm", "eviction", "metadata", "convert", "versions", "query")
BENCHMARKS += ("integrity", "loaders", "loader_decode", "first_epoch", "eviction_model", "write_path")
BENCHMARKS += ("many_mounts", "fairness", "outages", "s3_requests")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="dropping the page cache needs root")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_and_prints_its_table(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "-----" in done.stdout
    assert list(tmp_path.iterdir()) == []
