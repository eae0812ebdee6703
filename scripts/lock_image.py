"""The image's packages, with versions and checksums: `deploy/requirements.lock`.

    python scripts/lock_image.py            # after a change of the dependencies, or for newer versions: write it anew
    python scripts/lock_image.py --check    # say what of it does not fit pyproject.toml; exit code 1

pip decides, for the Python and the machine that this runs on, which have to be the image's (deploy/Dockerfile): Python
3.11, x86-64. Then it looks for the same versions for arm64. It installs nothing. The image is built from these files
and no others (`pip install --require-hashes`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "deploy" / "requirements.lock"
EXTRAS = ("rw", "k8s", "s3fs", "ui")
"""Of the image, as deploy/Dockerfile has it."""
PYTHON = (3, 11)
ARM = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)] + ["manylinux2014_aarch64"]
"""The kinds of wheels that the image's glibc takes on arm64: 2.36 is Debian 12's."""
HEADER = "# Made by scripts/lock_image.py: what the image is built from. Change that, or pyproject.toml.\n"


def required(extras: Iterable[str] = EXTRAS) -> list[Requirement]:
    """Return what pyproject.toml asks for, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for name in extras for text in project["optional-dependencies"][name])]
    return [Requirement(text) for text in texts]


def read(text: str) -> dict[str, tuple[str, list[str]]]:
    """Version and checksums of each package of a lock, by its name. `ValueError` names a line that is no such thing."""
    found = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        pinned, *digests = line.split(" --hash=")
        name, equals, version = pinned.partition("==")
        if not equals or not digests or not all(digest.startswith("sha256:") for digest in digests):
            raise ValueError(f"no name, version and checksums: {line}")
        found[canonicalize_name(name)] = (version, digests)
    return found


def misfits(lock: dict[str, tuple[str, list[str]]]) -> list[str]:
    """Return what pyproject.toml asks for and a lock does not have."""
    wrong = []
    for requirement in required():
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version, _ = lock.get(canonicalize_name(requirement.name), ("", []))
        if not version:
            wrong.append(f"{requirement.name} is not in it")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} is asked for, and {version} is in it")
    return wrong


def solve() -> str:
    """The text of a new lock."""
    if sys.version_info[:2] != PYTHON:
        raise SystemExit(f"the image has Python {PYTHON[0]}.{PYTHON[1]}: run this with it")
    found = _chosen(map(str, required()))
    sources = {pin for pin, (file, _) in found.items() if not file.endswith(".whl")}  # which are built anywhere
    wheels = ["--no-deps", "--only-binary=:all:", "--target=.", f"--python-version={PYTHON[0]}.{PYTHON[1]}"]
    on_arm = _chosen([*wheels, *(f"--platform={each}" for each in ARM), *(found.keys() - sources)])
    return HEADER + "".join(f"{pin} {_hashes(found[pin], on_arm.get(pin, found[pin]))}\n" for pin in sorted(found))


def _chosen(arguments: Iterable[str]) -> dict[str, tuple[str, str]]:
    """File and checksum of each package that pip would install, by its name and version."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    found = {}
    for each in json.loads(done.stdout)["install"]:
        metadata: dict[str, Any] = each["metadata"]
        of_file = each["download_info"]["url"], each["download_info"]["archive_info"]["hashes"]["sha256"]
        found[f"{canonicalize_name(metadata['name'])}=={metadata['version']}"] = of_file
    return found


def _hashes(*files: tuple[str, str]) -> str:
    return " ".join(f"--hash=sha256:{digest}" for digest in dict.fromkeys(digest for _, digest in files))


def main() -> int:
    """Write the lock, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say what does not fit")
    arguments = parser.parse_args()
    if not arguments.check:
        LOCK.write_text(solve(), encoding="utf-8")
    wrong = misfits(read(LOCK.read_text(encoding="utf-8")))
    for words in wrong:
        sys.stderr.write(f"{LOCK.relative_to(ROOT)}: {words}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
