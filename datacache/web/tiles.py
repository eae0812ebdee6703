"""Pictures with their objects, as templates show them: small ones in a grid, whole ones. Any thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from markupsafe import Markup

from datacache import api
from datacache.web.addresses import address
from datacache.web.images import SMALL
from datacache.web.opened import Shown

TILE_CHARACTERS: Final = 1_000
IMAGE_CHARACTERS: Final = 40_000
"""Of SVG in a page; what is longer is loaded for itself, so that a page stays below 100 KB."""
SVG_FILE: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" preserveAspectRatio="none" fill="none"{}>{}</svg>'
)
"""Width, height, more attributes, elements."""
_STYLED: Final = ' stroke-width="{}" stroke-linecap="round"'


class Tile:
    """A picture with its objects, for a template."""

    def __init__(
        self,
        shown: Shown,
        row: api.Row,
        pairs: Iterable[tuple[str, str]],
        *,
        most: int = TILE_CHARACTERS,
        whole: bool = False,
    ) -> None:
        self.row, self.annotation = row, row.annotation
        self.href = address("image", shown.ref, pairs, path=row.path)
        self.src = address("whole" if whole else "thumb", shown.ref, path=row.path)
        self.overlay = address("objects", shown.ref, path=row.path, whole="1" if whole else "")
        self.width, self.height = fitting(row.annotation, whole=whole)
        self._drawn = self._whole = ""
        if row.annotation is not None and row.annotation.boxes:
            skeletons = shown.browser.table.skeletons
            self._drawn = api.svg_objects(
                row.annotation, shown.colours, self.width, self.height, skeletons=skeletons, digits=int(whole)
            )
        self.fits = len(self._drawn) <= most

    @property
    def svg(self) -> Markup:
        """Return the objects as elements of an SVG. They are numbers and colours alone."""
        return Markup(self._drawn)  # noqa: S704 - see svg_objects

    def alone(self) -> str:
        """Return the objects as a file, whose elements no style sheet reaches."""
        width = max(2, round(max(self.width, self.height) / 300))
        styled = self._drawn.replace('class="a"', 'fill-opacity=".3" fill-rule="evenodd"')
        styled = styled.replace('class="o d"', f'stroke-dasharray="{3 * width}"')
        styled = styled.replace('class="k d"', f'stroke-width="{3 * width}" stroke-opacity=".5"')
        styled = styled.replace('class="k"', f'stroke-width="{3 * width}"').replace(' class="o"', "")
        return SVG_FILE.format(self.width, self.height, _STYLED.format(width), styled)


def fitting(annotation: api.Annotation | None, *, whole: bool) -> tuple[int, int]:
    """Return the size of a picture on the page."""
    if annotation is None or not annotation.width:
        return SMALL
    if whole:
        return annotation.width, annotation.height
    scale = min(SMALL[0] / annotation.width, SMALL[1] / annotation.height, 4)
    return max(1, round(annotation.width * scale)), max(1, round(annotation.height * scale))
