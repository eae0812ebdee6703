"""Store credentials that volumes brought along: the files, and that whoever runs already notices them."""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datacache import connect, create_snapshot, load_settings, open_snapshot
from datacache.core.errors import AddressRefusedError, StoreAccessError, UsageError
from datacache.settings import Settings, StoreOptions
from datacache.store.base import ObjectStore
from datacache.store.credentials import CredentialFiles
from datacache.store.open import open_backend, open_bucket_backend
from datacache.store.s3 import access as s3_access
from tests.promises import promise
from tests.servers import CephRgw
from tests.store.conftest import WritableRclone, new_bucket

SECRET = "only-here-4f1c"
PAIR = {"access_key_id": "key", "secret_access_key": SECRET}


@pytest.fixture
def files(tmp_path: Path) -> CredentialFiles:
    return CredentialFiles(tmp_path / "home" / "credentials")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials in the environment nor in profiles."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


# --- the files ----------------------------------------------------------------------------------------------------


def test_what_was_put_is_there_for_its_store_only(files: CredentialFiles) -> None:
    files.put("pvc-1", "s3://faces/some/prefix", PAIR | {"region": "r1", "endpoint_url": "http://h:1"})
    (found,) = CredentialFiles(files.folder).for_store("s3://faces")
    assert (found.owner, found.access_key_id, found.secret_access_key) == ("pvc-1", "key", SECRET)
    assert (found.region, found.endpoint_url, found.session_token) == ("r1", "http://h:1", "")
    assert files.for_store("s3://face") == []
    assert CredentialFiles(files.folder / "nowhere").for_store("s3://faces") == []


@promise("Credentials of volumes lie in files of their owner only")
def test_the_files_are_for_their_owner_only(files: CredentialFiles) -> None:
    old = os.umask(0)
    try:
        files.put("pvc-1", "s3://faces", PAIR)
    finally:
        os.umask(old)
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in files.folder.iterdir()] == [0o600]
    files.folder.chmod(0o755)
    files.put("pvc-2", "s3://faces", PAIR)
    assert files.folder.stat().st_mode & 0o777 == 0o700


def test_the_newest_comes_first_and_the_same_again_changes_nothing(files: CredentialFiles) -> None:
    for owner in ("a", "b", "c"):
        files.put(owner, "s3://faces", PAIR)
    stamp = files.stamp("s3://faces")
    files.put("a", "s3://faces", {"AWS_ACCESS_KEY_ID": "key\n", "aws_secret_access_key": SECRET})
    assert files.stamp("s3://faces") == stamp
    assert [each.owner for each in files.for_store("s3://faces")] == ["c", "b", "a"]
    files.put("a", "s3://faces", PAIR | {"access_key_id": "other"})
    assert files.stamp("s3://faces") != stamp
    assert [each.owner for each in files.for_store("s3://faces")] == ["a", "c", "b"]


def test_a_dropped_owner_leaves_no_file_and_the_others_alone(files: CredentialFiles) -> None:
    files.drop("nobody")
    for store in ("s3://one", "s3://two"):
        for owner in ("a", "b"):
            files.put(owner, store, PAIR)
    assert files.owners() == {"a", "b"}
    files.drop("a")
    files.drop("a")
    assert files.owners() == {"b"}
    assert [each.owner for each in files.for_store("s3://two")] == ["b"]
    files.drop("b")
    assert list(files.folder.iterdir()) == []


