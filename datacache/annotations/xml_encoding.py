"""The text of an XML file, whatever it is encoded in.

Annotation tools on Windows write the code page of the machine and declare another, or none. What a file declares is
believed as long as its bytes agree; else UTF-8 is tried, then GB18030 (which holds GBK and GB2312), and what fits
neither is refused rather than guessed, because a wrong guess is a wrong label.

Used by `voc`. Pure, any thread. Source: XML 1.0, section 4.3.3 and appendix F.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from datacache.annotations.model import Problem
from datacache.annotations.problems import quote
from datacache.core.errors import AnnotationError

_BOMS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (b"<\0", "utf-16-le"),
    (b"\0<", "utf-16-be"),
)
_DECLARED: Final = re.compile(rb"""\A<\?xml[^>]{0,200}?\sencoding\s*=\s*["']([\w.:-]{1,40})["']""")
_CHINESE: Final = frozenset({"gb2312", "gbk", "gb18030"})
_KNOWN: Final = re.compile(
    r"utf-8|ascii|iso8859-\d+|cp\d+|koi8-[rtu]|mac-\w+|big5\w*|euc_\w+|shift_jis\w*|iso2022_\w+|johab|tis-620|ptcp154"
    r"|kz1048|hp-roman8"
)
"""What Python calls the encodings that files are in. Others of its codecs are compressors, escapes and puzzles."""


def decode(data: bytes, file: str) -> tuple[str, Problem | None]:
    """The text, without a byte order mark, and what had to be mended. `AnnotationError` where no encoding fits."""
    for bom, name in _BOMS:
        if data.startswith(bom):
            text = _decoded(data, name)
            if text is None:
                raise _refused(file, f"it begins as {name.upper()} does and goes on otherwise")
            return text, None
    match = _DECLARED.match(data)
    declared = match[1].decode("ascii", "replace") if match else ""
    text = _decoded(data, _codec(declared or "utf-8"))
    if text is not None:
        return text, None
    said = f"it declares {quote(declared)}" if declared else "it declares no encoding"
    for name in ("utf-8", "gb18030"):
        text = None if name == "gb18030" and _is_damaged_utf8(data) else _decoded(data, name)
        if text is not None:
            message = f"{said}, and its bytes are not so; it is read as {name.upper()}"
            return text, Problem("encoding", "repaired", file, 0, message)
    raise _refused(file, f"{said}, and its bytes are neither that nor UTF-8 nor GB18030")


def _codec(declared: str) -> str:
    """Python's name for it, '' for one that is unknown, or that the first bytes have ruled out (UTF-16)."""
    try:
        name = codecs.lookup(declared).name
    except LookupError:
        return ""
    if name in _CHINESE:
        return "gb18030"
    return name if _KNOWN.fullmatch(name) else ""


def _decoded(data: bytes, codec: str) -> str | None:
    try:
        return data.decode(codec) if codec else None
    except UnicodeError:
        return None


def _is_damaged_utf8(data: bytes) -> bool:
    """Whether this looks like UTF-8 with some bytes gone wrong, which can often be read as GB18030, as other words.

    Three bytes in a row that are a character of UTF-8 are rare in GB18030 (in two are not), and most of what is not
    ASCII in damaged Chinese or Japanese UTF-8.
    """
    text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd")
    return 3 * (sum(char > "\u07ff" for char in text) - bad) >= max(bad, 1)


_HINT: Final = "Convert the file to UTF-8, or say its encoding in the XML declaration."


def _refused(file: str, why: str) -> AnnotationError:
    return AnnotationError(f"the encoding is not known: {why}", code="encoding", file=file, hint=_HINT)
