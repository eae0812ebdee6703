"""Fonts for names in any script, as far as this machine has them.

Pillow brings one font, which draws English on every machine alike. What it cannot draw is looked for in the fonts that
are installed, and a name that no font can draw is written with escapes (`\\u6234`): not pretty, but no row of empty
boxes that could be any name. Used by `preview` and `plot`; any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

_FOLDERS = {
    "linux": ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts"),
    "darwin": ("/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts"),
    "win32": ("C:/Windows/Fonts",),
}
_PREFERRED = ("DejaVuSans.", "NotoSans-Regular", "NotoSansCJK-Regular", "NotoSans", "wqy-", "PingFang", "msyh", "Arial")
_BLANK = ("LastResort", "AdobeBlank")
"""Fonts that draw the same box, or nothing, for every character."""
_MOST = 400
"""Fonts that are tried for one name."""


class Typeface:
    """What draws a text: a font file, or Pillow's own font."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._sizes: dict[int, FreeTypeFont] = {}

    def at(self, size: int) -> FreeTypeFont:
        """The font in a size, in pixels."""
        from PIL import ImageFont

        if size not in self._sizes:
            if self.file is None:
                font = ImageFont.load_default(size)
                assert isinstance(font, ImageFont.FreeTypeFont)
            else:
                font = ImageFont.truetype(self.file, size)
            self._sizes[size] = font
        return self._sizes[size]

    def draws(self, text: str) -> bool:
        """Whether it has every character of a text."""
        font = self.at(16)
        missing = _shape(font, "\U0010fffd")  # a private character, which fonts answer with their empty box
        return all(character.isspace() or _shape(font, character) != missing for character in set(text))


def for_text(text: str) -> tuple[Typeface, str]:
    """What draws a text, and the text as it is to be drawn."""
    clean = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    found = _for_characters("".join(sorted(set(clean))))
    if found is not None:
        return found, clean
    return own(), "".join(c if own().draws(c) else c.encode("unicode_escape").decode() for c in clean)


@cache
def own() -> Typeface:
    """Pillow's font."""
    return Typeface()


@cache
def _for_characters(characters: str) -> Typeface | None:
    if own().draws(characters):
        return own()
    for file in _files()[:_MOST]:
        face = _open(file)
        if face is not None and face.draws(characters):
            return face
    return None


@cache
def _open(file: Path) -> Typeface | None:
    face = Typeface(file)
    try:
        face.at(16)
    except OSError:
        return None
    return face


@cache
def _files() -> list[Path]:
    """All font files, the preferred first; among the others the order is always the same."""

    def place(file: Path) -> tuple[int, str]:
        preferred = [n for n, name in enumerate(_PREFERRED) if file.name.startswith(name)]
        return preferred[0] if preferred else len(_PREFERRED), str(file)

    return sorted(_walk(), key=place)


def _walk() -> Iterator[Path]:
    folders = [Path(folder).expanduser() for folder in _FOLDERS.get(sys.platform, _FOLDERS["linux"])]
    plotting = find_spec("matplotlib")
    if plotting is not None and plotting.origin is not None:
        folders.append(Path(plotting.origin).parent / "mpl-data" / "fonts" / "ttf")
    for folder in folders:
        for kind in ("*.ttf", "*.ttc", "*.otf"):
            yield from (file for file in folder.rglob(kind) if not file.name.startswith(_BLANK))


def _shape(font: FreeTypeFont, character: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)
