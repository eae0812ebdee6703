"""The generated messages are those of the `.proto` files beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIRE = ROOT / "csi_driver" / "wire"


@pytest.mark.parametrize("name", ["csi", "registration"])
def test_the_generated_files_are_what_the_proto_gives(tmp_path: Path, name: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}",
         f"csi_driver/wire/{name}.proto"],
        cwd=ROOT,
        check=True,
    )  # fmt: skip
    for suffix in ("_pb2.py", "_pb2.pyi"):
        made = tmp_path / "csi_driver" / "wire" / f"{name}{suffix}"
        assert made.read_text() == (WIRE / f"{name}{suffix}").read_text(), "run scripts/generate_protos.sh"
