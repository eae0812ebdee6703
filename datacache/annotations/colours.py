"""A colour for each class: the same in every picture of a data set, and told apart by colour-blind people, too.

The first seven are those of Okabe and Ito (2008, "Color Universal Design") without black; more classes get the same
hues lighter and darker, which stay apart by their lightness. Used by `preview` and `plot`; pure, any thread.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

RGB = tuple[int, int, int]

BASE: tuple[RGB, ...] = (
    (230, 159, 0),  # orange
    (86, 180, 233),  # sky blue
    (0, 158, 115),  # bluish green
    (240, 228, 66),  # yellow
    (0, 114, 178),  # blue
    (213, 94, 0),  # vermilion
    (204, 121, 167),  # reddish purple
)
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_RINGS = ((_WHITE, 0.0), (_WHITE, 0.55), (_BLACK, 0.45), (_WHITE, 0.28), (_BLACK, 0.25))
"""Once all colours are taken, the next classes get them mixed with this much white or black; after that all again."""


def colours_of(labels: Collection[str]) -> dict[str, RGB]:
    """A colour for each label. It follows from the name where the colour is free, so that a class keeps it when others
    come and go; all are different up to 35 classes."""
    found: dict[str, RGB] = {}
    taken: list[set[int]] = []
    for label in sorted(labels):
        wanted = int.from_bytes(blake2b(label.encode("utf-8", "surrogatepass"), digest_size=4).digest()) % len(BASE)
        if not taken or len(taken[-1]) == len(BASE):
            taken.append(set())
        place = next(n % len(BASE) for n in range(wanted, wanted + len(BASE)) if n % len(BASE) not in taken[-1])
        taken[-1].add(place)
        other, part = _RINGS[(len(taken) - 1) % len(_RINGS)]
        found[label] = mix(BASE[place], other, part)
    return found


def mix(colour: RGB, other: RGB, part: float) -> RGB:
    """A colour with a part, from 0 to 1, of another."""
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def ink_on(colour: RGB) -> RGB:
    """Black or white: what can be read on a colour (relative luminance of WCAG 2)."""
    red, green, blue = ((c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
    return _BLACK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else _WHITE
