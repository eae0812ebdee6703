"""Every benchmark runs to its end at a tiny size and prints a table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import RESULTS, ResultTable, write_results

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = (
    "mount_epochs",
    "reader",
    "large_file",
    "warm",
    "misses",
    "exchange",
    "eviction",
    "metadata",
    "convert",
    "versions",
    "query",
)
BENCHMARKS += ("integrity", "loaders", "loader_decode", "first_epoch", "eviction_model", "write_path")
BENCHMARKS += ("many_mounts", "fairness", "outages", "s3_requests", "cluster", "cluster_soak")
BENCHMARKS += ("cluster_simulation", "cluster_attack", "cluster_peer", "disk_limits", "write_trees", "placement")
BENCHMARKS += ("kinds_peers", "polygons", "page", "evaluate", "weights", "predict", "video", "listing", "engines")


LONG = {
    "cluster",
    "cluster_attack",
    "cluster_peer",
    "cluster_soak",
    "fairness",
    "first_epoch",
    "loader_decode",
    "loaders",
    "metadata",
}
LONG |= {
    "engines",
    "large_file",
    "mount_epochs",
    "predict",
    "outages",
    "versions",
    "weights",
    "write_path",
    "write_trees",
}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="dropping the page cache needs root")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in BENCHMARKS])
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


def test_every_benchmark_has_a_place_for_its_results() -> None:
    files = [*(ROOT / "benchmarks").glob("*.py")]
    scripts = {
        file.stem
        for file in files
        if re.search(r"^ +with \(?\s*benchmark\(|^ +benchmark\(__doc__", file.read_text(), re.MULTILINE)
    }
    assert scripts == set(BENCHMARKS)
    assert sorted(re.findall(r"^<!-- benchmark: (\w+) -->$", RESULTS.read_text(), re.MULTILINE)) == sorted(BENCHMARKS)


def test_results_take_the_place_of_former_ones_and_of_no_others(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text("A\n<!-- benchmark: one -->\n<!-- end -->\nB\n<!-- benchmark: two -->\nold\n<!-- end -->\n")
    table = ResultTable("Sizes", "of", "files/s")
    table.row("a", 1234.5)
    for _ in range(2):
        write_results(page, "one", [table])
    assert page.read_text() == (
        "A\n<!-- benchmark: one -->\nSizes:\n\n| of | files/s |\n|---|---:|\n| a | 1,234 |\n<!-- end -->\n"
        "B\n<!-- benchmark: two -->\nold\n<!-- end -->\n"
    )
    with pytest.raises(SystemExit, match="no place for three"):
        write_results(page, "three", [table])
