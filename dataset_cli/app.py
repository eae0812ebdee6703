"""The parts of commands: `command`, types and groups of options; and the `App` that each is given first.

One thread. `datacache.api` and `fuse_mount` may be imported at the top of a command's module: they import their parts
when they are first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from datacache import api
from datacache.core.errors import DatacacheError, UsageError
from datacache.settings import parse_bytes
from dataset_cli.output import NEXT_LINE, SHOWN, Output

if TYPE_CHECKING:
    from datacache.settings import Settings
    from dataset_cli.output import Progress

_F = TypeVar("_F", bound=Callable[..., Any])


class App:
    """The state of one run of `dsctl`."""

    def __init__(self) -> None:
        self.out = Output(bars=lambda: self.settings.progress)
        self.debug = False
        self.output_ref: Path | None = None
        """Where the reference of the snapshot that is made goes."""

    @cached_property
    def settings(self) -> Settings:
        """The settings, read when first asked for. Raises `SettingsError`."""
        from datacache.settings import load_settings

        return load_settings()

    @contextmanager
    def catalog(self) -> Iterator[api.Catalog]:
        """Open the catalog, and close it at the end."""
        with closing(api.open_catalog(self.settings)) as catalog:
            yield catalog

    def resolve(self, ref: str) -> api.SnapshotRecord:
        """Return the record of the snapshot that a reference names."""
        with self.catalog() as catalog:
            return api.resolve(catalog, ref)

    def write_ref(self, record: api.SnapshotRecord) -> None:
        """Write the whole reference of a snapshot that was made where `--output-ref` asks for it."""
        if self.output_ref is not None:
            _write_text(self.output_ref, f"{record.dataset}@{record.id}")

    @contextmanager
    def annotations(self, ref: str, **how: Any) -> Iterator[tuple[api.Snapshot, api.Table]]:
        """Open a snapshot and its annotations. `how` is what `reading_options` gave. They are read when they are first
        asked for, which shows a progress bar, and are in the catalog from then on."""
        with ExitStack() as opened:
            with ExitStack() as while_reading:
                bar: Progress | None = None

                def show(what: str, done: int, total: int) -> None:
                    nonlocal bar
                    if bar is None:  # not before: where nothing has to be read, a terminal shows and loads nothing
                        bar = while_reading.enter_context(self.out.progress(f"reading annotations of {ref}"))
                    bar.update(f"{what} {done:,} images", done, total)

                found = opened.enter_context(api.open_annotations(ref, settings=self.settings, progress=show, **how))
            yield found


pass_app = click.make_pass_decorator(App)


def _note_json(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.find_object(App).out.json = True  # type: ignore[union-attr]


def command(
    group: click.Command | None = None, name: str | None = None, *, has_json: bool = True, **how: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command, of a group or of its own: it is given the `App`, then its options.

    The last option is `--json`: the result as JSON on stdout. It holds for the errors, too, so it is noted first.
    """

    maker: Any = click if group is None else group
    text = "Print the result as JSON."

    def make(function: Callable[..., Any]) -> click.Command:
        made: click.Command = maker.command(name, **how)(pass_app(function))
        if has_json:
            flag: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
            made.params.append(click.Option(["--json"], callback=_note_json, help=text, **flag))
        return made

    return make


# --- types ----------------------------------------------------------------------------------------------------------

_ENGINES = ("local", "dask://", "ray://", "queue", "queue://")
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


