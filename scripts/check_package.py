#!/usr/bin/env python3
"""Build the source archive and the wheel, and check what they hold. Downloads nothing; needs the extra `test`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("csi_driver", "datacache", "dataset_cli", "fuse_mount")


def faults(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel, a line each: packages, type marks, tests in it, what it asks for."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        header = message_from_bytes(archive.read(metadata))
    wrong = [f"{package}/py.typed is missing" for package in PACKAGES if f"{package}/py.typed" not in names]
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    if tops != set(PACKAGES):
        wrong.append(f"it holds {sorted(tops)}, not the packages {list(PACKAGES)}")
    wrong += [f"{name} is a test" for name in names if "tests/" in name or Path(name).name.startswith("test_")]
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        wrong.append("the licence is missing")
    if not wheel.name.endswith("-py3-none-any.whl"):
        wrong.append(f"{wheel.name} is bound to a platform: something in it needs a compiler")
    needed = [text for text in header.get_all("Requires-Dist", []) if "extra ==" not in text]
    wrong += [f"{text} is built where it is installed, so it has to stay an extra" for text in needed if "fuse" in text]
    return wrong


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, str(ROOT)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            sys.exit(built.stdout + built.stderr)
        files = sorted(Path(folder).iterdir())
        subprocess.run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files], check=True)
        [wheel] = [file for file in files if file.suffix == ".whl"]
        if wrong := faults(wheel):
            sys.exit("\n".join([f"{wheel.name}:", *(f"  {line}" for line in wrong)]))


if __name__ == "__main__":
    main()
