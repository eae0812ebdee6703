"""Settings: environment variables, then a TOML file, then defaults, checked once into frozen objects.

`load_settings()` is called at the edges (a command's start, `open_snapshot()`), and the result is passed on explicitly.
A wrong value raises `SettingsError` naming the variable or the line; nothing is repaired in silence.

The TOML file (`DATACACHE_CONFIG`, or `config.toml` in the home if it is there) has the same names in lower case without
the prefix, and a table of named stores, matched by the longest URL prefix:

    catalog = "mongodb://db.example/datacache"
    ssd_bytes = "200GB"

    [stores.lab]
    url = "s3://faces"
    endpoint_url = "https://rgw.example"
    access_key_id = "…"
    secret_access_key = "…"
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from datacache.core.errors import SettingsError

EVICTION_POLICIES = ("keep", "lru", "ttl", "clairvoyant")
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_UNITS |= {f"{u}b": n for u, n in list(_UNITS.items()) if u not in ("", "b")}
_UNITS |= {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
    "pi": 2**50,
}


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """One named store: which URLs it is for and how to reach it. Its repr shows no secret."""

    name: str
    url: str
    endpoint_url: str = ""
    region: str = ""
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    profile: str = ""
    anonymous: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set. Sizes in bytes, times in seconds."""

    home: Path
    """Everything local lives under it; two homes on one machine never meet."""
    catalog: str
    """`sqlite:///PATH` or `mongodb://…/DATABASE`."""
    ram_bytes: int
    ssd_bytes: int
    eviction: str = "keep"
    ttl_s: float = 7 * 86400.0
    """Policy `ttl`: how long a region may go unread."""
    ram_dir: Path = Path("/dev/shm")
    """A tmpfs for the RAM tier."""
    concurrency: int = 64
    """Objects the daemon fetches at a time."""
    store_timeout_s: float = 30.0
    """How long one request to a store may take, and how long an unavailable store is retried."""
    prefetch: bool = True
    """Whether the first read of a snapshot that fits starts a background warm-up."""
    bypass_local: bool = False
    """Read through the daemon only, never from the tiers directly: what a mount's worker does after others died of
    what lies there."""
    staging: Path | None = None
    """Where read-write mounts stage what they write; see `staging_root`."""
    staging_bytes: int = 0
    """How much a mount may stage at a time; 0: what the file system has."""
    staging_wait_s: float = 60.0
    """How long a write to a full staging area waits for room; 0: not at all."""
    uploads: int = 8
    """Objects a read-write mount uploads at a time."""
    objects: str = ""
    """URL of the content-addressed storage for large new objects and pinned copies; see `require_objects`."""
    daemon: str = "auto"
    """`auto`: whoever needs the daemon starts it. `external`: something else does (a container of its own)."""
    mount_host: Path | None = None
    """The socket of a process that starts mounts (`python -m fuse_mount --host`); None: the caller does."""
    access: str = "all"
    """Which namespaces of Kubernetes a data set is open to that has no list of its own: `all` or `none`."""
    credentials: Path | None = None
    """Where store credentials lie that volumes brought along; see `credentials_dir`."""
    stores: tuple[StoreOptions, ...] = ()
    config: Path | None = None
    """The configuration file that was read, absolute."""

    def environment(self) -> dict[str, str]:
        """The variables that give a child process these settings (stores stay in the file, which is named; AWS_* is
        inherited)."""
        names = {
            "home": self.home,
            "catalog": self.catalog,
            "ram_bytes": self.ram_bytes,
            "ssd_bytes": self.ssd_bytes,
        }
        names |= {"eviction": self.eviction, "ttl_s": self.ttl_s, "ram_dir": self.ram_dir}
        names |= {"concurrency": self.concurrency, "store_timeout_s": self.store_timeout_s}
        names |= {"prefetch": "1" if self.prefetch else "0"}
        if self.staging is not None:
            names["staging"] = self.staging
        names |= {"staging_bytes": self.staging_bytes, "staging_wait_s": self.staging_wait_s, "uploads": self.uploads}
        if self.objects:
            names["objects"] = self.objects
        names |= {"daemon": self.daemon, "access": self.access}
        if self.mount_host is not None:
            names["mount_host"] = self.mount_host
        if self.credentials is not None:
            names["credentials"] = self.credentials
        if self.config is not None:
            names["config"] = self.config
        return {f"DATACACHE_{name.upper()}": str(value) for name, value in names.items()}

    @property
    def staging_root(self) -> Path:
        """Where the staging areas of read-write mounts are: `staging`, or a folder in the home."""
        return self.home / "staging" if self.staging is None else self.staging

    @property
    def credentials_dir(self) -> Path:
        """Where store credentials that volumes brought along lie: `credentials`, or a folder in the home."""
        return self.home / "credentials" if self.credentials is None else self.credentials

    def require_objects(self) -> str:
        """Where large new objects go. `SettingsError` if it was not set and the catalog is shared: a folder of this
        node would not be there for the others."""
        if not self.objects:
            raise SettingsError(
                "new objects are to be stored, and it is not set where",
                hint="Set DATACACHE_OBJECTS to a bucket and prefix that every node reaches, such as s3://bucket/objects.",
            )
        return self.objects


