"""The entry point `dsctl`: the table of commands, the table of exit codes, and what every failure looks like.

Exit codes: 0 done, 1 the thing asked for failed, 2 wrong usage, 130 interrupted, 141 nobody reads the output
any more. No failure shows a traceback unless `--debug` (or `DATACACHE_DEBUG=1`) asks for it. `output` says
what goes to stdout and stderr.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

import click

from datacache.core.errors import DatacacheError, SettingsError, UsageError
from dataset_cli.app import App
from dataset_cli.variables import misspelt

EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (UsageError, 2),
    (SettingsError, 2),
    (click.UsageError, 2),
    (click.ClickException, 1),
    (DatacacheError, 1),
)
"""The first that fits counts. What is not listed is a defect of ours, and 1."""
INTERRUPTED = 130
_COLLECT_EVERY = 50_000
"""Objects that were made and are there still: a collection of garbage begins."""
PIPE_CLOSED = 141

_JOINED = {
    "umount": "mount",
    "warm": "cache",
    "jobs": "cache",
    "lock": "travel",
    **dict.fromkeys(("ls", "cat", "cp", "log"), "files"),
}
"""Commands in the file of another one."""
COMMANDS = {
    name: f"dataset_cli.commands.{_JOINED.get(name, name)}"
    for name in (
        *("snapshot", "dataset", "ls", "cat", "cp", "log", "lock"),
        *("convert", "merge", "dedupe", "sample", "shard", "query", "stats", "preview"),
        *("predict", "evaluate", "ui", "marks"),
        *("mount", "umount", "flush", "export", "warm", "jobs", "tasks", "bench", "cache", "cluster", "daemon", "k8s"),
        *("status", "doctor", "demo", "completion"),
    )
}
"""Their modules, in the order `--help` shows them."""
ELSEWHERE = {
    "list": "dsctl snapshot list",
    "push": "dsctl snapshot push REF URL",
    "pull": "dsctl snapshot pull REF URL",
    "create": "dsctl snapshot create NAME --from URL",
    "diff": "dsctl snapshot diff REF REF",
    "gc": "dsctl snapshot gc",
    "pin": "dsctl cache pin REF",
    "rm": "dsctl snapshot rm REF",
    "show": "dsctl snapshot show REF",
    "tag": "dsctl snapshot tag REF TAG",
    "unmount": "dsctl umount DIR",
    "verify": "dsctl snapshot verify REF",
    "version": "dsctl --version",
    "help": "dsctl --help",
}
"""Commands that people type who know other tools → ours."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are needed."""

    def list_commands(self, _context: click.Context) -> list[str]:
        """All names, in our order."""
        return list(COMMANDS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        """The command, or None."""
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[name]), name)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a `click.UsageError` for another name says which one may be meant."""
        name = args[0]
        if name in ELSEWHERE:
            context.fail(f"there is no command {name!r}; did you mean: {ELSEWHERE[name]}")
        near = get_close_matches(name, COMMANDS, n=1)
        if near and name not in COMMANDS:
            context.fail(f"there is no command {name!r}; did you mean: dsctl {near[0]}")
        return super().resolve_command(context, args)


def _version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        from datacache import __version__

        click.echo(f"dsctl {__version__}")
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.option("--debug", is_flag=True, help="Show what is done, and tracebacks.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Datasets from object storage at local-disk speed: versioned snapshots, a cache of this node, and
    mounts.

    \b
    dsctl demo                                   try everything on a small drawn dataset
    dsctl snapshot create mask --from s3://faces/mask --tag v1
    dsctl mount mask@v1 /mnt/mask                a plain directory
    """
    app: App = context.obj
    app.debug = app.debug or debug
    app.out.log_to_stderr(logging.INFO if app.debug else logging.WARNING)
    if context.invoked_subcommand != "doctor":  # which says it among its checks
        for name, meant in misspelt(os.environ).items():
            app.out.warning(f"{name} is set, and is no setting; did you mean {meant}?")


def main() -> NoReturn:
    """Run `dsctl` with the arguments of this process, and exit."""
    # A command makes many objects and few cycles: it looks for these seldom, and never among what was imported.
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY)
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it: `run` has told
            stream.flush()
    # What a command opened it has closed. Not sys.exit(): pymongo would wait until its sleeping threads wake up, which
    # makes each command with a MongoDB catalog half a second longer.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run `dsctl` with these arguments; the exit code."""
    app = App()
    app.debug = os.environ.get("DATACACHE_DEBUG", "") not in ("", "0")
    for stream in (sys.stdout, sys.stderr):
        # A path of a store may be no valid text: it is printed as the bytes it is.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="surrogateescape")
    try:
        code = cli.main(list(arguments), prog_name="dsctl", obj=app, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as exc:
        print(exc.format_message(), file=sys.stderr)  # the help text: what was typed is only the beginning
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - the edge: every error becomes a message and an exit code
        return _fail(app, exc)


def _fail(app: App, exc: Exception) -> int:
    if isinstance(exc, BrokenPipeError) and not isinstance(exc, DatacacheError):
        # Whatever is still buffered goes nowhere, also at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    if app.debug:
        traceback.print_exception(exc)
    code = next((code for kind, code in EXIT_CODES if isinstance(exc, kind)), None)
    if code is None:
        message = f"unexpected {type(exc).__name__}: {exc}"
        app.out.error(type(exc).__name__, message, "This is a defect; --debug shows where. Please report it.")
        return 1
    if isinstance(exc, DatacacheError):
        app.out.error(type(exc).__name__, exc.message, exc.hint)
    elif isinstance(exc, click.ClickException):
        context = getattr(exc, "ctx", None)
        hint = f"See: {context.command_path} --help" if context is not None else ""
        app.out.error("UsageError" if code == 2 else "Error", exc.format_message(), hint)
    return code


if __name__ == "__main__":
    main()
