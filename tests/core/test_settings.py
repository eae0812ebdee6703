"""Settings: where they come from, and that a wrong one is refused by name."""

from __future__ import annotations

import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from datacache.core.errors import DatacacheError, SettingsError
from datacache.settings import StoreOptions, load_settings, parse_bytes
from tests.promises import promise


def load(tmp_path, **variables):
    return load_settings({"DATACACHE_HOME": str(tmp_path), **variables})


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1_000", 1000), ("20GB", 20 * 10**9), ("512MiB", 512 * 2**20), ("1.5k", 1500), (7, 7)]
)
def test_sizes_are_read_with_and_without_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DATACACHE_SSD_BYTES", "much"),
        ("DATACACHE_SSD_BYTES", "-1"),
        ("DATACACHE_EVICTION", "fifo"),
        ("DATACACHE_CATALOG", "postgres://x"),
        ("DATACACHE_CONCURRENCY", "0"),
        ("DATACACHE_STAGING_BYTES", "lots"),
        ("DATACACHE_STAGING_WAIT_S", "-1"),
        ("DATACACHE_STAGING_WAIT_S", "nan"),
        ("DATACACHE_UPLOADS", "0"),
        ("DATACACHE_TTL_S", "nan"),
        ("DATACACHE_TTL_S", "inf"),
        ("DATACACHE_STORE_TIMEOUT_S", "nan"),
        ("DATACACHE_STORE_TIMEOUT_S", "-inf"),
        ("DATACACHE_PREFETCH", "perhaps"),
        ("DATACACHE_CLUSTER", "a/b"),
        ("DATACACHE_ZONE", "-"),
        ("DATACACHE_NODE", "a node"),
        ("DATACACHE_LISTEN", "10.0.0.7"),
        ("DATACACHE_LISTEN", "10.0.0.0/8:7070"),
        ("DATACACHE_LISTEN", "10.0.0.7:0"),
        ("DATACACHE_CLUSTER_KEY", "too short"),
        ("DATACACHE_CLUSTER_MODE", "shared"),
        ("DATACACHE_CLUSTER_MODE", "a=off,a=share"),
        ("DATACACHE_CLUSTER_MODE", ","),
        ("DATACACHE_CLUSTER_MEMBERS", "10.0.0.7:7070"),
        ("DATACACHE_CLUSTER_MEMBERS", "a=10.0.0.7"),
        ("DATACACHE_CLUSTER_MEMBERS", "a=0.0.0.0:7070"),
        ("DATACACHE_CLUSTER_MEMBERS", "a=[::]:7070"),
        ("DATACACHE_CLUSTER_MEMBERS", "a=10.0.0.7:7070*0"),
        ("DATACACHE_CLUSTER_MEMBERS", "a=10.0.0.7:7070*nan"),
        ("DATACACHE_CLUSTER_MEMBERS", "a=10.0.0.7:7070/"),
        ("DATACACHE_CLUSTER_MEMBERS", "a=10.0.0.7:7070,a=10.0.0.8:7070"),
        ("DATACACHE_CLUSTER_MEMBERS", "a=10.0.0.7:7070 b=10.0.0.7:7070"),
        ("DATACACHE_CONFIG", "/nowhere/at/all.toml"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(tmp_path, variable, value):
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, **{variable: value})
    assert variable in str(caught.value) or value in str(caught.value)


def test_the_environment_goes_before_the_file_and_the_file_before_the_defaults(tmp_path):
    (tmp_path / "config.toml").write_text('ssd_bytes = "1GB"\neviction = "lru"\n')
    settings = load(tmp_path, DATACACHE_EVICTION="ttl")
    assert settings.ssd_bytes == 10**9
    assert settings.eviction == "ttl"
    assert settings.catalog == f"sqlite:///{tmp_path}/catalog.db"