def parse_bytes(text: str | int) -> int:
    """`"20GB"`, `"512MiB"`, `"1_000"`, `1000` → bytes; `ValueError` otherwise."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with a unit, such as 20GB or 512MiB")
    return int(float(match[1].replace("_", "")) * _UNITS[match[2].lower()])


def _parse_bool(value: str | bool | int) -> bool:
    known = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    text = str(value).strip().lower()
    if text not in known:
        raise ValueError(f"{value!r} is neither true nor false")
    return known[text]


def _parse_eviction(value: str) -> str:
    if value not in EVICTION_POLICIES:
        raise ValueError(f"{value!r} is no eviction policy; there are {', '.join(EVICTION_POLICIES)}")
    return value


def _parse_choice(*choices: str) -> Any:
    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is neither {' nor '.join(choices)}")
        return value

    return parse


def _parse_catalog(value: str) -> str:
    if not re.match(r"(sqlite:///.|mongodb(\+srv)?://.)", value):
        raise ValueError("it must be sqlite:///PATH or mongodb://HOST/DATABASE")
    return value


def _parse_objects(value: str) -> str:
    if "://" in value:
        return value
    if not value:
        raise ValueError("it must be a URL, such as s3://bucket/objects, or a folder")
    return f"file://{_path(value)}"


def _positive(kind: type[int | float]) -> Any:
    def parse(value: str | float) -> float:
        try:
            number = kind(value)
        except ValueError as exc:
            raise ValueError(f"{value!r} is not a number") from exc
        if number <= 0:
            raise ValueError(f"{value!r} must be above 0")
        return number

    return parse


def _seconds_or_none(value: str | float) -> float:
    try:
        number = float(value)
    except ValueError as exc:
        raise ValueError(f"{value!r} is not a number") from exc
    if not 0 <= number < float("inf"):
        raise ValueError(f"{value!r} must be 0 or more")
    return number


def _path(value: str) -> Path:
    if not value:
        raise ValueError("the path is empty")
    return Path(value).expanduser().absolute()


_PARSERS: dict[str, Any] = {
    "home": _path,
    "catalog": _parse_catalog,
    "ram_bytes": parse_bytes,
    "ssd_bytes": parse_bytes,
    "eviction": _parse_eviction,
    "ttl_s": _positive(float),
    "ram_dir": _path,
    "concurrency": _positive(int),
    "store_timeout_s": _positive(float),
    "prefetch": _parse_bool,
    "bypass_local": _parse_bool,
    "staging": _path,
    "staging_bytes": parse_bytes,
    "staging_wait_s": _seconds_or_none,
    "uploads": _positive(int),
    "objects": _parse_objects,
    "daemon": _parse_choice("auto", "external"),
    "mount_host": _path,
    "access": _parse_choice("all", "none"),
    "credentials": _path,
}


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check all settings. Raises `SettingsError` for a wrong value or an unreadable file."""
    environ = os.environ if environ is None else environ
    home = _checked("DATACACHE_HOME", "home", environ.get("DATACACHE_HOME") or str(_default_home(environ)))
    config = environ.get("DATACACHE_CONFIG")
    file = _path(config) if config else home / "config.toml"
    used: Path | None = None
    values: dict[str, Any] = {"home": home}
    stores: tuple[StoreOptions, ...] = ()
    if config or _is_there(file):
        from_file, stores = _read_file(file)
        used = file
        values = from_file | values if environ.get("DATACACHE_HOME") else values | from_file
    values |= _read_environment(environ)
    home = values["home"]
    values.setdefault("catalog", f"sqlite:///{home / 'catalog.db'}")
    if values["catalog"].startswith("sqlite:"):
        values.setdefault("objects", f"file://{home / 'objects'}")
    values.setdefault("ram_bytes", min(256 * 2**20, _memory_bytes() // 16))
    values.setdefault("ssd_bytes", min(50 * 10**9, (_free_bytes(home) + _cached_bytes(home)) // 2))
    return Settings(**values, stores=stores, config=used)


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as exc:
        raise SettingsError(
            f"{file.parent} cannot be looked into: {exc.strerror}", hint="Set DATACACHE_HOME to a folder of your own."
        ) from exc


def variable_names() -> frozenset[str]:
    """The environment variables that `load_settings` understands."""
    return frozenset({"DATACACHE_CONFIG", *(f"DATACACHE_{name.upper()}" for name in _PARSERS)})


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {f"DATACACHE_{name.upper()}": name for name in _PARSERS}
    names.pop("DATACACHE_HOME")
    # Unknown names are passed over: Kubernetes sets DATACACHE_PORT and the like for a service of that name.
    return {name: _checked(var, name, environ[var]) for var, name in names.items() if environ.get(var)}


def _read_file(file: Path) -> tuple[dict[str, Any], tuple[StoreOptions, ...]]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingsError(f"the configuration file {file} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"the configuration file {file} is not valid TOML: {exc}") from exc
    stores = table.pop("stores", {})
    unknown = sorted(set(table) - set(_PARSERS))
    if unknown:
        raise SettingsError(f"{file}: {unknown[0]!r} is no setting", hint=f"Known: {', '.join(sorted(_PARSERS))}.")
    values = {name: _checked(f"{file}: {name}", name, value) for name, value in table.items()}
    return values, tuple(_store(file, name, options) for name, options in stores.items())


def _store(file: Path, name: str, options: Any) -> StoreOptions:
    known = {f.name for f in fields(StoreOptions)} - {"name"}
    if not isinstance(options, dict) or "url" not in options:
        raise SettingsError(f"{file}: [stores.{name}] needs a url, such as s3://bucket")
    unknown = sorted(set(options) - known)
    if unknown:
        raise SettingsError(f"{file}: [stores.{name}] has no option {unknown[0]!r}", hint=f"Known: {sorted(known)}.")
    return StoreOptions(name=name, **options)


def _checked(label: str, name: str, value: Any) -> Any:
    try:
        return _PARSERS[name](value)
    except (ValueError, TypeError) as exc:
        raise SettingsError(f"{label}: {exc}") from exc


def _default_home(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "datacache"


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def _cached_bytes(home: Path) -> int:
    """What the SSD tier takes already: were it not counted as free, the default would shrink with every start."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(home / "cache" / "ssd") as files:
        for file in files:
            with contextlib.suppress(OSError):  # evicted this moment
                total += file.stat().st_blocks * 512
    return total
