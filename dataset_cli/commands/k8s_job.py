"""`dsctl k8s job COMMAND …`: Jobs that do a command's work on many pods, to give to `kubectl apply`.

Two Jobs come of it (decision 0068): a client, which runs the command with `--on queue://NAME`, and workers, an Indexed
Job of `dsctl tasks work --job NAME`, for `predict` with `--allow-models`. The command's own parser checks its
arguments, before anything is printed. With `--json` it prints a `List` of the same objects, which kubectl takes as
well.
"""

from __future__ import annotations

import math
import secrets
import string
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click
from click.core import ParameterSource

from datacache import __version__, api
from datacache.core.errors import UsageError
from dataset_cli.app import App, ImageSize, SnapshotRef, command, options
from dataset_cli.commands.gc import Duration
from dataset_cli.manifests import (
    RESTRICTED_CONTAINER,
    as_yaml,
    checked_name,
    checked_secret,
    checked_size,
    matching,
    name_of,
    restricted_pod,
)

_COMMANDS = ("convert", "merge", "dedupe", "shard", "query", "stats", "predict")
"""Those with work for an engine; each has a module of its name."""
_NOT_IN_A_POD = {"on", "processes", "check", "yes", "decoders", "accept"}
_READ_HERE = {"classes"}
"""Options that name a file which travels along; those that name another file would write it into the pod."""
_USER = 10001
"""The user of our image."""
_NAME_LENGTH = 40
"""Kubernetes adds what a Job is for and an index: 63 at most."""
_TRIES = 4
_WAIT = "30m"
"""Workers wait for a client for so long: one that fails before it begins its job leaves no word in the catalog."""
_CONFIG_BYTES = 900_000
"""Kubernetes takes 1 MiB."""
_FILES = "/etc/datacache/files"
_MESSAGE = "/dev/termination-log"
"""Where Kubernetes looks for a container's last words."""
_DATABASE = "mongodb://datacache:$(MONGODB_PASSWORD)@datacache-mongodb.datacache.svc/datacache?authSource=admin"
_WRONG_USAGE = 2

_MOST_S = 2**31 - 1
"""Kubernetes takes no longer times."""


def _checked_time(_context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 1 <= value <= _MOST_S:
        raise UsageError(f"{option.opts[0]}: Kubernetes takes 1 to {_MOST_S:,} seconds")
    return value


pod_options = options(
    click.option("--workers", type=click.IntRange(1, 10_000), required=True, help="So many pods work at once."),
    click.option("--run", callback=checked_name, help="Name of this run (default: made from the data set's, and new)."),
    click.option("--namespace", callback=checked_name, help="Of the Jobs (default: kubectl's)."),
    click.option("--image", default=f"datacache:{__version__}", show_default=True, help="Of the same version."),
    click.option(
        "--cpu",
        default="1",
        show_default=True,
        callback=matching("[1-9][0-9]*m?", "a number of processors, or of thousandths such as 500m"),
        help="That a worker asks for; it has a process for each.",
    ),
    click.option(
        "--memory", default="2Gi", show_default=True, callback=checked_size, help="That a worker gets at most."
    ),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        callback=lambda context, option, values: tuple(checked_secret(context, option, value) for value in values),
        help="With DATACACHE_CATALOG, AWS_…; several may be given (default: those of the chart).",
    ),
    click.option(
        "--ttl",
        "ttl_s",
        type=Duration(),
        default="1d",
        show_default=True,
        callback=_checked_time,
        help="Jobs that ended stay for so long.",
    ),
    click.option(
        "--deadline", "deadline_s", type=Duration(), callback=_checked_time, help="End what is not done after so long."
    ),
)
"""How the pods run; see `_RunOptions`."""


class _RunOptions(NamedTuple):
    workers: int
    run: str | None
    namespace: str | None
    image: str
    cpu: str
    memory: str
    secrets: tuple[str, ...]
    ttl_s: float
    deadline_s: float | None