@promise("Credentials of volumes lie in files of their owner only")
@pytest.mark.parametrize(
    ("values", "named"),
    [
        (PAIR | {"passwrod": SECRET}, "passwrod"),
        ({"access_key_id": "key"}, "secret_access_key"),
        (PAIR | {"access_key_id": " "}, "access_key_id"),
        (PAIR | {"AWS_SECRET_ACCESS_KEY": "another"}, "secret_access_key"),
        (PAIR | {"session_token": f"{SECRET} ä"}, "session_token"),
        (PAIR | {"endpoint_url": f"http://u:{SECRET}@host"}, "endpoint_url"),
        (PAIR | {"endpoint_url": "host:80"}, "endpoint_url"),
    ],
)
def test_a_wrong_key_is_named_and_its_value_is_not(files: CredentialFiles, values: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        files.put("pvc-1", "s3://faces", values)
    assert SECRET not in "".join(traceback.format_exception(caught.value)).replace(f'SECRET = "{SECRET}"', "")
    assert files.owners() == set()


def test_a_store_that_takes_no_credentials_is_refused(files: CredentialFiles) -> None:
    for url in ("/data/faces", "gs://faces", "https://host/x"):
        with pytest.raises(UsageError, match="takes no credentials"):
            files.put("pvc-1", url, PAIR)


def test_a_damaged_file_is_passed_over_and_told_of_without_its_content(
    files: CredentialFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.put("a", "s3://faces", PAIR)
    files.put("b", "s3://faces", PAIR)
    damaged, _whole = sorted(files.folder.iterdir())
    damaged.write_text(f'{{"{SECRET}": ')
    with caplog.at_level(logging.WARNING):
        assert len(files.for_store("s3://faces")) == len(files.for_store("s3://faces")) == 1
    assert len(caplog.records) == 1
    assert damaged.name in caplog.text
    assert SECRET not in caplog.text


@promise("Credentials of volumes lie in files of their owner only")
def test_what_was_read_shows_no_secret_and_cannot_be_pickled(files: CredentialFiles) -> None:
    files.put("a", "s3://faces", PAIR | {"session_token": SECRET})
    (found,) = files.for_store("s3://faces")
    assert SECRET not in f"{found!r} {found} {files!r}"
    with pytest.raises(TypeError):
        pickle.dumps(found)
    assert SECRET.encode() not in pickle.dumps(files)


# --- whoever runs already notices them ------------------------------------------------------------------------------


class Place:
    """A bucket with an object, the right credentials for it, and a store that was opened before there were any."""

    def __init__(self, server: WritableRclone | CephRgw, settings: Settings) -> None:
        self.url = f"s3://{(bucket := new_bucket())}"
        server.make_bucket(bucket)
        server.client().put_object(Bucket=bucket, Key="a", Body=b"content")
        self.right = {
            "access_key_id": server.access_key,
            "secret_access_key": server.secret_key,
            "endpoint_url": server.endpoint,
        }
        self.files = CredentialFiles(settings.credentials_dir)
        self.settings = settings
        self.store: ObjectStore = open_backend(self.url, settings)
        self.bucket = open_bucket_backend(self.url, settings)

    def use(self) -> None:
        """Reads and writes of every kind: obstore's and our own."""
        info = self.store.head("a")
        assert bytes(self.store.read(info.ref(self.url), 0, 7)) == b"content"
        assert [info.key for page in self.store.list("") for info in page][:1] == ["a"]
        self.bucket.write("w", b"new", {}, expect=None)
        assert self.bucket.find("w")[0] is not None

    def refused(self) -> list[str]:
        """Return what they say that is refused."""
        said = []
        for call in (
            lambda: self.store.head("a"),
            lambda: self.bucket.write("w", b"new", {}, expect=None),
            lambda: list(self.store.list("")),
        ):
            with pytest.raises(StoreAccessError) as caught:
                call()
            said.append("".join(traceback.format_exception(caught.value)))
        return said


@pytest.fixture
def place(writable_rclone: WritableRclone, make_settings: Callable[..., Settings], bare: None) -> Iterator[Place]:
    place = Place(writable_rclone, make_settings())
    yield place
    place.store.close()
    place.bucket.close()


@promise("Running processes use credentials that a volume brought, with their endpoint")
def test_a_file_that_comes_later_is_used_with_its_endpoint(place: Place) -> None:
    place.refused()
    place.files.put("a", place.url, place.right)
    place.use()


def test_wrong_credentials_are_refused_and_right_ones_put_in_their_place_are_used_at_once(place: Place) -> None:
    place.files.put("a", place.url, place.right | {"secret_access_key": SECRET})
    for said in place.refused():
        assert SECRET not in said
    place.files.put("a", place.url, place.right)
    place.use()


@promise("Of several volumes' credentials for one bucket refused ones are passed over")
def test_of_several_owners_those_that_the_store_refuses_are_passed_over(place: Place) -> None:
    place.files.put("a", place.url, place.right | {"access_key_id": "unknown"})
    place.files.put("b", place.url, place.right)
    place.files.put("c", place.url, place.right | {"secret_access_key": SECRET})
    place.use()
    place.files.drop("b")
    place.files.put("d", place.url, place.right)
    place.use()


def test_what_several_volumes_brought_alike_is_tried_once(
    files: CredentialFiles, make_settings: Callable[..., Settings], bare: None
) -> None:
    for owner in ("a", "b", "c"):
        files.put(owner, "s3://faces", PAIR)
    files.put("d", "s3://faces", PAIR | {"region": "r1"})
    ways = s3_access.resolve_access("s3://faces", make_settings(credentials=files.folder))
    assert [way.region for way in ways] == ["r1", "us-east-1"]


@promise("Of several volumes' credentials for one bucket refused ones are passed over")
def test_the_environments_credentials_do_not_stand_in_for_those_that_a_volume_brought(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", place.right["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", place.right["secret_access_key"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", place.right["endpoint_url"])
    place.files.put("a", place.url, place.right | {"secret_access_key": SECRET})
    place.refused()
    place.files.drop("a")
    place.use()


def test_a_named_store_with_credentials_comes_first_and_one_without_gives_the_endpoint(
    place: Place, make_settings: Callable[..., Settings]
) -> None:
    place.files.put("a", place.url, PAIR | {"endpoint_url": "http://127.0.0.1:1"})
    named = StoreOptions(
        name="lab",
        url=place.url,
        endpoint_url=place.right["endpoint_url"],
        access_key_id=place.right["access_key_id"],
        secret_access_key=place.right["secret_access_key"],
    )
    store = open_backend(place.url, make_settings(stores=(named,)))
    assert store.head("a").size_bytes == 7
    store.close()
    place.files.put("a", place.url, place.right | {"endpoint_url": "http://127.0.0.1:1"})
    named = StoreOptions(name="lab", url=place.url, endpoint_url=place.right["endpoint_url"])
    store = open_backend(place.url, make_settings(stores=(named,)))
    assert store.head("a").size_bytes == 7
    store.close()


@promise("Running processes use credentials that a volume brought, with their endpoint")
def test_what_the_store_still_takes_is_given_up_when_its_file_is_gone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_access, "_LOOK_AGAIN_S", 0.0)
    place.files.put("a", place.url, place.right)
    place.use()
    place.files.drop("a")
    for said in place.refused():
        assert "there are no credentials" in said


def test_nothing_is_looked_up_for_each_request(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.files.put("a", place.url, place.right)
    place.use()
    looked: list[object] = []
    monkeypatch.setattr(CredentialFiles, "stamp", lambda _self, url: looked.append(url))
    for _number in range(20):
        place.store.read(place.store.head("a").ref(place.url), 0, 7)
    assert looked == []


@promise("A Secret's endpoint that leads to this machine or a private network is refused")
def test_every_way_of_asking_meets_the_rule_for_an_endpoint_that_was_brought(
    place: Place, make_settings: Callable[..., Settings]
) -> None:
    place.files.put("pvc-1", place.url, place.right)
    ref = open_backend(place.url, make_settings()).put("a", b"x").ref(place.url)
    closed = make_settings(allow_network=())
    store, bucket = open_backend(place.url, closed), open_bucket_backend(place.url, closed)
    asks: tuple[Callable[[], object], ...] = (
        lambda: store.read(ref, 0, 1),
        lambda: store.head("a"),
        lambda: list(store.list("")),
        lambda: store.put("a", b"y"),
        lambda: bucket.write("a", b"y", {}, expect=None),
        lambda: bucket.remove("a", expect=ref.etag),
        lambda: bucket.begin_upload("a", {}),
    )
    for ask in asks:
        with pytest.raises(AddressRefusedError, match="of this machine"):
            ask()
    named = make_settings(allow_network=("localhost",))
    with pytest.raises(AddressRefusedError):
        open_backend(place.url, named).read(ref, 0, 1)
    assert open_backend(place.url, make_settings()).read(ref, 0, 1) == b"x"


@promise("Running processes use credentials that a volume brought, with their endpoint")
@pytest.mark.ceph
def test_a_daemon_that_runs_notices_wrong_right_rotated_and_dropped_credentials(
    ceph_rgw: CephRgw, home: Path, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    monkeypatch.setenv("DATACACHE_ALLOW_NETWORK", "127.0.0.1")
    settings = load_settings()
    bucket = f"rotated-{secrets.token_hex(4)}"
    ceph_rgw.make_bucket(bucket)
    for number in range(5):
        ceph_rgw.client().put_object(Bucket=bucket, Key=f"{number}.bin", Body=b"%d" % number * 1000)
    with monkeypatch.context() as patch:
        for name, value in ceph_rgw.env().items():
            patch.setenv(name, value)
        create_snapshot("mask", f"s3://{bucket}", settings=settings)
    pid = connect(settings).health()["pid"]
    files = CredentialFiles(settings.credentials_dir)
    values = {"endpoint_url": ceph_rgw.endpoint}

    def key(number: int) -> dict[str, str]:
        return values | {"access_key_id": f"{bucket}-{number}", "secret_access_key": f"{SECRET}{number}"}

    def read(number: int) -> None:
        with open_snapshot("mask", settings) as snapshot:
            assert snapshot.read(f"{number}.bin") == b"%d" % number * 1000

    def refused(number: int) -> None:
        with pytest.raises(StoreAccessError) as caught:
            read(number)
        assert SECRET not in "".join(traceback.format_exception(caught.value))

    refused(0)
    files.put("pvc", f"s3://{bucket}", key(1))
    refused(0)
    _admin(ceph_rgw, "create", key(1))
    read(0)
    _admin(ceph_rgw, "create", key(2))
    _admin(ceph_rgw, "rm", key(1))
    refused(1)
    files.put("pvc", f"s3://{bucket}", key(2))
    read(1)
    _admin(ceph_rgw, "rm", key(2))
    files.drop("pvc")
    refused(2)
    read(1)  # what is on the node needs no credentials
    assert connect(settings).health()["pid"] == pid
    for log in settings.home.rglob("*.log"):
        assert SECRET not in log.read_text(errors="replace")


def _admin(server: CephRgw, action: str, values: dict[str, str]) -> None:
    options = ["--uid=test", "--key-type=s3", f"--access-key={values['access_key_id']}"]
    if action == "create":
        options.append(f"--secret-key={values['secret_access_key']}")
    server._call("radosgw-admin", "key", action, *options)
