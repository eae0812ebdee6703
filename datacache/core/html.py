"""Tables for notebooks, as `_repr_html_` returns them, and texts of others as the page of `dsctl ui` shows them, too.

Every text is escaped, so a label is never markup, and what is not seen in it becomes visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

_MOST_ROWS = 200
_JOINERS = "\u200c\u200d"
"""Not printable, and parts of words in some scripts."""
_LONG = 40
_WRAPPED = f";max-width:{_LONG}em;overflow-wrap:anywhere;white-space:normal"


def visible(text: str) -> str:
    """Return a text with escapes such as `\\x1b` for control characters, marks of direction and bytes that are no text:
    a name must not look like another one, nor end a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _JOINERS else repr(c)[1:-1] for c in text)


def html_text(text: str) -> str:
    """Return a text, made visible, as HTML."""
    return escape(visible(text))


def html_table(rows: Iterable[Sequence[object]], headers: Sequence[str] = (), *, caption: str = "") -> str:
    """Return a table of the first 200 rows. Without headers, the first cell of each row is one. Numbers are set to the
    right."""
    lines = ["<table>"]
    if caption:
        lines.append(f'<caption style="text-align:left">{html_text(caption)}</caption>')
    if headers:
        lines.append("<tr>" + "".join(f"<th>{html_text(header)}</th>" for header in headers) + "</tr>")
    rows = iter(rows)
    for row in islice(rows, _MOST_ROWS):
        cells = [_cell(value, "td" if headers or n else "th") for n, value in enumerate(row)]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    if left := sum(1 for _ in rows):
        lines.append(f"<tr><td>… and {left:,} more</td></tr>")
    return "\n".join([*lines, "</table>"])


def _cell(value: object, tag: str) -> str:
    if isinstance(value, int):
        return f'<{tag} style="text-align:right">{value:,}</{tag}>'
    text = str(value)
    return f'<{tag} style="text-align:left{_WRAPPED if len(text) > _LONG else ""}">{html_text(text)}</{tag}>'
