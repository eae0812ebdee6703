"""Tables for notebooks, as `_repr_html_` returns them. Every text is escaped, so a label is never markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(rows: Iterable[Sequence[object]], headers: Sequence[str] = (), *, caption: str = "") -> str:
    """Return a table. Without headers, the first cell of each row is one. Numbers are set to the right."""
    lines = ["<table>"]
    if caption:
        lines.append(f'<caption style="text-align:left">{_text(caption)}</caption>')
    if headers:
        lines.append("<tr>" + "".join(f"<th>{_text(header)}</th>" for header in headers) + "</tr>")
    for row in rows:
        cells = [_cell(value, "td" if headers or n else "th") for n, value in enumerate(row)]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _cell(value: object, tag: str) -> str:
    if isinstance(value, int):
        return f'<{tag} style="text-align:right">{value:,}</{tag}>'
    return f'<{tag} style="text-align:left">{_text(str(value))}</{tag}>'


def _text(text: str) -> str:
    """Return a text as HTML, with a question mark for bytes that are no text."""
    return escape(text.encode("utf-8", "replace").decode())
