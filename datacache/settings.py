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
import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datacache.core.addresses import parse_network_rules
from datacache.core.disk import replace_file
from datacache.core.errors import SettingsError
from datacache.core.nodes import parse_address, parse_cluster_key, parse_cluster_mode, parse_name, parse_nodes

_OBJECT_STORES = ("*",)
_OF_THE_DAEMON = (
    *("DATACACHE_RAM_BYTES", "DATACACHE_SSD_BYTES", "DATACACHE_EVICTION", "DATACACHE_TTL_S", "DATACACHE_RAM_DIR"),
    *("DATACACHE_CONCURRENCY", "DATACACHE_STORE_TIMEOUT_S", "DATACACHE_PREFETCH", "DATACACHE_CHECK_MD5"),
    *("DATACACHE_SHARES", "DATACACHE_SOURCES", "DATACACHE_CONFIG", "DATACACHE_PROCESSES"),
    *("DATACACHE_CLUSTER", "DATACACHE_LISTEN", "DATACACHE_CLUSTER_KEY_FILE", "DATACACHE_CLUSTER_MEMBERS"),
    *("DATACACHE_ZONE", "DATACACHE_NODE", "DATACACHE_CLUSTER_MODE", "DATACACHE_CLUSTER_TLS"),
)
_MOST_PROCESSES = 64
EVICTION_POLICIES = ("keep", "lru", "ttl", "clairvoyant")
_NAMESPACE = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _UNITS |= dict.fromkeys((_letter, f"{_letter}b"), 1000**_power)
    _UNITS |= dict.fromkeys((f"{_letter}i", f"{_letter}ib"), 1024**_power)


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
    backend: str = ""
    """`s3fs`: reach the bucket through s3fs, which logs in by itself. Empty: the backend of the URL."""
    brought: bool = False
    """True if a volume's Secret names the endpoint, and not an administrator. The file cannot say it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set. Sizes in bytes, times in seconds."""

    home: Path
    """Everything local lives under it; two homes on one machine never meet."""
    catalog: str = field(repr=False)
    """`sqlite:///PATH`, `mongodb://…/DATABASE`, which may have a password in it and is in no repr, or the URL of a
    bucket's or folder's prefix to which snapshots were pushed, which can only be read."""
    ram_bytes: int
    ssd_bytes: int
    eviction: str = "keep"
    ttl_s: float = 7 * 86400.0
    """Policy `ttl`: how long a region may go unread."""
    ram_dir: Path = Path("/dev/shm")
    """A tmpfs for the RAM tier."""
    concurrency: int = 64
    """Objects the daemon fetches at a time."""
    processes: int = 0
    """Processes that serve the cache, each a part of the objects; 0: one for eight cores, eight at most."""
    store_timeout_s: float = 30.0
    """How long one request to a store may take, and how long an unavailable store is retried."""
    prefetch: bool = True
    """True if the first read of a snapshot that fits starts a background warm-up."""
    check_md5: bool = True
    """True if an object that comes whole, and that a store has no better checksum of, is checked against an ETag that
    looks like an MD5."""
    bypass_local: bool = False
    """Read through the daemon only, never from the tiers directly: what a mount's worker does after others died of
    what lies there."""
    staging: Path | None = None
    """Where read-write mounts stage what they write; see `staging_root`."""
    staging_bytes: int = 0
    """How much a mount may stage at a time; 0: what the file system has."""
    staging_wait_s: float = 60.0
    """How long a write to a full staging area waits for room; 0: not at all."""
    replica: str = "require"
    """Fate of a write with `ack=replicated` while there is no second node: it waits and fails (`require`), or
    is acknowledged by this node alone (`prefer`)."""
    replica_lease_s: float = 60.0
    """How long after a node's last sign of life another one uploads what is pending there."""
    uploads: int = 8
    """Objects a read-write mount uploads at a time."""
    objects: str = ""
    """URL of the content-addressed storage for large new objects and copies; see `require_objects`."""
    daemon: str = "auto"
    """`auto`: whoever needs the daemon starts it. `external`: something else does (a container of its own)."""
    fuse: str = "kernel"
    """How a read-write mount's server talks to the kernel: in the kernel's own protocol, or through `pyfuse3`."""
    mount_host: Path | None = None
    """The socket of a process that starts mounts (`python -m fuse_mount --host`); None: the caller does."""
    log_level: str = "info"
    """The least that our processes log: `debug`, `info`, `warning` or `error`."""
    progress: bool = True
    """Show how far long calls are: in a notebook, and on a terminal."""
    access: str = "all"
    """Which namespaces of Kubernetes a data set is open to that has no list of its own: `all` or `none`."""
    metrics_names: bool = False
    """True if the metrics that a node serves name data sets and namespaces."""
    ui_hosts: tuple[str, ...] = ()
    """Names and addresses, beside those of this machine, by which browsers reach the page of `dsctl ui`."""
    ui_user_header: str = ""
    """The header in which a proxy before that page names the user, and which it lets nobody else set; '' for none."""
    ui_namespace: str = ""
    """The namespace of Kubernetes whose data sets that page shows; '': all there are, as `dsctl` does."""
    pins: tuple[str, ...] = ()
    """The namespaces of Kubernetes whose claims and pods may pin data sets on nodes; `*` is every one."""
    sources: tuple[str, ...] | None = None
    """URL prefixes that the objects of snapshots may be read from; `*` is every bucket of an object store. None: every
    place there is, files of this machine included. See `for_others`."""
    credentials: Path | None = None
    """Where store credentials lie that volumes brought along; see `credentials_dir`."""
    allow_network: tuple[str, ...] = ()
    """Hosts and networks of this machine or of private networks that endpoints in volumes' Secrets and the addresses of
    imported lists may lead to, as `core.addresses.parse_network_rule` takes them."""
    shares: tuple[tuple[str, float], ...] = ()
    """Shares of the cache: patterns of data set names, and weights."""
    cluster: str = ""
    """The cluster of caches that this node is in; '' for none."""
    listen: str = ""
    """`HOST:PORT` where other nodes of the cluster reach this one."""
    cluster_key: str = field(default="", repr=False)
    """The secret that all nodes of the cluster have. In no repr; see `cluster.members.read_cluster_key`."""
    cluster_key_file: Path | None = None
    """A file with that key, such as one of a Secret."""
    cluster_tls: Path | None = None
    """A folder with `tls.crt`, `tls.key` and `ca.crt`, with which nodes speak TLS to each other. None: in the clear."""
    cluster_members: tuple[str, ...] = ()
    """The nodes, as `core.nodes.parse_node` takes them. Empty: the catalog's MongoDB knows them."""
    zone: str = ""
    """Where the node is: its owners of blocks are nodes of the same zone first."""
    node: str = ""
    """The id of this node in its cluster; '': the name of the machine. Without a cluster, the name under which the
    daemon tells the catalog what the node holds; '': it does not."""
    cluster_mode: tuple[tuple[str, str], ...] = (("*", "share"),)
    """Patterns of data set names, and their mode; see `mode_of`."""
    stores: tuple[StoreOptions, ...] = ()
    config: Path | None = None
    """The configuration file that was read, absolute."""
    default_ssd_bytes: int | None = None
    """The `ssd_bytes` of a home where nobody says it: by what is free, until its first daemon has written it down."""

    def environment(self) -> dict[str, str]:
        """Return the variables that give a child process these settings (stores stay in the file, which is named; AWS_*
        is inherited)."""
        found = {}
        for name in (*_PARSERS, "config"):
            value = getattr(self, name)
            if value is None or value in ("", ()) or name == "bypass_local":
                continue
            if name == "ssd_bytes" and value == self.default_ssd_bytes:
                continue
            if name == "shares":
                value = ",".join(f"{pattern}={weight:g}" for pattern, weight in value)
            elif name == "cluster_mode":
                value = ",".join(map("=".join, value))
            elif isinstance(value, tuple):
                value = " ".join(value)
            elif isinstance(value, bool):
                value = int(value)
            found[f"DATACACHE_{name.upper()}"] = str(value)
        return found

    def of_the_daemon(self) -> dict[str, str]:
        """Return the settings that a daemon goes by, variables and values, for comparing. Without a password."""
        names = {"DATACACHE_CATALOG": re.sub(r"://[^/@]*@", "://", self.catalog)}
        names |= {name: value for name, value in self.environment().items() if name in _OF_THE_DAEMON}
        return {name: names.get(name, "") for name in ("DATACACHE_CATALOG", *_OF_THE_DAEMON)}

    def for_others(self) -> Settings:
        """Return the same for a process that reads on behalf of others, such as a node for its pods: where nobody has
        said which `sources` there are, buckets only, and no file of this machine.
        """
        return self if self.sources is not None else replace(self, sources=_OBJECT_STORES)

    @property
    def catalog_is_shared(self) -> bool:
        """Tell whether nodes can write into the catalog for one another: it is in MongoDB."""
        return is_shared(self.catalog)

    @property
    def staging_root(self) -> Path:
        """Return where the staging areas of read-write mounts are: `staging`, or a folder in the home."""
        return self.home / "staging" if self.staging is None else self.staging

    @property
    def credentials_dir(self) -> Path:
        """Return where store credentials that volumes brought along lie: `credentials`, or a folder in the home."""
        return self.home / "credentials" if self.credentials is None else self.credentials

    def reduce_elsewhere(self) -> tuple[object, ...]:
        """Return what travels to another machine's process (`core.engine`): which catalog, and where new objects go,
        for one that has no settings of its own for them. All else is its own. No password travels."""
        secret = "@" in urlsplit(self.catalog).netloc
        return _elsewhere, ("" if secret else self.catalog, self.objects)

    def require_objects(self) -> str:
        """Return where large new objects go. `SettingsError` if it was not set and the catalog is shared: a folder of
        this node would not be there for the others."""
        if not self.objects:
            raise SettingsError(
                "new objects are to be stored, and it is not set where",
                hint="Set DATACACHE_OBJECTS to a bucket and prefix that every node reaches, such as s3://bucket/objects.",
            )
        return self.objects

    def mode_of(self, dataset: str) -> str:
        """Return the mode of a data set in the cluster: that of the first pattern it matches, else `share`."""
        return next((mode for pattern, mode in self.cluster_mode if fnmatchcase(dataset, pattern)), "share")


