"""Bars of what takes long: on a terminal, one at a time, and nowhere else."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest

import datacache
from datacache.core.progress import bar
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces
from dataset_cli.output import Output


class Terminal(io.StringIO):
    """A standard error that somebody looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """The terminal of `redirect_stderr`: pytest puts its own file in the place of stderr after the fixtures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("datacache.api.progress._AFTER_S", 0.0)
    return Terminal()


@pytest.fixture
def ref(settings: Settings, tmp_path: Path) -> str:
    draw_faces(tmp_path / "bucket", count=4)
    return datacache.create_snapshot("faces", str(tmp_path / "bucket"), settings=settings).ref


def test_a_long_call_draws_a_bar_on_a_terminal(ref: str, settings: Settings, terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        datacache.stats(ref, settings=settings)
        assert "reading annotations of 4 images" in terminal.getvalue()
        terminal.truncate(0)
        datacache.convert(ref, to="coco", name="coco", settings=settings)
        assert "writing 4 images" in terminal.getvalue()


def test_none_is_drawn_in_a_pipe_or_against_the_setting_or_where_the_caller_shows_it(
    ref: str, settings: Settings, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redirect_stderr(terminal):
        datacache.stats(ref, settings=replace(settings, progress=False))
        told: list[tuple[str, int, int]] = []
        datacache.convert(ref, to="coco", name="coco", settings=settings, progress=lambda *far: told.append(far))
        assert told[-1] == ("writing", 4, 4)
        monkeypatch.setattr(terminal, "isatty", lambda: False)
        datacache.convert(ref, to="yolo", name="yolo", settings=settings)
        assert terminal.getvalue() == ""


def test_what_begins_inside_of_a_bar_draws_none(ref: str, settings: Settings, terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        with Output().progress("the outer one") as outer:
            datacache.convert(ref, to="coco", name="coco", settings=settings)
            outer.update("still the outer one", 4, 4)
        shown = terminal.getvalue()
        assert "still the outer one" in shown
        assert "images" not in shown
        with bar("the next one"):
            pass
        assert "the next one" in terminal.getvalue(), "the first one has let go"


def test_what_is_soon_done_shows_nothing(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        with bar("", after_s=3600) as drawn:
            assert drawn is not None
            drawn.update("done", 1, 1)
        assert terminal.getvalue() == ""


def test_control_characters_are_not_obeyed(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        with bar("\x1b[2Jcleared") as drawn:
            assert drawn is not None
            drawn.update("\x1b[5mblinking", 1, 1)
        assert "\\x1b[2Jcleared" in terminal.getvalue()
        assert "\x1b[5m" not in terminal.getvalue()


def test_dsctl_obeys_the_setting(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        with Output(bars=lambda: False).progress("copying"):
            pass
        assert terminal.getvalue() == ""
