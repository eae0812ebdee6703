"""Loading weights: the right tensors or an error that names file and place, from wherever the file is."""

from __future__ import annotations

import itertools
import json
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_natively
from safetensors.torch import save

import fuse_mount
from datacache import api
from datacache.api.weights import open_weights, weights_path
from datacache.core.errors import (
    ObjectNotFoundError,
    PathNotFoundError,
    SnapshotNotFoundError,
    StoreError,
    UsageError,
    WeightsError,
)
from datacache.core.ids import BLOCK_BYTES
from datacache.models.weights import DTYPES, SnapshotWeights, read_header, read_through_buffers
from datacache.safetensors import load_file
from datacache.settings import Settings, load_settings
from datacache.store.s3.store import S3Store
from datacache.tiers import layout
from tests.conformance.faults import Answer, Fault, FaultProxy
from tests.promises import promise
from tests.servers import RcloneS3

pytestmark = pytest.mark.shared_home
Tensors = dict[str, torch.Tensor]
_seeds = itertools.count()


def weights(size_bytes: int, seed: int = 0) -> Tensors:
    """Return tensors of several types, `size_bytes` in all and a little."""
    some = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (size_bytes // 2 // 64 * 64,), dtype=torch.uint8, generator=some)
    return {
        "layer.0": raw.view(torch.bfloat16).reshape(-1, 32),
        "layer.1": torch.rand(size_bytes // 8, generator=some),
        "small": torch.arange(5),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }


def same(left: Tensors, right: Tensors) -> bool:
    """Tell whether both have the same names, types, shapes and bits."""

    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()

    return left.keys() == right.keys() and all(
        (left[name].dtype, left[name].shape, bits(left[name]))
        == (right[name].dtype, right[name].shape, bits(right[name]))
        for name in left
    )


def written(path: Path, header: object, data: bytes = b"") -> Path:
    """Write a file with a header, as text or as what JSON makes of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor(dtype: str = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


A = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
BAD: dict[str, tuple[object, bytes, str]] = {
    "a byte is missing": (A, b"1", "cut short"),
    "a byte too much": (A, b"123", "belong to no tensor"),
    "data and no tensor": ({}, b"1", "belong to no tensor"),
    "a gap in the beginning": ({"a": tensor("U8", [1], [1, 2])}, b"12", "'a' leaves a gap"),
    "a gap": ({"a": tensor("U8", [1], [0, 1]), "b": tensor("U8", [1], [2, 3])}, b"123", "'b' leaves a gap"),
    "an overlap": ({"a": tensor("U8", [2], [0, 2]), "b": tensor("U8", [2], [1, 3])}, b"123", "'b' overlaps"),
    "the same place": ({"a": tensor(), "b": tensor()}, b"12", "'b' overlaps"),
    "an end before the beginning": ({"a": tensor("U8", [2], [2, 0])}, b"12", "'a'"),
    "another size": ({"a": tensor("F32", [2], [0, 2])}, b"12", "'a' of F32 .* takes 8 bytes"),
    "an unknown type": ({"a": tensor("F128", [1], [0, 16])}, bytes(16), "'F128'"),
    "a type without numbers of PyTorch": ({"a": tensor("F6_E2M3", [4], [0, 3])}, b"123", "'F6_E2M3'"),
    "half a byte": ({"a": tensor("F4", [3], [0, 1])}, b"1", "cannot have the shape"),
    "too many numbers": ({"a": tensor("U8", [2**63, 2], [0, 0])}, b"", "cannot have the shape"),
    "too many numbers, and none": ({"a": tensor("U8", [2**63, 2, 0], [0, 0])}, b"", "cannot have the shape"),
    "too many dimensions": ({"a": tensor("U8", [1] * 100_000, [0, 1])}, b"1", "cannot have the shape"),
    "a length beyond 64 bits": ({"a": tensor("U8", [2**64, 0], [0, 0])}, b"", "whole numbers"),
    "a fraction": ({"a": tensor("U8", [2.0])}, b"12", "whole numbers"),
    "a truth": ({"a": tensor("U8", [True, 2])}, b"12", "whole numbers"),
    "a negative length": ({"a": tensor("U8", [-2])}, b"12", "whole numbers"),
    "a negative place": ({"a": tensor("U8", [2], [-2, 0])}, b"12", "whole numbers"),
    "three offsets": ({"a": tensor("U8", [2], [0, 2, 2])}, b"12", "two data_offsets"),
    "no type": ({"a": {"shape": [2], "data_offsets": [0, 2]}}, b"12", "needs a dtype"),
    "a tensor that is a list": ({"a": ["U8", [2], [0, 2]]}, b"12", "needs a dtype"),
    "a name twice": (A[:-1] + b"," + A[1:], b"12", "'a' is there twice"),
    "a field twice": (A.replace(b'"dtype"', b'"dtype":"U8","dtype"'), b"12", "'dtype' is there twice"),
    "metadata that are numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "metadata that are a list": ({"__metadata__": ["a"]}, b"", "__metadata__"),
    "a list": (b"[1]", b"", "no map"),
    "nothing": (b"", b"", "cannot be read"),
    "no JSON": (A + b"\0", b"12", "cannot be read"),
    "no UTF-8": (b'{"\xff":{}}', b"", "cannot be read"),
    "a number of many digits": (b'{"a":' + b"9" * 10_000 + b"}", b"", "cannot be read"),
    "very deep lists": (b'{"a":' + b"[" * 100_000, b"", "names no tensors"),
    "very deep objects": (b'{"a":' * 100_000, b"", "cannot be read"),
    "millions of lists": (b'{"a":[' + b"[]," * 3_000_000 + b"[]]}", b"", "names no tensors"),
}


@promise("Weights are exactly what the file has, or there is an error that names file and place")
@pytest.mark.parametrize("what", BAD)
def test_a_header_that_says_what_cannot_be_is_an_error(what: str, tmp_path: Path, settings: Settings) -> None:
    header, data, words = BAD[what]
    path = written(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(WeightsError, match=words) as caught:
        load_file(path, settings=settings)
    assert caught.value.file == str(path)
    assert str(path) in str(caught.value)


@promise("Weights are exactly what the file has, or there is an error that names file and place")
@pytest.mark.parametrize("size", [0, 7, 8, 20, 100])
def test_a_file_that_ends_early_is_an_error(size: int, tmp_path: Path, settings: Settings) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(save({"a": torch.arange(100)})[:size])
    with pytest.raises(WeightsError, match=r"short\.safetensors.*(bytes|cut short)"):
        load_file(path, settings=settings)
    path.write_bytes(struct.pack("<Q", 2**63) + A)
    with pytest.raises(WeightsError, match=r"names a header of .* another format"):
        load_file(path, settings=settings)


def test_all_types_are_those_of_the_safetensors_library(tmp_path: Path, settings: Settings) -> None:
    for dtype, (_, bits) in DTYPES.items():
        header = {"x": tensor("U8", [3], [0, 3]), "a": tensor(dtype, [2, 8], [3, 3 + 2 * bits])}  # nothing is aligned
        path = written(tmp_path / "typed.safetensors", header, bytes(i % 2 for i in range(3 + 2 * bits)))
        assert same(load_file(path, settings=settings), load_natively(path)), dtype


@promise("Weights are exactly what the file has, or there is an error that names file and place")
def test_what_is_accepted_is_what_the_safetensors_library_accepts(tmp_path: Path, settings: Settings) -> None:
    some, whole = random.Random(1), save(weights(2000), {"format": "pt"})
    header_bytes, path = 8 + int.from_bytes(whole[:8], "little"), tmp_path / "changed.safetensors"
    outcomes = []
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(some.choice([1, 1, 2])):
            changed[some.randrange(header_bytes)] = some.choice(b'0123456789{}[]",:U8FI \xff\0')
        path.write_bytes(changed)
        try:
            found = load_file(path, settings=settings)
        except WeightsError:
            found = None
        try:
            expected = load_natively(path)
        except Exception:  # noqa: BLE001 - it has several kinds
            expected = None
        assert found is None or (expected is not None and same(found, expected)), bytes(changed[:header_bytes])
        outcomes.append((found is not None, expected is not None))
    assert outcomes.count((True, True)) > 20
    assert outcomes.count((False, False)) > 200
    assert outcomes.count((False, True)) < 8  # names that are there twice


class Bucket:
    """A file of weights of several blocks in a bucket, and a snapshot of it."""

    def __init__(self, server: RcloneS3) -> None:
        self.server, self.folder = server, server.make_bucket(f"weights-{os.urandom(4).hex()}")
        self.name, self.url, self.tensors = (
            self.folder.name,
            f"s3://{self.folder.name}",
            weights(2 * BLOCK_BYTES + 5000, next(_seeds)),
        )
        (self.folder / "deep").mkdir()
        self.file = self.folder / "deep" / "a.safetensors"
        self.file.write_bytes(save(self.tensors))
        self.ref = self.snapshot()
        self.where = f"{self.ref}/deep/a.safetensors"

    def snapshot(self) -> str:
        """Make a version of what is there now."""
        record = api.create_snapshot(self.name, self.url)
        return f"{record.dataset}@{record.id}"

    def gets(self) -> int:
        return self.server.get_count(self.folder.name)


@pytest.fixture
def bucket(rclone_s3: RcloneS3, home: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    return Bucket(rclone_s3)


def is_mapped(where: str) -> bool:
    """Tell whether all of a file is in one of the cache, and sound."""
    with open_weights(where) as file:
        return file.map() is not None


def warmed(bucket: Bucket) -> tuple[Path, bytes]:
    """Fetch everything, until the disk has it; return the cached file, and what is in it."""
    client = api.connect(load_settings())
    job = client.warm(bucket.ref)
    while client.job(job)["state"] == "running":
        threading.Event().wait(0.01)
    content = bucket.file.read_bytes()
    files = layout.ssd_dir(load_settings().home).glob("o-*")
    return next(file for file in files if file.read_bytes() == content), content


@promise("Weights are exactly what the file has, or there is an error that names file and place")
def test_weights_are_fetched_once_and_then_views_of_the_cached_file(bucket: Bucket) -> None:
    assert same(load_file(bucket.where), bucket.tensors)
    warmed(bucket)
    before = bucket.gets()
    assert is_mapped(bucket.where)
    for backend in ("mmap", "pread"):
        assert same(load_file(bucket.where, backend=backend), bucket.tensors)
        assert same(load_file(f"datacache://{bucket.where}", backend=backend), bucket.tensors)
    assert bucket.gets() == before


def test_an_object_is_loaded_by_its_url_and_shares_its_blocks_with_snapshots(bucket: Bucket) -> None:
    warmed(bucket)
    before = bucket.gets()
    assert same(load_file(f"{bucket.url}/deep/a.safetensors"), bucket.tensors)
    assert bucket.gets() == before
    with open_weights(f"{bucket.url}/deep/a.safetensors") as file:
        assert file.map() is not None
        assert file.name == f"{bucket.url}/deep/a.safetensors"


@promise("Weights are exactly what the file has, or there is an error that names file and place")
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_broken_block_of_the_cache_is_fetched_again(bucket: Bucket, backend: Any) -> None:
    cached, content = warmed(bucket)
    for at in (99, 2 * BLOCK_BYTES + 99):
        with cached.open("r+b") as tampered:
            tampered.seek(at)
            tampered.write(bytes([content[at] ^ 4]))
    assert not is_mapped(bucket.where)
    assert same(load_file(bucket.where, backend=backend), bucket.tensors)


@promise("Weights are exactly what the file has, or there is an error that names file and place")
def test_a_cached_file_that_was_cut_short_is_not_mapped(bucket: Bucket) -> None:
    cached, _ = warmed(bucket)
    os.truncate(cached, BLOCK_BYTES + 5)
    assert not is_mapped(bucket.where)
    assert same(load_file(bucket.where), bucket.tensors)


@promise("Weights are exactly what the file has, or there is an error that names file and place")
def test_weights_that_changed_in_the_bucket_are_an_error(bucket: Bucket) -> None:
    bucket.file.write_bytes(save(weights(2 * BLOCK_BYTES, seed=-1)))
    with pytest.raises(StoreError, match=r"a\.safetensors"):
        load_file(bucket.where)


def _shorter(answer: Answer) -> None:
    answer.body = answer.body[:-1]


def _from_elsewhere(answer: Answer) -> None:
    answer.body = answer.body[1:] + b"\0"
    answer.set_header("Content-Range", "bytes 1-1/1")


def _of_another(answer: Answer) -> None:
    answer.body = bytes(len(answer.body))
    answer.set_header("ETag", '"0123"')


def _whole(answer: Answer) -> None:
    answer.status, answer.body = 200, bytes(1)


@promise("Weights are exactly what the file has, or there is an error that names file and place")
@pytest.mark.parametrize("lie", [_shorter, _from_elsewhere, _of_another, _whole])
def test_a_store_that_lies_about_weights_is_asked_again_or_is_an_error(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Answer], None]
) -> None:
    with FaultProxy(bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        lies: list[Answer] = []

        def told(answer: Answer) -> None:
            lies.append(answer)
            lie(answer)

        for _ in range(2):
            proxy.add(Fault(change=told, only=lambda method, path: method == "GET" and "safetensors" in path))
        with suppress(StoreError):
            assert same(load_file(bucket.where), bucket.tensors)
        assert same(load_file(bucket.where), bucket.tensors)
        assert len(lies) == 2


def test_tensors_can_be_changed_and_the_cache_is_not(bucket: Bucket) -> None:
    cached, content = warmed(bucket)
    loaded = load_file(bucket.where)
    for each in loaded.values():
        each.zero_()
    assert same(load_file(bucket.where), bucket.tensors)
    assert cached.read_bytes() == content


def test_tensors_outlive_the_eviction_of_their_file(bucket: Bucket) -> None:
    cached, _ = warmed(bucket)
    loaded = load_file(bucket.where)
    api.connect(load_settings()).evict(None)
    assert not cached.exists()
    assert same(loaded, bucket.tensors)


def test_what_goes_to_a_device_goes_through_buffers(bucket: Bucket) -> None:
    with open_weights(bucket.where) as file:
        start = read_header(file).size_bytes
        out = torch.zeros(file.size_bytes - start, dtype=torch.uint8)
        read_through_buffers(file, start, out)
    assert out.numpy().tobytes() == bucket.file.read_bytes()[start:]
    loaded = load_file(bucket.where, device="meta")
    assert {name: (t.dtype, t.shape, t.device.type) for name, t in loaded.items()} == {
        name: (t.dtype, t.shape, "meta") for name, t in bucket.tensors.items()
    }


@pytest.fixture
def mount(bucket: Bucket, tmp_path: Path) -> Iterator[Path]:
    """A mount of the weights, and of a checkpoint of them."""
    torch.save({"model": bucket.tensors, "step": 7}, bucket.folder / "c.pt")
    folder = tmp_path / "a mount"
    folder.mkdir()
    bucket.ref = bucket.snapshot()
    fuse_mount.mount_snapshot(bucket.ref, folder, settings=load_settings())
    yield folder
    fuse_mount.unmount(folder, lazy=True, settings=load_settings())


def test_a_path_below_a_mount_is_read_without_the_mount(bucket: Bucket, mount: Path) -> None:
    with open_weights(mount / "deep" / "a.safetensors") as file:
        assert isinstance(file, SnapshotWeights)
        assert file.name == f"{bucket.ref}/deep/a.safetensors"
    assert same(load_file(mount / "deep" / "a.safetensors"), bucket.tensors)
    assert same(load_natively(mount / "deep" / "a.safetensors"), bucket.tensors)
    loaded = torch.load(mount / "c.pt", mmap=True)
    assert loaded["step"] == 7
    assert same(loaded["model"], bucket.tensors)


def test_the_memory_of_a_load_is_that_of_the_file(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datacache.models.weights._READERS", 2)
    (bucket.folder / "big.safetensors").write_bytes(save({"a": torch.ones(2**24)}))
    ref = bucket.snapshot()

    def peak_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    load_file(f"{ref}/deep/a.safetensors")  # whatever the first one needs
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    before = peak_bytes()
    loaded = load_file(f"{ref}/big.safetensors", backend="pread")
    # Beside them as many blocks as are read at a time, not all of them once more.
    assert peak_bytes() - before < loaded["a"].nbytes + 12 * BLOCK_BYTES < 2 * loaded["a"].nbytes


def test_programs_that_want_a_path_get_one_and_no_folder_is_listed_for_it(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise AssertionError("listed")

    monkeypatch.setattr(S3Store, "list", fail)
    content = bucket.file.read_bytes()
    for where in (f"{bucket.url}/deep/a.safetensors", bucket.where, f"datacache://{bucket.where}"):
        with weights_path(where, load_settings()) as path:
            assert path.read_bytes() == content
            assert path.name.endswith("-a.safetensors")
        assert not path.exists()
    for where in (bucket.file, bucket.file.as_uri(), str(tmp_path / "missing@v1" / "a.pt")):
        with weights_path(where, load_settings()) as path:
            assert path == (tmp_path / "missing@v1" / "a.pt" if "missing" in str(where) else bucket.file)
    assert bucket.file.exists()
    with (
        pytest.raises(ObjectNotFoundError, match=r"missing\.pt"),
        weights_path(f"{bucket.url}/missing.pt", load_settings()),
    ):
        pass


def test_a_place_that_has_no_weights_is_an_error_that_names_it(bucket: Bucket) -> None:
    wrong: dict[str, tuple[type[Exception], str]] = {
        f"{bucket.ref}/missing.safetensors": (PathNotFoundError, "has no file 'missing.safetensors'"),
        f"{bucket.name}@v9/a.safetensors": (SnapshotNotFoundError, "v9"),
        f"{bucket.name}@latest": (UsageError, "Write NAME@REF/path"),
        f"datacache://{bucket.name}/a.safetensors": (UsageError, "names no file of a snapshot"),
        f"./{bucket.name}@latest/a.safetensors": (FileNotFoundError, "@latest/a.safetensors"),
        "file:///missing.safetensors": (FileNotFoundError, "/missing.safetensors"),
    }
    for where, (error, words) in wrong.items():
        with pytest.raises(error) as caught:
            load_file(where)
        assert words in f"{caught.value} {getattr(caught.value, 'hint', '')}"


def test_an_object_that_is_not_there_and_a_folder_are_errors(bucket: Bucket) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"missing\.safetensors"):
        load_file(f"{bucket.url}/missing.safetensors")
    with pytest.raises(UsageError, match="names a folder"):
        load_file(f"{bucket.url}/deep/")
    with pytest.raises(UsageError, match="no way to read weights"):
        load_file(bucket.where, backend="other")  # type: ignore[arg-type]
