"""A daemon outlives the shell that started it: shells that come later read with their own keys and endpoints."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from datacache import api, connect, create_snapshot
from datacache.core.errors import UsageError
from datacache.daemon import paths
from datacache.settings import load_settings
from datacache.store.credentials import Environments
from tests.promises import promise
from tests.servers import RcloneS3

ROOT = Path(__file__).resolve().parents[2]
READ = """
import sys
from datacache import open_snapshot
with open_snapshot(sys.argv[1]) as snapshot:
    sys.stdout.buffer.write(snapshot.read(sys.argv[2]))
"""


def shell(program, *arguments, unset=(), **variables):
    """A process of another shell."""
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        timeout=120,
        check=False,
    )


def read(ref, path, **variables):
    done = shell(("-c", READ), ref, path, **variables)
    return done.stdout, done.stderr.decode()


def warm(**variables):
    return shell(("-m", "dataset_cli"), "warm", "faces@latest", **variables)


@pytest.fixture
def faces(rclone_s3, settings, monkeypatch):
    """A snapshot of a bucket, and a daemon that was started by a shell without any credentials."""
    name = f"faces-{secrets.token_hex(4)}"
    folder = rclone_s3.make_bucket(name)
    for number in range(4):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    with monkeypatch.context() as keys:
        for variable, value in rclone_s3.env().items():
            keys.setenv(variable, value)
        create_snapshot("faces", f"s3://{name}")
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    client = connect(load_settings())
    yield name
    client.stop()


def daemon_pid():
    return api.running_daemon(load_settings()).health()["pid"]


@promise("A shell reads with its own AWS variables through another shell's daemon")
def test_a_shell_with_keys_reads_through_a_daemon_that_was_started_without(faces, rclone_s3, settings):
    pid = daemon_pid()
    data, said = read("faces@latest", "0.bin", **rclone_s3.env())
    assert data == b"\0" * 1000, said
    assert "AWS_ACCESS_KEY_ID" in said
    warm = shell(("-m", "dataset_cli"), "warm", "faces@latest", **rclone_s3.env())
    assert warm.returncode == 0, warm.stderr
    assert warm.stderr.decode().count("daemon reaches") == 0  # it has said so
    assert daemon_pid() == pid
    log = paths.log_path(settings.home).read_text()
    assert "AWS_SECRET_ACCESS_KEY" in log
    for secret in (rclone_s3.access_key, rclone_s3.secret_key):
        assert secret not in log + said
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()


@promise("The names of variables that a daemon took are told, their values never")
def test_dsctl_says_in_one_line_that_the_daemon_reads_with_this_shells_variables(faces, rclone_s3):
    warm = shell(("-m", "dataset_cli"), "warm", "faces@latest", **rclone_s3.env())
    assert warm.returncode == 0, warm.stderr
    [line] = [line for line in warm.stderr.decode().splitlines() if "the daemon reaches stores" in line]
    assert "AWS_ACCESS_KEY_ID" in line
    assert rclone_s3.secret_key not in line


def test_dsctl_says_what_the_daemon_does_without_from_now_on(faces, rclone_s3):
    assert warm(**rclone_s3.env(), AWS_SESSION_TOKEN="t").returncode == 0
    said = warm(**rclone_s3.env()).stderr.decode()
    assert "without AWS_SESSION_TOKEN (not set in this shell) from now on" in said
    assert "of this shell" not in said


@pytest.mark.parametrize("command", [("doctor",), ("status",), ("cache", "status"), ("jobs",), ("status", "--metrics")])
def test_a_command_that_only_looks_has_the_daemon_go_on_with_what_works(faces, rclone_s3, command):
    assert read("faces@latest", "0.bin", **rclone_s3.env())[0] == bytes(1000)
    looking = shell(("-m", "dataset_cli"), *command, **(rclone_s3.env() | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}))
    assert b"from now on" not in looking.stderr
    log = paths.log_path(load_settings().home).read_text()
    assert log.count("another shell's") == 1, "the one that has read"


@promise("A shell reads with its own AWS variables through another shell's daemon")
def test_rotated_keys_and_shells_with_wrong_ones_do_not_hinder_those_with_right_ones(faces, rclone_s3):
    right = rclone_s3.env()
    wrong = right | {"AWS_ACCESS_KEY_ID": "old", "AWS_SECRET_ACCESS_KEY": "rotated-away"}
    data, said = read("faces@latest", "0.bin", **wrong)
    assert data == b""
    assert "StoreAccessError" in said
    assert read("faces@latest", "1.bin", **right)[0] == b"\1" * 1000
    # The keys of a shell that is there still are tried where the newest are refused.
    assert read("faces@latest", "2.bin", **wrong)[0] == b"\2" * 1000
    assert read("faces@latest", "3.bin", **right)[0] == b"\3" * 1000


@promise("A shell reads with its own AWS variables through another shell's daemon")
def test_a_profile_that_is_written_again_is_read_again(faces, rclone_s3, tmp_path):
    file = tmp_path / "profiles"
    variables = {name: value for name, value in rclone_s3.env().items() if "KEY" not in name}
    variables |= {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": "team"}
    file.write_text("[team]\naws_access_key_id = old\naws_secret_access_key = wrong\n")
    assert warm(**variables).returncode == 1
    file.write_text(
        f"[team]\naws_access_key_id = {rclone_s3.access_key}\naws_secret_access_key = {rclone_s3.secret_key}\n"
    )
    pid = daemon_pid()
    done = warm(**variables)  # by the daemon: nothing is read past it
    assert done.returncode == 0, done.stderr
    assert daemon_pid() == pid
    assert [read("faces@latest", f"{number}.bin")[0] for number in range(4)] == [bytes([n]) * 1000 for n in range(4)]


@promise("A shell reads with its own AWS variables through another shell's daemon")
def test_another_endpoint_is_asked_from_then_on(faces, rclone_s3, tmp_path):
    right = rclone_s3.env()
    with RcloneS3(tmp_path / "moved") as moved:
        folder = moved.make_bucket(faces)
        for number in range(4):
            (folder / f"{number}.bin").write_bytes(bytes([number]) * 1000)
        assert read("faces@latest", "0.bin", **right)[0] == b"\0" * 1000
        before = rclone_s3.get_count(faces)
        done = warm(**moved.env())  # by the daemon: nothing is read past it
        assert done.returncode == 0, done.stderr
        assert rclone_s3.get_count(faces) == before
        assert moved.get_count(faces) == 3
        assert connect(load_settings()).evict("faces@latest")["freed_bytes"] > 0
    # A process that goes on in the first shell tells the daemon its own again where that does not answer.
    assert read("faces@latest", "2.bin", **right)[0] == b"\2" * 1000


@promise("The names of variables that a daemon took are told, their values never")
def test_a_daemon_that_others_depend_on_takes_credentials_from_nobody(settings, home, monkeypatch):
    monkeypatch.setenv("DATACACHE_DAEMON", "external")
    daemon = subprocess.Popen(
        [sys.executable, "-m", "datacache.daemon"], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd="/"
    )
    try:
        client = api.connect(load_settings())
        with pytest.raises(UsageError, match="external"):
            client._call("environment", {"variables": {"AWS_ACCESS_KEY_ID": "tenant"}})
        client.stop()
    finally:
        daemon.kill()
        daemon.wait()


@pytest.mark.parametrize("variables", [None, [], {"AWS_PROFILE": 3}, {"PATH": "/"}, {"AWS_REGION": "\0"}])
def test_only_the_variables_of_stores_are_taken(settings, variables):
    client = connect(settings)
    with pytest.raises(UsageError, match="bad request"):
        client._call("environment", {"variables": variables})
    client.stop()


def test_the_eight_newest_environments_are_kept():
    environ = {"AWS_PROFILE": "first", "PATH": "/bin"}
    known = Environments.take_from(environ)
    assert environ == {"PATH": "/bin"}
    assert known.put({"AWS_PROFILE": "first"}) == []
    for number in range(9):
        assert known.put({"AWS_PROFILE": str(number)}) == ["AWS_PROFILE"]
    assert [each["AWS_PROFILE"] for each in known.newest_first()] == [str(number) for number in range(8, 0, -1)]
    assert known.put({"AWS_PROFILE": "5", "AWS_REGION": "x"}) == ["AWS_PROFILE", "AWS_REGION"]
    with pytest.raises(UsageError, match="LD_PRELOAD"):
        known.put({"LD_PRELOAD": "x"})
