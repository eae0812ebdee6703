"""Fixtures everybody uses: real servers (one of each, started when first asked for), a home, real data.

A server program that is missing is a failure, not a skip: a run that passes has tried the real thing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import leftovers
from tests.blood_cells import find_blood_cells
from tests.servers import CephRgw, Mongod, RcloneS3

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""
_SHARED: list[RcloneS3] = []

if TYPE_CHECKING:
    from datacache.settings import Settings

_numbers = itertools.count()

# The hundreds of processes of a run find modules compiled, whatever the shell wants: a quarter of what a start costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores Ctrl-C for what it runs in the background, and so would the processes that tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no finding. Tests that set their own keep the rest of this.
hypothesis.settings.register_profile(
    "datacache", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("datacache")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the test that takes minutes, so that it is not what a run waits for in the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/test_readme.py"))


@pytest.fixture(scope="session", autouse=True)
def _session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clean what killed runs left, and mark everything of this run as its own."""
    base = tmp_path_factory.getbasetemp()
    # One of several processes of a run (pytest-xdist) has its folder one level deeper.
    leftovers.clean_dead_sessions(base.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else base.parent)
    (base / "owner.pid").write_text(str(os.getpid()))
    os.environ[leftovers.SESSION_VARIABLE] = str(os.getpid())
    yield
    leftovers.unmount_under(base)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting and no credential of whoever runs the tests reaches them."""
    for name in list(os.environ):
        if name.startswith(("DATACACHE_", "AWS_")) and name not in (
            leftovers.SESSION_VARIABLE,
            "DATACACHE_TEST_DATA",
        ):
            monkeypatch.delenv(name)
    nowhere = tmp_path_factory.getbasetemp() / "nowhere"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(nowhere / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nowhere / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # A home nobody made: what uses one without asking for the fixture does not meet the user's.
    monkeypatch.setenv("XDG_DATA_HOME", str(nowhere))


@pytest.fixture(scope="session")
def mongod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    """A MongoDB server: `.url`, `.database_url()` for a database nobody used before."""
    with Mongod(tmp_path_factory.mktemp("mongod")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneS3]:
    """A small S3 server: `.env()`, `.make_bucket(name)`; the folders in `.root` are the buckets."""
    with RcloneS3(tmp_path_factory.mktemp("rclone")) as server:
        _SHARED.append(server)
        yield server
        _SHARED.remove(server)


@pytest.fixture(autouse=True)
def _rclone_s3_rests() -> None:
    for server in _SHARED:
        server.start_anew_if_busy()


@pytest.fixture(scope="session")
def ceph_rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephRgw]:
    """A real Ceph with its S3 gateway: `.env()`, `.make_bucket(name)`. Takes about 2 s to start."""
    with CephRgw(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture
def home(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """A fresh `DATACACHE_HOME` with a small RAM and SSD tier; its daemons, mounts and files go with the
    test. Tests marked `shared_home` have one together with those of their module, and its daemon."""
    with ExitStack() as stack:
        mark = request.node.get_closest_marker("shared_home")
        if mark is None or mark.args == (False,):
            variables = stack.enter_context(new_home(tmp_path_factory))
        else:
            variables = request.getfixturevalue("_home_of_module")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield Path(variables["DATACACHE_HOME"])
        leftovers.unmount_under(tmp_path)
        others = f"{tmp_path}{os.sep}"  # of other homes, which a test made itself
        leftovers.end_processes(
            lambda: leftovers.processes_with("DATACACHE_HOME", lambda value: value.startswith(others))
        )


@pytest.fixture(scope="module")
def _home_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with new_home(tmp_path_factory) as variables:
        yield variables


@contextmanager
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Make a home for as long as the context lasts; the variables that lead to it."""
    from datacache.tiers.index import forget_index
    from datacache.tiers.layout import index_dir
    from datacache.tiers.memory import memory_dir

    path = tmp_path_factory.mktemp("home")  # a short name: Unix socket paths have at most 107 characters
    ram = leftovers.SHARED_MEMORY / f"{leftovers.SHARED_MEMORY_PREFIX}{os.getpid()}-{next(_numbers)}"
    ram.mkdir()
    yield {
        "DATACACHE_HOME": str(path),
        "DATACACHE_RAM_DIR": str(ram),
        "DATACACHE_RAM_BYTES": "32MiB",
        "DATACACHE_SSD_BYTES": "512MiB",
    }
    leftovers.unmount_under(path)
    leftovers.end_processes(lambda: leftovers.processes_with("DATACACHE_HOME", lambda value: value == str(path)))
    with suppress(OSError):  # a test may have put something else in its place
        forget_index(index_dir(memory_dir(path, ram)))  # a process has a home or two, not hundreds
    shutil.rmtree(ram, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def settings(home: Path) -> Settings:
    """The settings of `home`."""
    from datacache.settings import load_settings

    return load_settings()


@pytest.fixture(scope="session")
def tf() -> Any:
    """TensorFlow, quiet. No module imports it: each process of a run would spend seconds on it to collect tests."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    return tf


@pytest.fixture(scope="session")
def blood_cells() -> Path:
    """Real VOC data: 364 blood-cell images with boxes and splits."""
    return find_blood_cells()