def _elsewhere(catalog: str, objects: str) -> Settings:
    own = load_settings()
    if own.catalog != f"sqlite:///{own.home / 'catalog.db'}":  # it was set
        return own if own.objects else replace(own, objects=objects)
    if not catalog:
        raise SettingsError(
            "a process of an engine knows no catalog: that of the client has a password, which is not sent to engines",
            hint="Set DATACACHE_CATALOG where the engine's processes are started.",
        )
    return replace(own, catalog=catalog, objects=objects)


def parse_bytes(text: str | int) -> int:
    """Return the bytes of `"20GB"`, `"512MiB"`, `"1_000"` or `1000`; `ValueError` otherwise."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with a unit, such as 20GB or 512MiB")
    return int(float(match[1].replace("_", "")) * _UNITS[match[2].lower()])


def format_bytes(size_bytes: float) -> str:
    """Write `1234567` as `1.2 MB`: powers of 1000, as `parse_bytes` understands them."""
    size, units = float(size_bytes), ["B", "KB", "MB", "GB", "TB", "PB"]
    while abs(size) >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:,.0f} B" if units[0] == "B" else f"{size:,.1f} {units[0]}"


def _parse_bool(value: str | bool | int) -> bool:
    text = str(value).strip().lower()
    if text not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(f"{value!r} is neither true nor false")
    return text in ("1", "true", "yes", "on")


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
    if not in_bucket(value) and not re.match(r"(sqlite:///.|mongodb(\+srv)?://.)", value):
        raise ValueError(CATALOG_URLS)
    return value


CATALOG_URLS = "it must be sqlite:///PATH, mongodb://HOST/DATABASE or, to be read only, s3://BUCKET/PREFIX"


def is_shared(url: str) -> bool:
    """Tell whether the catalog at `url` is in MongoDB, where nodes can write for one another."""
    return url.startswith(("mongodb://", "mongodb+srv://"))


def in_bucket(url: str) -> bool:
    """Tell whether the catalog at `url` lies in a bucket or folder: then it can only be read, and nothing is shared
    through it."""
    return re.match(r"(s3|gs|az|abfss?|file)://.", url) is not None


def _parse_objects(value: str) -> str:
    if "://" in value:
        return value
    if not value:
        raise ValueError("it must be a URL, such as s3://bucket/objects, or a folder")
    return _file_url(_path(value))


def _parse_words(value: str | list[str]) -> list[str]:
    if isinstance(value, str):
        return value.replace(",", " ").split()
    if not all(isinstance(word, str) for word in value):
        raise ValueError("it is a list of texts")
    return value


def _parse_hosts(value: str | list[str]) -> tuple[str, ...]:
    hosts = _parse_words(value)
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*", host):
            raise ValueError(f"{host!r} is no name or address of a host; ports are left out")
    return tuple(hosts)


def _parse_header(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]+", value):
        raise ValueError(f"{value!r} cannot name a header, such as X-Forwarded-User")
    return value


def _parse_namespace(value: str) -> str:
    if not re.fullmatch(_NAMESPACE, value):
        raise ValueError(f"{value!r} cannot name a namespace")
    return value


def _parse_pins(value: str | list[str]) -> tuple[str, ...]:
    namespaces = _parse_words(value)
    for namespace in namespaces:
        if namespace != "*" and not re.fullmatch(_NAMESPACE, namespace):
            raise ValueError(f"{namespace!r} cannot name a namespace, and is not '*'")
    return tuple(namespaces)


def _parse_sources(value: str | list[str]) -> tuple[str, ...]:
    prefixes = _parse_words(value)
    for prefix in prefixes:
        if prefix != "*" and not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s,]*", prefix):
            raise ValueError(f"{prefix!r} is no URL prefix, such as s3://bucket/ or file:///data/, and not '*'")
    if not prefixes:
        raise ValueError("it names no store; '*' is every bucket of an object store")
    return tuple(prefixes)


def _positive(kind: type[int | float]) -> Any:
    def parse(value: str | float) -> float:
        number = _number(kind, value)
        if number <= 0:
            raise ValueError(f"{value!r} must be above 0")
        return number

    return parse


def _parse_processes(value: str | int) -> int:
    number = int(_number(int, value))
    if not 0 <= number <= _MOST_PROCESSES:
        raise ValueError(f"{value!r} must be 0 to {_MOST_PROCESSES}")
    return number


def _seconds_or_none(value: str | float) -> float:
    number = _number(float, value)
    if number < 0:
        raise ValueError(f"{value!r} must be 0 or more")
    return number


def _number(kind: type[int | float], value: str | float) -> float:
    """Return a finite number; TOML has `true`, `nan` and `inf` of its own, and 3.7 is no number of threads."""
    wrong = f"{value!r} is not a {'whole ' if kind is int else ''}number"
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise ValueError(wrong)
    try:
        number = kind(value)
    except (ValueError, OverflowError) as exc:
        raise ValueError(wrong) from exc
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _file_url(path: Path) -> str:
    return f"file://{path}".replace("%", "%25")  # as in `store.urls`


def _path(value: str) -> Path:
    if not value:
        raise ValueError("the path is empty")
    return Path(value).expanduser().absolute()


def _parse_shares(value: str | Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    if isinstance(value, str):
        parts = [part.rpartition("=") for part in value.split(",") if part.strip()]
        pairs: list[tuple[str, Any]] = [(pattern.strip(), weight) for pattern, _, weight in parts]
    else:
        pairs = list(value.items())
    shares: dict[str, float] = {}
    for pattern, weight in pairs:
        if not pattern or "," in pattern or isinstance(weight, bool):
            raise ValueError(f"{value!r} are no shares; write PATTERN=WEIGHT,…, such as team-a-*=50,team-b-*=50")
        if pattern in shares:
            raise ValueError(f"{pattern!r} has two shares")
        shares[pattern] = float(_positive(float)(weight))
    return tuple(shares.items())


_DEFAULT_SSD_BYTES = "ssd_bytes"
"""File of the home: the default that its first daemon found."""
_PARSERS: dict[str, Any] = {
    "home": _path,
    "catalog": _parse_catalog,
    "ram_bytes": parse_bytes,
    "ssd_bytes": parse_bytes,
    "eviction": _parse_eviction,
    "ttl_s": _positive(float),
    "ram_dir": _path,
    "concurrency": _positive(int),
    "processes": _parse_processes,
    "store_timeout_s": _positive(float),
    "prefetch": _parse_bool,
    "check_md5": _parse_bool,
    "bypass_local": _parse_bool,
    "staging": _path,
    "staging_bytes": parse_bytes,
    "staging_wait_s": _seconds_or_none,
    "replica": _parse_choice("require", "prefer"),
    "replica_lease_s": _positive(float),
    "uploads": _positive(int),
    "objects": _parse_objects,
    "daemon": _parse_choice("auto", "external"),
    "fuse": _parse_choice("kernel", "pyfuse3"),
    "mount_host": _path,
    "log_level": _parse_choice("debug", "info", "warning", "error"),
    "progress": _parse_bool,
    "metrics_names": _parse_bool,
    "access": _parse_choice("all", "none"),
    "ui_hosts": _parse_hosts,
    "ui_user_header": _parse_header,
    "ui_namespace": _parse_namespace,
    "pins": _parse_pins,
    "sources": _parse_sources,
    "credentials": _path,
    "shares": _parse_shares,
    "allow_network": parse_network_rules,
    "cluster": parse_name,
    "listen": parse_address,
    "cluster_key": parse_cluster_key,
    "cluster_key_file": _path,
    "cluster_tls": _path,
    "cluster_members": parse_nodes,
    "zone": parse_name,
    "node": parse_name,
    "cluster_mode": parse_cluster_mode,
}


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check all settings. Raises `SettingsError` for a wrong value or an unreadable file."""
    environ = os.environ if environ is None else environ
    home = _checked("DATACACHE_HOME", "home", environ.get("DATACACHE_HOME") or _default_home(environ))
    config = environ.get("DATACACHE_CONFIG")
    file = _checked("DATACACHE_CONFIG", "home", config) if config else home / "config.toml"
    used: Path | None = None
    values: dict[str, Any] = {"home": home}
    stores: tuple[StoreOptions, ...] = ()
    if config or _is_there(file):
        from_file, stores = _read_file(file)
        used = file
        values = from_file | values if environ.get("DATACACHE_HOME") else values | from_file
    for name in _PARSERS:  # unknown names are passed over: Kubernetes sets DATACACHE_PORT for a service of that name
        variable = f"DATACACHE_{name.upper()}"
        if name != "home" and environ.get(variable):
            values[name] = _checked(variable, name, environ[variable])
    home = values["home"]
    values.setdefault("catalog", f"sqlite:///{home / 'catalog.db'}")
    if values["catalog"].startswith("sqlite:"):
        values.setdefault("objects", _file_url(home / "objects"))
    values.setdefault("ram_bytes", min(256 * 2**20, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16))
    default_ssd_bytes = None
    if "ssd_bytes" not in values:
        values["ssd_bytes"] = default_ssd_bytes = _default_ssd_bytes(home)
    settings = Settings(**values, stores=stores, config=used, default_ssd_bytes=default_ssd_bytes)
    # A daemon that something else keeps running is a node's, and so is whoever counts on it.
    return settings.for_others() if settings.daemon == "external" else settings


