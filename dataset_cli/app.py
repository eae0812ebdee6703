"""What every command is given: how to print, and the settings when it asks for them.

Made once by `main`; commands get it with `@pass_app`. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dataset_cli.output import Output

if TYPE_CHECKING:
    from datacache.api import Catalog
    from datacache.settings import Settings

_F = TypeVar("_F", bound=Callable[..., Any])


class App:
    """The state of one run of `dsctl`."""

    def __init__(self) -> None:
        self.out = Output()
        self.debug = False

    @cached_property
    def settings(self) -> Settings:
        """The settings, read when first asked for. Raises `SettingsError`."""
        from datacache.settings import load_settings

        return load_settings()

    @contextmanager
    def catalog(self) -> Iterator[Catalog]:
        """The catalog, closed at the end."""
        from datacache import api

        catalog = api.open_catalog(self.settings)
        try:
            yield catalog
        finally:
            catalog.close()


pass_app = click.make_pass_decorator(App)


def json_option(command: _F) -> _F:
    """`--json`: the result as JSON on stdout. It holds for the errors, too, so it is noted before all
    else.
    """

    def note(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value:
            context.find_object(App).out.json = True  # type: ignore[union-attr]

    return click.option(
        "--json",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=note,
        help="Print the result as JSON.",
    )(command)


class DatasetName(click.ParamType[str]):
    """A dataset's name, completed from the catalog."""

    name = "name"

    def convert(self, value: Any, _param: click.Parameter | None, _context: click.Context | None) -> str:
        """Checked here already, before anything is opened."""
        from datacache.api import check_name

        return check_name(str(value))

    def shell_complete(
        self, _context: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The names that begin so."""
        return _completions(incomplete, with_versions=False)


class SnapshotRef(click.ParamType[str]):
    """`NAME@id|tag|latest`, completed from the catalog: first the name, after the '@' its versions."""

    name = "ref"

    def convert(self, value: Any, _param: click.Parameter | None, _context: click.Context | None) -> str:
        """Checked here already, before anything is opened."""
        from datacache.api import parse_ref

        parse_ref(str(value))
        return str(value)

    def shell_complete(
        self, _context: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The references that begin so."""
        return _completions(incomplete, with_versions=True)


def _completions(incomplete: str, *, with_versions: bool) -> list[click.shell_completion.CompletionItem]:
    from click.shell_completion import CompletionItem

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