class JobCommands(click.Group):
    """The commands that can work on an engine, each with the options of pods as well."""

    def list_commands(self, _context: click.Context) -> list[str]:
        """Return their names."""
        return list(_COMMANDS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        """Return the command that prints Jobs for another one, or None."""
        if name not in _COMMANDS:
            return None
        return _printing(name, getattr(import_module(f"dataset_cli.commands.{name}"), name))


@click.group(cls=JobCommands)
def job() -> None:
    """Print Jobs that do a command's work on many pods.

    \b
    dsctl k8s job convert mask@v1 --to yolo --as mask-yolo --workers 50 | kubectl -n datacache apply -f -
    """


def _printing(name: str, real: click.Command) -> click.Command:
    kept = [each for each in real.params if _is_for_pods(each)]
    writes_ref = any(each.name == "output_ref" for each in real.params)

    @command(name=name, short_help=real.get_short_help_str(), help=_HELP.format(command=f"dsctl {name}"))
    @pod_options
    def printed(app: App, /, **values: Any) -> None:
        run = _RunOptions(**{field: values.pop(field) for field in _RunOptions._fields})
        context = click.get_current_context()
        given = [each for each in kept if context.get_parameter_source(each.name or "") != ParameterSource.DEFAULT]
        if name == "predict" and context.get_parameter_source("image") == ParameterSource.DEFAULT:
            raise UsageError(
                "the pods need an image that has the model and its libraries",
                hint=f"Build one on datacache {__version__}, with the model, and name it: --image.",
            )
        pods = _Pods(run, values.get("name") or _refs(kept, values)[0].partition("@")[0])
        arguments = _arguments(app, given, values, pods)
        ref = [f"--output-ref={_MESSAGE}"] if writes_ref and values.get("name") else []
        _check(real, [*arguments, f"--on=queue://{pods.name}"], values, pods)
        may = ["--allow-models"] if name == "predict" else []
        _tell_what_pods_lack(app, _refs(kept, values))
        objects = pods.objects(["dsctl", name, *arguments, f"--on=queue://{pods.name}", *ref], may)
        listed: dict[str, Any] = {"apiVersion": "v1", "kind": "List", "items": objects}
        app.out.result(listed, as_yaml(objects))

    printed.params[:0] = kept
    return printed


_HELP = """Print Jobs that do what `{command}` does, with its options but for files of this machine, on many pods.

Each time it is another run. The same --run with more --workers makes a run larger while it goes on."""


def _is_for_pods(parameter: click.Parameter) -> bool:
    names_file = isinstance(parameter.type, click.Path) and parameter.name not in _READ_HERE
    return parameter.expose_value and parameter.name not in _NOT_IN_A_POD and not names_file


class _CheckedError(Exception):
    """A command has looked at its arguments, and begins."""


class _CheckingApp(App):
    @property
    def settings(self) -> NoReturn:
        """Raise: no command reads or makes anything without its settings."""
        raise _CheckedError


def _check(real: click.Command, words: list[str], values: Mapping[str, Any], pods: _Pods) -> None:
    """Have the command look at its arguments. Raises `UsageError`, and those of click."""
    for option in ("to", "objects"):
        place = values.get(option) or ""
        if place.startswith(("/", ".", "file:")) or ("/" in place and "://" not in place):
            raise UsageError(f"--{option}: {place} is a folder, of a pod that ends", hint="Name a bucket: s3://…")
    for option in ("model", "weights"):
        place = values.get(option) or ""
        if place.startswith((".", "~")) or (place and not place.startswith("/") and not {":", "@"} & set(place)):
            raise UsageError(
                f"--{option}: {place} is a path from where you are, and a pod is elsewhere",
                hint="Name its whole path in the image; or weights by URL, or as a file of a snapshot, NAME@REF/PATH.",
            )
    api.check_options(values)
    here = [pods.as_here(word) for word in words]
    parent = click.get_current_context().parent
    try:
        with real.make_context(real.name, here, parent=parent, obj=_CheckingApp()) as context:
            real.invoke(context)
    except _CheckedError:
        pass


def _tell_what_pods_lack(app: App, refs: Sequence[str]) -> None:
    if not app.settings.catalog_is_shared:
        app.out.warning(
            f"pods have a catalog of their own, and not {app.settings.catalog}: it needs {' and '.join(refs)}"
        )
    for ref in refs:
        origin = app.resolve(ref).origin
        if origin.startswith("file:"):
            app.out.warning(f"{ref} lies in {origin}, a folder that pods do not have")


def _refs(parameters: Sequence[click.Parameter], values: Mapping[str, Any]) -> list[str]:
    found = [values[each.name or ""] for each in parameters if isinstance(each.type, SnapshotRef)]
    return [ref for value in found for ref in ([value] if isinstance(value, str) else value or ())]


def _arguments(app: App, given: Sequence[click.Parameter], values: Mapping[str, Any], pods: _Pods) -> list[str]:
    """Return the command's arguments as the client's pod gets them: with references that nothing moves, and files that
    travel along."""
    words: list[str] = []
    for each in given:
        value = values[each.name or ""]
        several = each.multiple or each.nargs != 1 if isinstance(each, click.Option) else each.nargs != 1
        texts = [_text(app, each, one, pods) for one in (value if several else [value])]
        if isinstance(each, click.Argument):
            words += texts
        elif isinstance(each, click.Option) and each.is_flag:
            words += each.opts[:1] if value else each.secondary_opts[:1]
        else:
            words += [f"{each.opts[0]}={text}" for text in texts]
    return words


def _text(app: App, parameter: click.Parameter, value: Any, pods: _Pods) -> str:
    if isinstance(parameter.type, SnapshotRef):
        record = app.resolve(value)
        return f"{record.dataset}@{record.id}"
    if parameter.name == "weights" and (file := api.split_weights(value)) is not None:
        record = app.resolve(file[0])
        return f"{record.dataset}@{record.id}/{file[1]}"
    if isinstance(parameter.type, ImageSize):
        high, wide = value
        return f"{wide}x{high}"
    if isinstance(value, Path):
        return pods.take_along(parameter.opts[0].lstrip("-"), value)
    return str(value)


class _Pods:
    """The objects of a run."""

    def __init__(self, run: _RunOptions, dataset: str) -> None:
        drawn = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(5))
        self.name = run.run or f"{name_of(dataset, _NAME_LENGTH - 6)}-{drawn}"
        if len(self.name) > _NAME_LENGTH:
            raise UsageError(f"--run: {self.name} has more than {_NAME_LENGTH} characters")
        self._run = run
        self._files: dict[str, str] = {}
        self._paths: dict[str, Path] = {}

    def take_along(self, name: str, path: Path) -> str:
        """Have a file of text in the client's pod, and return its path there."""
        try:
            self._files[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(f"--{name}: {path} cannot be read: {exc}") from exc
        if sum(len(text.encode()) for text in self._files.values()) > _CONFIG_BYTES:
            raise UsageError(f"--{name}: {path} is larger than what Kubernetes keeps", hint=f"{_CONFIG_BYTES:,} bytes.")
        self._paths[f"{_FILES}/{name}"] = path
        return f"{_FILES}/{name}"

    def as_here(self, word: str) -> str:
        """Return an argument of the pod with the path that a file has here."""
        option, _, path = word.partition("=")
        return f"{option}={self._paths[path]}" if path in self._paths else word

    def objects(self, client: list[str], may: list[str]) -> list[dict[str, Any]]:
        """Return them, given the client's command, and options of the workers for what they may do."""
        processes = max(1, math.floor(_processors(self._run.cpu)))
        worker = [
            "dsctl",
            "tasks",
            "work",
            f"--job={self.name}",
            f"--processes={processes}",
            f"--max-idle={_WAIT}",
            *may,
        ]
        objects = [self._job("client", client), self._job("workers", worker)]
        if self._files:
            kept = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata("files"), "data": self._files}
            objects.insert(0, kept)
        return objects

    def _metadata(self, what: str) -> dict[str, Any]:
        namespace = {"namespace": self._run.namespace} if self._run.namespace else {}
        return {"name": f"{self.name}-{what}", **namespace, "labels": self._labels(what)}

    def _labels(self, what: str) -> dict[str, str]:
        # MongoDB's NetworkPolicy lets in whom the first one names.
        return {"app.kubernetes.io/name": "datacache", "datacache.io/run": self.name, "datacache.io/part": what}

    def _job(self, what: str, command: list[str]) -> dict[str, Any]:
        run, is_client = self._run, what == "client"
        often: dict[str, Any] = {"backoffLimit": _TRIES}
        if not is_client:
            often = {
                "completionMode": "Indexed",
                "completions": run.workers,
                "parallelism": run.workers,
                "backoffLimitPerIndex": _TRIES,
                "maxFailedIndexes": run.workers // 2,
            }
        deadline = {"activeDeadlineSeconds": math.ceil(run.deadline_s)} if run.deadline_s else {}
        wrong = {"operator": "In", "values": [_WRONG_USAGE]}
        rules = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob" if is_client else "FailIndex", "onExitCodes": wrong},
        ]
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(what),
            "spec": {
                **often,
                **deadline,
                "ttlSecondsAfterFinished": math.ceil(run.ttl_s),
                "podFailurePolicy": {"rules": rules},
                "template": {"metadata": {"labels": self._labels(what)}, "spec": self._pod(what, command)},
            },
        }

    def _pod(self, what: str, command: list[str]) -> dict[str, Any]:
        run = self._run
        volumes: list[dict[str, Any]] = [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
        ]
        mounts: list[dict[str, Any]] = [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        if self._files and what == "client":
            volumes.append({"name": "files", "configMap": {"name": f"{self.name}-files"}})
            mounts.append({"name": "files", "mountPath": _FILES, "readOnly": True})
        environment, sources = self._environment()
        container = {
            "name": what,
            "image": run.image,
            "command": command[:1],
            "args": [word.replace("$", "$$") for word in command[1:]],  # else $(NAME) is a variable's value
            "env": environment,
            "envFrom": sources,
            "resources": {"requests": {"cpu": run.cpu, "memory": run.memory}, "limits": {"memory": run.memory}},
            "securityContext": RESTRICTED_CONTAINER,
            "volumeMounts": mounts,
        }
        return {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": restricted_pod(_USER),
            "containers": [container],
            "volumes": volumes,
        }

    def _environment(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return variables and the Secrets of others: those that are named, or the chart's."""
        known = {"HOME": "/tmp", "DATACACHE_HOME": "/tmp/datacache", "DATACACHE_SSD_BYTES": "4GB"}
        variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in known.items()]
        if self._run.secrets:
            return variables, [{"secretRef": {"name": name}} for name in self._run.secrets]
        password = {"secretKeyRef": {"name": "datacache-mongodb", "key": "password"}}
        variables.append({"name": "MONGODB_PASSWORD", "valueFrom": password})
        variables.append({"name": "DATACACHE_CATALOG", "value": _DATABASE})
        return variables, [{"secretRef": {"name": "datacache-stores", "optional": True}}]


def _processors(cpu: str) -> float:
    return int(cpu[:-1]) / 1000 if cpu.endswith("m") else int(cpu)