def _default_home(environ: Mapping[str, str]) -> str:
    data = environ.get("XDG_DATA_HOME")
    try:
        return f"{data or Path.home() / '.local' / 'share'}/datacache"
    except RuntimeError as exc:  # a container's user may have neither HOME nor a line in /etc/passwd
        raise SettingsError(
            f"the user {os.getuid()} has no home folder", hint="Set DATACACHE_HOME to a folder of your own."
        ) from exc


def keep_default_ssd_bytes(home: Path) -> None:
    """Write down how large the tier on disk is where nobody says it, if that is not written down yet. For daemons, at
    their start: what else fills the disk later changes nothing about it."""
    file = home / _DEFAULT_SSD_BYTES
    if not _is_there(file):
        size_bytes = _default_ssd_bytes(home)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, f"{size_bytes}\n".encode())


def _default_ssd_bytes(home: Path) -> int:
    file = home / _DEFAULT_SSD_BYTES
    try:
        return parse_bytes(file.read_text(encoding="ascii").strip())
    except FileNotFoundError:
        return min(50 * 10**9, (_free_bytes(home) + _cached_bytes(home)) // 2)
    except (OSError, ValueError) as exc:
        raise SettingsError(
            f"{file}, the size of the tier on disk, cannot be read: {exc}",
            hint="Remove it, or set DATACACHE_SSD_BYTES.",
        ) from exc


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as exc:
        raise SettingsError(
            f"{file.parent} cannot be looked into: {exc.strerror}", hint="Set DATACACHE_HOME to a folder of your own."
        ) from exc


def variable_names() -> frozenset[str]:
    """Return the environment variables that `load_settings` understands."""
    return frozenset({"DATACACHE_CONFIG", *(f"DATACACHE_{name.upper()}" for name in _PARSERS)})


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
        raise SettingsError(f"{file}: {unknown[0]!r} is no setting", hint=_meant(unknown[0], {*_PARSERS, "stores"}))
    values = {name: _checked(f"{file}: {name}", name, value) for name, value in table.items()}
    return values, tuple(_store(file, name, options) for name, options in stores.items())


def _store(file: Path, name: str, options: Any) -> StoreOptions:
    known = {f.name for f in fields(StoreOptions)} - {"name", "brought"}
    if not isinstance(options, dict) or "url" not in options:
        raise SettingsError(f"{file}: [stores.{name}] needs a url, such as s3://bucket")
    unknown = sorted(set(options) - known)
    if unknown:
        raise SettingsError(f"{file}: [stores.{name}] has no option {unknown[0]!r}", hint=_meant(unknown[0], known))
    for option, value in options.items():
        kind, what = (bool, "true or false, without quotes") if option == "anonymous" else (str, "a text in quotes")
        if not isinstance(value, kind):
            raise SettingsError(f"{file}: [stores.{name}] {option} must be {what}, and is {value!r}")
    backend = options.get("backend", "")
    if backend not in ("", "s3fs") or (backend and not options["url"].startswith("s3://")):
        hint = "Known: s3fs, for s3:// buckets. Without a backend the URL decides."
        raise SettingsError(f"{file}: [stores.{name}] {options['url']} cannot have the backend {backend!r}", hint=hint)
    return StoreOptions(name=name, **options)


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), sorted(known), n=1)
    return f"{f'Did you mean {near[0]}? ' if near else ''}Known: {', '.join(sorted(known))}."


def _checked(label: str, name: str, value: Any) -> Any:
    try:
        return _PARSERS[name](value)
    except (ValueError, TypeError, RuntimeError) as exc:  # RuntimeError: nobody knows what '~' stands for
        raise SettingsError(f"{label}: {exc}") from exc


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def _cached_bytes(home: Path) -> int:
    """Return what the SSD tier takes: were it not counted as free, the default would shrink with every start."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(home / "cache" / "ssd") as files:
        for file in files:
            with contextlib.suppress(OSError):  # evicted this moment
                total += file.stat().st_blocks * 512
    return total
