"""The edge: help, exit codes, errors, pipes, interrupts, completion."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from datacache.core import errors
from datacache.core.counters import format_seconds
from datacache.settings import format_bytes
from dataset_cli.commands.completion import _BASH
from dataset_cli.main import COMMANDS, EXIT_CODES, cli
from dataset_cli.output import printable
from tests.cli.conftest import ROOT, Dsctl
from tests.promises import promise

pytestmark = [promise("Exit codes: 0 done, 1 the thing asked for failed, 2 wrong usage")]

HEAVY = (
    "pymongo",
    "sqlite3",
    "rich",
    "aiohttp",
    "obstore",
    "PIL",
    "boto3",
    "numpy",
    "lmdb",
    "asyncio",
    "datacache.api.opening",
    "fuse_mount.lifecycle",
)


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from dataset_cli.main import run
assert run(["--help"]) == 0
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.strip() == "[]"
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_that_fits_on_its_line(name: str, dsctl: Dsctl) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert not command.get_short_help_str(70).endswith("...")
    assert dsctl(name, "--help").code == 0


def test_the_version_is_printed(dsctl: Dsctl) -> None:
    from datacache import __version__

    assert dsctl("--version").out == f"dsctl {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonsense"], 2),
        (["snapshot", "create", "x"], 2),
        (["snapshot", "create", "bad name", "--from", "/"], 2),
        (["snapshot", "show", "mask@@"], 2),
        (["snapshot", "show", "mask"], 1),
        (["snapshot", "create", "x", "--from", "nonsense://u:p@h/"], 2),
        (["mount", "mask", "/", "--umask", "9"], 2),
        ([], 2),
    ],
)
def test_exit_codes_tell_wrong_usage_from_failure(dsctl: Dsctl, arguments: list[str], code: int) -> None:
    result = dsctl(*arguments)
    assert result.code == code
    assert "Traceback" not in result.err
    if arguments:
        assert result.err.startswith("error: ")


def test_every_error_of_ours_has_an_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(any(issubclass(kind, known) for known, _code in EXIT_CODES) for kind in kinds)


@promise("A mistyped command, data set, tag or short id is answered with what may be meant")
@pytest.mark.parametrize(
    ("typed", "meant"),
    [("unmount", "dsctl umount"), ("list", "dsctl snapshot list"), ("version", "dsctl --version"), ("statsu", "stats")],
)
def test_a_command_of_another_name_is_told_what_it_is_here(dsctl: Dsctl, typed: str, meant: str) -> None:
    done = dsctl(typed, "x")
    assert done.code == 2
    assert f"there is no command '{typed}'; did you mean: " in done.err
    assert meant in done.err


def test_a_wrong_setting_is_wrong_usage(dsctl: Dsctl) -> None:
    result = dsctl("snapshot", "list", DATACACHE_SSD_BYTES="lots")
    assert result.code == 2
    assert result.err.startswith("error: DATACACHE_SSD_BYTES: 'lots'")


def test_an_error_has_a_hint_and_with_json_it_is_an_object_on_stderr(dsctl: Dsctl) -> None:
    text = dsctl("snapshot", "show", "mask@v1")
    assert text.out == ""
    assert text.err.splitlines()[0] == "error: there is no dataset 'mask'"
    assert text.err.splitlines()[1].startswith("hint: ")
    result = dsctl("snapshot", "show", "mask@v1", "--json")
    assert result.code == 1
    assert result.out == ""
    assert result.error["type"] == "SnapshotNotFoundError"
    assert set(result.error) == {"type", "message", "hint"}
    assert dsctl("snapshot", "show", "--json").error["type"] == "UsageError"


def test_a_traceback_is_shown_only_when_asked_for(dsctl: Dsctl) -> None:
    assert "Traceback" in dsctl("--debug", "snapshot", "show", "mask@v1").err
    assert "Traceback" in dsctl("snapshot", "show", "mask@v1", DATACACHE_DEBUG="1").err
    broken = dsctl("snapshot", "list", DATACACHE_CATALOG="sqlite:////proc/nowhere/c.db")
    assert broken.code == 1
    assert "Traceback" not in broken.err


def test_a_closed_pipe_is_quiet(dsctl: Dsctl, bucket: Path) -> None:
    for number in range(3000):
        (bucket / f"{number:05}").touch()
    assert dsctl("snapshot", "create", "mask", "--from", bucket).code == 0
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m dataset_cli snapshot show mask --files | head -1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.stdout.startswith("snapshot:")
    assert done.stderr == ""


def test_ctrl_c_ends_with_130_and_a_short_message(home: Path) -> None:
    code = """