@pytest.mark.parametrize(
    "text",
    [
        "ssd_bytes = ",
        "sdd_bytes = 1",
        "[stores.x]\nendpoint_url = 'x'",
        "[stores.x]\nurl='s3://x'\nkey='k'",
        "[stores.x]\nurl='s3://x'\nanonymous='false'",
        "[stores.x]\nurl='s3://x'\nregion=1",
        "[stores.x]\nurl='s3://x'\nbackend='boto'",
        "[stores.x]\nurl='gs://x'\nbackend='s3fs'",
        "concurrency = true",
        "concurrency = 3.7",
        "ttl_s = nan",
        "store_timeout_s = inf",
        "staging_wait_s = true",
        "ssd_bytes = true",
        "cluster_key = 1234567890123456",
        "[cluster_mode]\n'team-a-*' = 'on'",
        "cluster_members = [1]",
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"config\.toml"):
        load(tmp_path)


@promise("No credential appears in a message, a repr or a metric")
def test_a_stores_secret_is_not_shown(tmp_path):
    (tmp_path / "config.toml").write_text(
        "[stores.lab]\nurl='s3://faces'\naccess_key_id='id'\nsecret_access_key='hush'\nsession_token='hush2'\n"
    )
    settings = load(tmp_path)
    assert settings.stores[0] == StoreOptions(
        name="lab", url="s3://faces", access_key_id="id", secret_access_key="hush", session_token="hush2"
    )
    assert "hush" not in repr(settings)


@promise("No credential appears in a message, a repr or a metric")
def test_the_catalogs_password_is_not_shown(tmp_path):
    settings = load(tmp_path, DATACACHE_CATALOG="mongodb://me:hush@db.example/x")
    assert settings.catalog == "mongodb://me:hush@db.example/x"
    assert "hush" not in f"{settings!r} {settings} {replace(settings, access='none')!r}"


# Those that compare settings name the size of the tier on disk: by default it follows what others leave free.
def test_a_child_process_gets_the_same_settings(tmp_path):
    settings = load(tmp_path, DATACACHE_SSD_BYTES="123", DATACACHE_PREFETCH="no", DATACACHE_STAGING="/stage")
    assert load_settings(settings.environment()) == settings


def test_a_child_process_is_in_its_parents_cluster(tmp_path):
    (tmp_path / "config.toml").write_text("[cluster_mode]\n'team-a-*' = 'off'\n'*' = 'partition'\n")
    key = "0123456789abcdef"
    settings = load(
        tmp_path,
        DATACACHE_SSD_BYTES="123",
        DATACACHE_CLUSTER="lab",
        DATACACHE_LISTEN="10.0.0.7:7070",
        DATACACHE_CLUSTER_KEY=key,
        DATACACHE_CLUSTER_KEY_FILE="/run/key",
        DATACACHE_CLUSTER_MEMBERS="a=10.0.0.7:7070/north*2.5, b=db.example:7070",
        DATACACHE_ZONE="north",
        DATACACHE_NODE="a",
    )
    assert load_settings(settings.environment()) == settings
    assert settings.cluster_members == ("a=10.0.0.7:7070/north*2.5", "b=db.example:7070")
    assert key not in f"{settings!r} {settings.of_the_daemon()}"
    assert [settings.mode_of(name) for name in ("team-a-1", "faces")] == ["off", "partition"]


def test_a_mode_without_a_pattern_is_every_data_sets(tmp_path):
    assert load(tmp_path).mode_of("faces") == "share"
    assert load(tmp_path, DATACACHE_CLUSTER_MODE="partition").mode_of("faces") == "partition"
    some = load(tmp_path, DATACACHE_CLUSTER_MODE="team-a-*=off")
    assert [some.mode_of(name) for name in ("team-a-1", "faces")] == ["off", "share"]


def test_a_child_process_stages_as_its_parent_does(tmp_path):
    settings = load(
        tmp_path,
        DATACACHE_SSD_BYTES="123",
        DATACACHE_STAGING="/stage",
        DATACACHE_STAGING_BYTES="20GB",
        DATACACHE_STAGING_WAIT_S="0",
        DATACACHE_UPLOADS="3",
    )
    assert (settings.staging_bytes, settings.staging_wait_s, settings.uploads) == (20 * 10**9, 0, 3)
    assert load_settings(settings.environment()) == settings


def test_staging_areas_lie_in_the_home_unless_a_folder_is_named(tmp_path):
    assert load(tmp_path).staging_root == tmp_path / "staging"
    assert load(tmp_path, DATACACHE_STAGING="/stage").staging_root == Path("/stage")


def test_a_child_process_in_another_folder_gets_the_same_file(tmp_path, monkeypatch):
    (tmp_path / "here.toml").write_text(f"home = '{tmp_path}/big'\nssd_bytes = 123\n[stores.lab]\nurl='s3://faces'\n")
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"DATACACHE_CONFIG": "here.toml"})
    assert settings.config == tmp_path / "here.toml"
    monkeypatch.chdir("/")
    assert load_settings(settings.environment()) == settings
    assert settings.stores[0].name == "lab"


def test_a_home_that_the_file_in_the_usual_home_names_keeps_that_file(tmp_path):
    usual = tmp_path / "datacache"
    usual.mkdir()
    (usual / "config.toml").write_text(f"home = '{tmp_path}/big'\nssd_bytes = 123\n[stores.lab]\nurl='s3://faces'\n")
    settings = load_settings({"XDG_DATA_HOME": str(tmp_path)})
    assert settings.home == tmp_path / "big"
    assert load_settings(settings.environment()) == settings


def test_the_default_size_does_not_shrink_as_the_cache_fills(tmp_path, monkeypatch):
    free = 10**9
    monkeypatch.setattr("datacache.settings._free_bytes", lambda _: free)
    empty = load(tmp_path).ssd_bytes
    (tmp_path / "cache" / "ssd").mkdir(parents=True)
    block = tmp_path / "cache" / "ssd" / "region"
    block.write_bytes(b"x" * 10**6)
    free -= block.stat().st_blocks * 512
    assert load(tmp_path).ssd_bytes == empty == 5 * 10**8


@pytest.fixture
def homeless(monkeypatch):
    """A user with neither HOME nor a line in /etc/passwd, as a container's may be."""

    def no_line(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_line)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_needs_to_name_one(tmp_path):
    assert load(tmp_path).home == tmp_path
    assert load_settings({"XDG_DATA_HOME": str(tmp_path)}).home == tmp_path / "datacache"
    with pytest.raises(SettingsError) as caught:
        load_settings({})
    assert "DATACACHE_HOME" in caught.value.hint


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("variable", ["DATACACHE_HOME", "DATACACHE_CONFIG", "DATACACHE_STAGING"])
def test_a_path_in_a_home_that_nobody_knows_is_an_error_that_names_it(tmp_path, variable):
    with pytest.raises(SettingsError, match=variable):
        load(tmp_path, **{variable: "~/x"})


def test_errors_survive_pickling():
    import pickle

    from datacache.core.errors import ObjectChangedError

    again = pickle.loads(pickle.dumps(ObjectChangedError("changed", url="s3://b/k", hint="look")))
    assert (str(again), again.url, again.hint) == ("changed", "s3://b/k", "look")
    assert isinstance(again, DatacacheError)
    assert isinstance(again, OSError)
