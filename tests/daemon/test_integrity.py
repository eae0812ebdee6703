"""Bits that flip between store and node: no reader gets one, and none stays in the cache."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from datacache import connect, create_snapshot, load_settings, open_snapshot, verify_snapshot
from datacache.api import import_jsonl, running_daemon
from datacache.core.errors import ChecksumError
from datacache.reader.blocks import NodeBlocks
from tests.conformance.faults import Answer, Fault
from tests.promises import promise
from tests.servers import ChecksummingS3, RcloneS3

DATA = {f"{n:04d}.bin": random.Random(n).randbytes(2000) for n in range(1000)}


class Bucket:
    """A bucket of 1,000 objects behind a server that can flip bits."""

    def __init__(self, server: ChecksummingS3, folder: Path, count: int) -> None:
        self.server, self.folder, self.url = server, folder, f"s3://{folder.name}"
        for name, data in list(DATA.items())[:count]:
            (folder / name).write_bytes(data)


@pytest.fixture
def bucket_of(rclone_s3: RcloneS3, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bucket]]:
    made: list[ChecksummingS3] = []

    def make(algorithm: str, count: int = 1000) -> Bucket:
        server = ChecksummingS3(rclone_s3, algorithm)
        made.append(server)
        for name, value in rclone_s3.env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("DATACACHE_PREFETCH", "0")
        return Bucket(server, rclone_s3.make_bucket(f"integrity-{random.SystemRandom().randrange(10**9)}"), count)

    yield make
    for server in made:
        server.close()


@promise("Bits that flip between store and node reach no reader and no cache")
@pytest.mark.parametrize(("algorithm", "count"), [("crc64nvme", 1000), ("crc32c", 200), ("", 200)])
def test_of_many_objects_no_wrong_byte_is_delivered_and_none_is_cached(
    bucket_of: Callable[..., Bucket], algorithm: str, count: int
) -> None:
    """Without checksums the ETag is an MD5, which is checked, too."""
    bucket = bucket_of(algorithm, count)
    names = list(DATA)[:count]
    create_snapshot("a", bucket.url)
    bucket.server.always(Fault(flip_one_in=20, only=lambda method, path: "list-type" not in path))
    with open_snapshot("a") as snapshot, ThreadPoolExecutor(4) as threads:
        for name, data in zip(names, threads.map(snapshot.read, names), strict=True):
            assert data == DATA[name]
        assert bucket.server.flipped >= count // 20
        bucket.server.refuse()
        assert all(snapshot.read(name) == DATA[name] for name in names)
    metrics = connect().metrics()
    by = algorithm or "md5"
    assert f'datacache_objects_checked_total{{by="{by}"}} {count}' in metrics
    assert f'datacache_checksum_failures_total{{by="{by}"}}' in metrics


@promise("Wrong bytes are asked for again three times, then an error names object and checksum")
def test_what_stays_wrong_is_an_error_for_the_reader_and_is_not_cached(bucket_of: Callable[..., Bucket]) -> None:
    bucket = bucket_of("crc64nvme")
    create_snapshot("a", bucket.url)
    bucket.server.always(Fault(flip_one_in=1, only=lambda method, path: "0007.bin" in path))
    with open_snapshot("a") as snapshot:
        with pytest.raises(ChecksumError, match=r"0007\.bin.*crc64nvme") as caught:
            snapshot.read("0007.bin")
        assert caught.value.checksum.startswith("crc64nvme ")
        assert snapshot.read("0008.bin") == DATA["0008.bin"]
        bucket.server.heal()
        assert snapshot.read("0007.bin") == DATA["0007.bin"]


@promise("Bytes are checked past the daemon, in copies and imports, and through a proxy")
def test_past_the_daemon_copying_and_importing_are_checked_as_well(
    bucket_of: Callable[..., Bucket], tmp_path: Path
) -> None:
    bucket = bucket_of("crc32c", 300)
    bucket.server.always(Fault(flip_one_in=20, only=lambda method, path: "list-type" not in path))
    settings = replace(load_settings(), daemon="external")  # there is none
    create_snapshot("a", bucket.url, settings=settings)
    with open_snapshot("a", settings=settings) as snapshot:
        assert all(snapshot.read(name) == data for name, data in list(DATA.items())[:100])
    assert running_daemon() is None
    create_snapshot("copied", bucket.url, copy=True, settings=settings)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"url": f"{bucket.url}/{n}", "path": n}) + "\n" for n in list(DATA)[:100]))
    import_jsonl("imported", lines, copy=True, settings=settings)
    assert bucket.server.flipped >= 25
    bucket.server.heal()
    for name, count in (("copied", 300), ("imported", 100)):
        with open_snapshot(name) as snapshot:  # with a daemon now: to find none takes a reader ten seconds
            assert all(snapshot.read(path) == data for path, data in list(DATA.items())[:count])


@promise("Bytes are checked past the daemon, in copies and imports, and through a proxy")
@pytest.mark.parametrize("direct", [False, True])
def test_pieces_that_are_read_past_the_daemon_are_of_whole_checked_objects(
    bucket_of: Callable[..., Bucket], direct: bool
) -> None:
    """A mount asks for a file in pieces, several at once; no store has a checksum of a piece."""
    bucket = bucket_of("crc64nvme", 0)
    files = {f"{n}.bin": random.Random(n).randbytes((1 << 20) + n * 440_000) for n in range(1, 8)}
    for name, data in files.items():
        (bucket.folder / name).write_bytes(data)
    settings = replace(load_settings(), daemon="external")  # there is none
    create_snapshot("a", bucket.url, settings=settings)
    with open_snapshot("a", settings=settings) as snapshot:
        refs = {name: snapshot.object_ref(name) for name in files}
    bucket.server.requests.clear()
    bucket.server.always(Fault(flip_one_in=3, only=lambda method, _path: method == "GET"))
    blocks = NodeBlocks(settings, lambda _ids: {}, dataset=bucket.url, snapshot="", direct=direct)
    with closing(blocks), ThreadPoolExecutor(4) as threads:
        for name, data in files.items():
            places = [(start, min(start + (1 << 20), len(data))) for start in range(0, len(data), 1 << 20)]
            pieces = threads.map(lambda place, name=name: blocks.read(refs[name], 0, *place), places)
            assert b"".join(pieces) == data
    assert running_daemon() is None
    assert bucket.server.flipped >= 3
    gets = [request for request in bucket.server.requests if request.startswith("GET ")]
    assert len(gets) == len(files) + bucket.server.flipped


# --- objects of several blocks ---


def failures(algorithm: str) -> int:
    found = re.search(rf'datacache_checksum_failures_total\{{by="{algorithm}"\}} ([0-9]+)', connect().metrics())
    return int(found[1]) if found else 0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@promise("An object of several blocks is checked when its last block is here")
@pytest.mark.parametrize("algorithm", ["crc64nvme", "sha256", ""])
def test_a_large_object_that_came_wrong_leaves_the_cache_and_is_read_right(
    bucket_of: Callable[..., Bucket], algorithm: str
) -> None:
    """No store has a checksum of a part: it is known when the last block is here."""
    bucket = bucket_of(algorithm, 1)
    large = random.Random(1).randbytes((9 << 20) + 5)
    (bucket.folder / "large.bin").write_bytes(large)
    create_snapshot("a", bucket.url)
    bucket.server.add(Fault(flip_one_in=1, only=lambda method, path: method == "GET" and "large.bin" in path))
    by = algorithm or "md5"
    with open_snapshot("a") as snapshot:
        snapshot.read("large.bin")  # most often wrong
        wait_for(lambda: failures(by) == 1)
    checked = f'datacache_objects_checked_total{{by="{by}"}} 1'
    with open_snapshot("a") as snapshot:  # again, as a reader may be amid it when it leaves the cache
        wait_for(lambda: snapshot.read("large.bin") == large and checked in connect().metrics())
    bucket.server.refuse()
    with open_snapshot("a") as snapshot:
        assert snapshot.read("large.bin") == large


@promise("An object of several blocks is checked when its last block is here")
def test_a_large_object_that_stays_wrong_is_an_error(bucket_of: Callable[..., Bucket]) -> None:
    bucket = bucket_of("crc32c", 1)
    (bucket.folder / "large.bin").write_bytes(bytes(9 << 20))
    create_snapshot("a", bucket.url)
    bucket.server.always(Fault(change=flip_first, only=lambda method, path: "large.bin" in path))

    def is_refused() -> bool:
        with open_snapshot("a") as snapshot:
            try:
                snapshot.read("large.bin")
            except ChecksumError as exc:
                return "large.bin" in str(exc) and exc.checksum.startswith("crc32c ")
        return False

    wait_for(is_refused)


@promise("A check that breaks off is counted, logged once, and tried again")
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_what_a_daemon_left_unchecked_the_next_one_checks(bucket_of: Callable[..., Bucket], end: str) -> None:
    """End it after the last block is here, before the store has said the checksum."""
    bucket = bucket_of("crc64nvme", 1)
    large = random.Random(1).randbytes((9 << 20) + 5)
    (bucket.folder / "large.bin").write_bytes(large)
    create_snapshot("a", bucket.url)
    answer = threading.Event()
    bucket.server.always(Fault(wait=answer, only=lambda method, _path: method == "HEAD"))
    bucket.server.add(Fault(flip_one_in=1, only=lambda method, path: method == "GET" and "large.bin" in path))
    with open_snapshot("a") as snapshot:
        assert snapshot.read("large.bin") != large
    daemon = running_daemon()
    assert daemon is not None
    wait_for(lambda: daemon.cache_status()["tiers"][1]["blocks"] == 3)
    if end == "killed":
        os.kill(daemon.health()["pid"], signal.SIGKILL)
    else:
        daemon.stop()
    wait_for(lambda: running_daemon() is None and not daemon.beats())  # its lock may go last
    bucket.server.heal()
    answer.set()
    with open_snapshot("a") as snapshot:
        assert snapshot.read("large.bin") != large
        wait_for(lambda: running_daemon() is not None)  # though all is here
    wait_for(lambda: failures("crc64nvme") == 1)
    checked = 'datacache_objects_checked_total{by="crc64nvme"} 1'
    with open_snapshot("a") as snapshot:
        wait_for(lambda: snapshot.read("large.bin") == large and checked in connect().metrics())
    bucket.server.refuse()
    with open_snapshot("a") as snapshot:
        assert snapshot.read("large.bin") == large


# --- what is read whole elsewhere ---


def flip_first(answer: Answer) -> None:
    """Flip the same bit each time, as a damaged disk has it."""
    if answer.body:
        answer.body = bytes([answer.body[0] ^ 4]) + answer.body[1:]


@promise("`verify --read` compares every byte, also of copies")
@pytest.mark.parametrize("algorithm", ["crc64nvme", ""])
def test_verify_names_every_object_that_comes_with_other_bytes(
    bucket_of: Callable[..., Bucket], algorithm: str
) -> None:
    """Without checksums the ETag is an MD5, which is compared."""
    bucket = bucket_of(algorithm, 200)
    large = random.Random(1).randbytes(9 << 20)
    (bucket.folder / "large.bin").write_bytes(large)
    (bucket.folder / "parts").mkdir()
    (bucket.folder / "parts" / "a").write_bytes(b"in parts")
    create_snapshot("a", bucket.url)
    damaged = [*list(DATA)[:200:20], "large.bin"]
    bucket.server.always(Fault(flip_one_in=20, only=lambda method, path: path.endswith(("1.bin", "3.bin"))))
    bucket.server.always(Fault(change=flip_first, only=lambda _, path: path.rpartition("/")[2] in damaged))
    unchecked: list[int] = []
    problems = list(verify_snapshot("a", read=True, unchecked=unchecked.append))
    assert sorted(problem.path.decode() for problem in problems) == damaged, [problem.message for problem in problems]
    assert {problem.kind for problem in problems} == {"damaged"}
    assert all(problem.url in problem.message for problem in problems)
    assert unchecked == [0]
    bucket.server.heal()
    assert list(verify_snapshot("a", read=True)) == []


@promise("`verify --read` compares every byte, also of copies")
def test_verify_says_how_many_files_could_not_be_checked(bucket_of: Callable[..., Bucket]) -> None:
    bucket = bucket_of("", 100)
    forward = bucket.server.forward

    def served(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        answer = forward(method, path, [each for each in headers if each[0].lower() != "if-match"], body)
        if "list-type" in path:  # a server that numbers its objects
            answer.body = re.sub(rb"<ETag>.*?</ETag>", b"<ETag>" + b"1" * 32 + b"</ETag>", answer.body)
        elif answer.header("ETag"):
            answer.set_header("ETag", f'"{"1" * 32}"')
        return answer

    bucket.server.forward = served  # type: ignore[method-assign]
    create_snapshot("a", bucket.url)
    verify = [sys.executable, "-m", "dataset_cli", "snapshot", "verify", "a", "--read"]
    done = subprocess.run([*verify, "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["ok"], found["files"], found["unchecked"]) == (True, 100, 100)
    said = subprocess.run(verify, capture_output=True, text=True, check=True).stdout
    assert "100 of 100 files could not be checked" in said


@promise("`--copy` keeps no damaged bytes")
def test_large_objects_are_copied_as_the_store_says_they_are(bucket_of: Callable[..., Bucket]) -> None:
    bucket = bucket_of("crc64nvme", 50)
    large = random.Random(2).randbytes(9 << 20)
    (bucket.folder / "large.bin").write_bytes(large)
    bucket.server.add(Fault(flip_one_in=1, only=lambda method, path: method == "GET" and "large.bin" in path))
    create_snapshot("a", bucket.url, copy=True)
    assert bucket.server.flipped == 1
    with open_snapshot("a") as snapshot:
        assert snapshot.read("large.bin") == large
    bucket.server.always(Fault(change=flip_first, only=lambda method, path: "large.bin" in path))
    with pytest.raises(ChecksumError, match=r"large\.bin"):
        create_snapshot("b", bucket.url, copy=True)