class DatasetName(click.ParamType[str]):
    """A dataset's name, completed from the catalog."""

    name = "name"

    def convert(self, value: Any, _param: click.Parameter | None, _context: click.Context | None) -> str:
        """Check it, before anything is opened."""
        return api.check_name(str(value))

    def shell_complete(self, _context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so."""
        return _completions(incomplete, with_versions=False)


class SnapshotRef(click.ParamType[str]):
    """`NAME@id|tag|latest`, completed from the catalog: first the name, after the '@' its versions."""

    name = "ref"

    def convert(self, value: Any, _param: click.Parameter | None, _context: click.Context | None) -> str:
        """Check it, before anything is opened. For a lock file return what it locks."""
        lock = api.find_lock(str(value))
        ref = str(value) if lock is None else lock.ref
        api.parse_ref(ref)
        return ref

    def shell_complete(self, _context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the references that begin so."""
        return _completions(incomplete, with_versions=True)


class Size(click.ParamType[int]):
    """A number of bytes, as the settings take them: `20GB`, `512MiB`, `1000`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        """Return the bytes."""
        try:
            return parse_bytes(value)
        except ValueError as exc:
            raise click.UsageError(f"{param.opts[0] if param is not None else 'size'}: {exc}", context) from exc


class ImageSize(click.ParamType[tuple[int, int] | None]):
    """`WIDTHxHEIGHT` in pixels."""

    name = "WxH"

    def convert(
        self, value: Any, param: click.Parameter | None, _context: click.Context | None
    ) -> tuple[int, int] | None:
        """Return height and width."""
        try:
            return api.height_and_width(value.lower())
        except UsageError as exc:
            option = param.opts[0] if param is not None else "size"
            raise UsageError(
                f"{option}: {value!r} is no size", hint=f"Write width x height in pixels: {option} 640x480."
            ) from exc


class EngineName(click.ParamType[str]):
    """Name of an engine: see `datacache.executors.open`, which checks it."""

    name = "engine"

    def shell_complete(self, _context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the ways to name one that begin so."""
        return [CompletionItem(text) for text in _ENGINES if text.startswith(incomplete)]


def _completions(incomplete: str, *, with_versions: bool) -> list[CompletionItem]:
    name, at, _version = incomplete.partition("@")
    try:
        with App().catalog() as catalog:
            if not (at and with_versions):
                return [CompletionItem(d.name) for d in catalog.datasets() if d.name.startswith(incomplete)]
            dataset = catalog.dataset(name)
            if dataset is None:
                return []
            versions = ["latest", *dataset.tags, *(record.id[:12] for record in catalog.snapshots(name))]
    except Exception:  # noqa: BLE001 - a shell that completes shows no errors
        return []
    return [CompletionItem(ref) for v in versions if (ref := f"{name}@{v}").startswith(incomplete)]


# --- groups of options ----------------------------------------------------------------------------------------------


def options(*those: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Join options into one decorator. The help shows them in this order."""
    return lambda function: reduce(lambda made, option: option(made), reversed(those), function)


voc_options = options(
    click.option(
        "--voc-origin", type=click.IntRange(0, 1), default=0, show_default=True, help="1: VOC pixels count from 1."
    ),
    click.option("--trust-sizes", is_flag=True, help="Take images' sizes from the annotations: no image is opened."),
)
reading_options = options(
    click.option("--format", metavar="FORMAT", help="What the annotations are in, where that cannot be told."),
    voc_options,
    click.option("--decode", is_flag=True, help="Decode every image: finds JPEGs that were cut in their middle."),
)
"""See `api.ReadingOptions`."""
on_option = click.option(
    "--on",
    type=EngineName(),
    metavar="ENGINE",
    help="Have it done by dask://HOST:PORT, ray://HOST:PORT, queue or queue://JOB.",
)
workers_options = options(
    click.option(
        "--processes", type=click.IntRange(1), help="So many processes of this machine (default: one a processor)."
    ),
    on_option,
)
"""How much works, and where; see `docs/SCALE.md`."""
query_options = options(
    click.option(
        "--label", "labels", multiple=True, metavar="LABEL", help="Images with this label; several: with all."
    ),
    click.option("--any-label", is_flag=True, help="With one of the labels."),
    click.option(
        "--min-objects", type=click.IntRange(0), metavar="N", help="At least N boxes, of each --label if given."
    ),
    click.option("--max-objects", type=click.IntRange(0), metavar="N", help="At most N boxes, counted so."),
    click.option(
        "--where",
        default="",
        metavar="CONDITION",
        help='Such as: width >= 640 and count("no_mask") > 1; see dsctl query.',
    ),
)
"""See `api.QueryOptions`."""


def _write_text(path: Path, text: str) -> None:
    """Write what `--output-ref` asks for. In place: it may be a pipe."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"--output-ref: {path} cannot be written: {exc.strerror}") from exc


def _note_output_ref(context: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
    if value is not None and not context.resilient_parsing:
        _write_text(value, "")  # tried before any work; what an earlier run has left is no result of this one
        context.find_object(App).output_ref = value  # type: ignore[union-attr]


def naming_options(only_with: str = "") -> Callable[[_F], _F]:
    """Return the options that name a new snapshot (`api.NamingOptions`), and `--output-ref`, which the `App` notes.
    `only_with` is the option they need."""

    def text(words: str) -> str:
        return f"With {only_with}: {words[0].lower()}{words[1:]}" if only_with else words

    return options(
        click.option("--tag", "tags", multiple=True, help=text("Tag it; may be given several times.")),
        click.option("--move-tags", is_flag=True, help=text("Move tags that name another snapshot.")),
        click.option("--replace", is_flag=True, help=text("Make it the next version, even of something else.")),
        click.option("--message", "-m", default="", help=text("A line on why it was made.")),
        click.option(
            "--output-ref",
            type=FILE,
            expose_value=False,
            callback=_note_output_ref,
            help=text("Write its reference, NAME@ID, into this file, for the next step of a pipeline."),
        ),
    )


def expect_no_naming(app: App, naming: Mapping[str, Any]) -> None:
    """Raise `UsageError` where options name a snapshot, and none is asked for."""
    if any(naming.values()) or app.output_ref is not None:
        raise UsageError(
            "--tag, --move-tags, --replace, --message and --output-ref are for a new snapshot",
            hint="Name it with --as.",
        )


def listing_options(what: str) -> Callable[[_F], _F]:
    """Return `--limit` and `--all` for a listing of `what`; see `most_listed`."""
    return options(
        click.option(
            "--limit", type=click.IntRange(min=0), help=f"List so many {what} (default: {SHOWN}; all with --json)."
        ),
        click.option("--all", "everything", is_flag=True, help=f"List all {what}."),
    )


def most_listed(app: App, limit: int | None, everything: bool) -> int | None:
    """Return how many lines `--limit` and `--all` ask for; None for all of them."""
    if everything and limit is not None:
        raise click.UsageError("--all and --limit exclude each other")
    return limit if limit is not None else None if everything or app.out.json else SHOWN


def plot_format(file: Path | None) -> str:
    """Return the format that the name of `--plot` says; '' where there is none. `UsageError` for another one."""
    format = "" if file is None else file.suffix.lower().removeprefix(".")
    if file is not None and format not in api.PLOT_FORMATS:
        raise UsageError(f"--plot: {file} is not named as a picture", hint="Name it .png, .svg or .pdf.")
    return format


def confirm(yes: bool, what: str, question: str = "", *, about: str = "") -> None:
    """Ask a question (by default `what`), unless `--yes` was said: `click.Abort` for no.

    `UsageError` where nobody can answer. `about` is what else one should know before one answers."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"this must be confirmed: {what}", hint="Add --yes.")
    click.confirm(f"{question or what}{about}", abort=True, err=True)


def raise_all(errors: Sequence[DatacacheError], kind: type[DatacacheError]) -> None:
    """Raise the one error, or of several one of `kind` that says them all; nothing where there are none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise kind(NEXT_LINE.join(exc.message for exc in errors), hint=errors[0].hint)
