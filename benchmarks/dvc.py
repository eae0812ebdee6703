"""DVC as a peer: a repository around a folder, its cache beside it, nothing of it outside."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


class Dvc:
    """`dvc add` of one folder without git, as `dvc init --no-scm` makes it, and afterwards `dvc diff` of two of its
    versions, for which it needs a git history."""

    def __init__(self, programs: Path, repository: Path, folder: str) -> None:
        self._programs, self._repository, self._folder = programs, repository, folder
        self._versions: list[bytes] = []
        own = repository / ".outside"
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "GIT_"))}
        self._env |= {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "DVC_NO_ANALYTICS": "1",
            **{f"DVC_{kind}_DIR": str(own / kind.lower()) for kind in ("SITE_CACHE", "GLOBAL_CONFIG", "SYSTEM_CONFIG")},
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            **{f"GIT_{who}_{what}": "benchmark" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }
        self._run("dvc", "init", "--quiet", "--no-scm")
        self._run("dvc", "config", "core.check_update", "false")

    def add(self) -> None:
        """`dvc add` of the folder as it is now."""
        self._run("dvc", "add", "--quiet", self._folder)
        self._versions.append(self._pointer.read_bytes())

    def track(self) -> None:
        """A git commit for each of the last two versions that were added. Takes no part of any measured time."""
        self._run("git", "init", "--quiet")
        self._run("dvc", "config", "core.no_scm", "false")
        for version in self._versions[-2:]:
            self._pointer.write_bytes(version)
            self._run("git", "add", "--force", self._pointer.name, ".dvc/config")
            self._run("git", "commit", "--quiet", "--message", "version")

    def diff(self) -> str:
        """`dvc diff` of these two, as JSON."""
        return self._run("dvc", "diff", "--json", "HEAD~1", "HEAD")

    @property
    def _pointer(self) -> Path:
        return self._repository / f"{self._folder}.dvc"

    def _run(self, program: str, *arguments: str) -> str:
        found = shutil.which(program, path=self._env["PATH"])
        if found is None:
            raise SystemExit(f"{program} is not installed")
        done = subprocess.run(
            [found, *arguments], cwd=self._repository, env=self._env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{program} {arguments[0]} failed: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout
