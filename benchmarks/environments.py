"""Virtual environments for the libraries we are compared with, each in its own: they do not agree with one another on
versions, and none of them may change ours. Made once, in a folder that is kept between runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """A library in the version it is compared in."""

    name: str
    version: str
    also: tuple[str, ...] = ()
    """What else it needs to work as it is meant to."""
    first: tuple[str, ...] = ()
    """What is installed before it, in a version that it must leave alone."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


DATUMARO = Peer("datumaro", "1.13.12")
SUPERVISION = Peer("supervision", "0.31.2", ("opencv-python-headless==4.14.0.94",))
PYLABEL = Peer("pylabel", "0.1.55")
DVC = Peer("dvc", "3.67.1")

# The version we are tested with. Installed with a library that takes any, pip may bring another one, with gigabytes for
# GPUs that are not used.
_TORCH = ("torch==2.13.0",)
WEBDATASET = Peer("webdataset", "1.0.2", first=_TORCH)
MDS = Peer("mosaicml-streaming", "0.13.0", first=_TORCH)
LITDATA = Peer("litdata", "0.2.76", first=_TORCH)
ARRAY_RECORD = Peer("array_record", "0.8.6", ("numpy==2.4.6",), first=_TORCH)


class PeerUnavailableError(RuntimeError):
    """A peer could not be installed; the reason is what pip said."""


class PeerEnvironments:
    """The peers' environments in a folder; without one (`--quick`) there are no peers."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder.expanduser().absolute() if folder is not None else None

    def bin(self, peer: Peer) -> Path:
        """The folder of the environment's programs, made if need be (minutes). `PeerUnavailableError` if it cannot."""
        if self._folder is None:
            raise PeerUnavailableError("left out: --quick without --peers-dir")
        path = self._folder / f"{peer.name}-{peer.version}"
        wanted = [*peer.first, f"{peer.name}=={peer.version}", *peer.also]
        done = path / "installed.txt"  # written last: an environment without it was not finished
        if not done.is_file() or done.read_text().split() != wanted:
            print(f"installing {' '.join(wanted)} in {path} …", file=sys.stderr)
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            _run(sys.executable, "-m", "venv", str(path))
            for packages in filter(None, (peer.first, wanted)):
                _run(str(path / "bin/python"), "-m", "pip", "install", "--quiet", "--no-input", *packages)
            done.write_text("\n".join(wanted))
        return path / "bin"


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or done.stdout.splitlines()
        raise PeerUnavailableError(" ".join(errors[-2:])[:500])


def add_peers_option(arguments: argparse.ArgumentParser) -> None:
    """`--peers-dir`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "datacache-benchmarks"
    arguments.add_argument(
        "--peers-dir",
        type=Path,
        help=f"where the peers' virtual environments are, and are made if they are not (default: {cache}; with --quick"
        " there are no peers unless this is given)",
    )
    arguments.set_defaults(default_peers_dir=cache)


def environments(args: argparse.Namespace) -> PeerEnvironments:
    """Those of the command line."""
    return PeerEnvironments(args.peers_dir or (None if args.quick else args.default_peers_dir))