import os, signal, sys
import dataset_cli.commands.status as command
command.status.callback = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT) or signal.pause()
from dataset_cli.main import run
sys.exit(run(["status"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.strip() == "interrupted"


def test_a_defect_is_one_line_that_asks_for_a_report(home: Path) -> None:
    code = """
import sys
import dataset_cli.commands.status as command
command.status.callback = lambda *a, **k: 1 / 0
from dataset_cli.main import run
sys.exit(run(["status"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: unexpected ZeroDivisionError")
    assert "report" in done.stderr
    assert "Traceback" not in done.stderr


def test_shells_complete_commands_names_and_refs(dsctl: Dsctl, bucket: Path) -> None:
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1").code == 0

    def complete(line: str) -> list[str]:
        script = f"""
dsctl() {{ {sys.executable} -m dataset_cli "$@"; }}
compopt() {{ :; }}
{_BASH}
COMP_LINE='{line}' COMP_POINT={len(line)}
_dsctl_completion
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
        return done.stdout.split()

    assert complete("dsctl sn") == ["snapshot"]
    assert complete("dsctl snapshot list ") == ["mask"]
    assert complete("dsctl snapshot show ma") == ["mask"]
    assert complete("dsctl snapshot show mask@")[:2] == ["latest", "v1"]  # bash keeps what is before the '@'
    assert complete("dsctl mount mask@v") == ["v1"]
    assert complete("dsctl snapshot show nothing@") == []
    assert complete("dsctl stats mask --on ") == ["local", "dask://", "ray://", "queue", "queue://"]
    assert complete("dsctl shard mask --on d") == ["dask://"]
    assert complete("dsctl snapshot create mask --on q") == ["queue", "queue://"]


def test_help_says_what_processes_are_counted_and_who_works_for_engines(dsctl: Dsctl) -> None:
    assert "So many processes of this machine" in " ".join(dsctl("shard", "--help").out.split())
    assert "workers for commands with --on queue" in " ".join(dsctl("tasks", "--help").out.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(dsctl: Dsctl, shell: str) -> None:
    result = dsctl("completion", shell)
    assert result.code == 0
    assert "_DSCTL_COMPLETE" in result.out


def test_sizes_times_and_odd_characters_are_shown_for_people() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 1_234_567, 999_999, 5_700_000_000, 10**18)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "1.2 MB",
        "1.0 MB",
        "5.7 GB",
        "1,000.0 PB",
    ]
    assert [format_seconds(n) for n in (0.25, 12.4, 75, 3600, 90061)] == [
        "0.2 s",
        "12 s",
        "1 min 15 s",
        "1 h",
        "1 d 1 h",
    ]
    assert printable("a\x1b[31m\nb\udce9") == "a\\x1b[31m\\nb\udce9"
    assert printable("a\udc9b31m") == "a\\udc9b31m"  # an escape, to a terminal of eight bits
    assert os.fsencode(printable("caf\udce9")) == b"caf\xe9"


def test_without_arguments_it_prints_its_help_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    from dataset_cli.main import run

    for arguments in ([], ["snapshot"]):
        assert run(arguments) == 2
        shown = capfd.readouterr().err
        assert "\nCommands:\n" in shown
        assert "error:" not in shown
