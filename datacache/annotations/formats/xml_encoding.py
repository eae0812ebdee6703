"""The text of an XML file, whatever it is encoded in.

Annotation tools on Windows write the code page of the machine and declare another, or none. What a file declares is
believed as long as its bytes agree. Else UTF-8 is tried, then the code pages of the scripts that people annotate in:
GB18030 (which holds GBK and GB2312), Windows-1251 (Cyrillic) and Windows-1252 (Western Europe). One of these counts
only where the text it gives looks like words of its script, and the report names it. What looks like none is refused,
because a wrong guess is a wrong label.

Used by `voc`. Pure, any thread. Source: XML 1.0, section 4.3.3 and appendix F.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Final

from datacache.annotations.model import Problem, quote
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
"""Python's names of the encodings that files are in. Others of its codecs are compressors, escapes and puzzles."""


def decode(data: bytes, file: str) -> tuple[str, Problem | None]:
    """Decode the text, without a byte order mark, and what had to be mended. `AnnotationError` where no encoding
    fits."""
    for bom, name in _BOMS:
        if data.startswith(bom):
            text = _decoded(data, name)
            if text is None:
                raise unknown_encoding(file, f"it begins as {name.upper()} does and goes on otherwise")
            return text, None
    match = _DECLARED.match(data)
    declared = match[1].decode("ascii", "replace") if match else ""
    text = _decoded(data, _codec(declared or "utf-8"))
    if text is not None:
        return text, None
    said = f"it declares {quote(declared)}" if declared else "it declares no encoding"
    guesses = [("UTF-8", _decoded(data, "utf-8"))]
    if not _is_damaged_utf8(data):
        texts = ((name, _decoded(data, codec), looks) for name, codec, looks in _SCRIPTS)
        guesses += [(name, text) for name, text, looks in texts if text is not None and looks(text)]
    for name, text in guesses:
        if text is not None:
            message = f"{said}, and its bytes are not so; it is read as {name}"
            return text, Problem("encoding", "repaired", file, 0, message)
    names = ", ".join(name for name, *_ in _SCRIPTS)
    raise unknown_encoding(file, f"{said}, and its bytes are neither that nor UTF-8, nor words in {names}")


def _codec(declared: str) -> str:
    """Return Python's name for it, '' for one that is unknown, or that the first bytes have ruled out (UTF-16)."""
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
    """Tell whether this looks like UTF-8 with some bytes gone wrong, which can often be read as GB18030, as other
    words.

    Three bytes in a row that are a character of UTF-8 are rare in GB18030 (in two are not), and most of what is not
    ASCII in damaged Chinese or Japanese UTF-8.
    """
    text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd")
    return 3 * (sum(char > "\u07ff" for char in text) - bad) >= max(bad, 1)


# --- what a text looks like in the script of its code page -----------------------------------------------------------

_LATIN: Final = "A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\xff\u0152\u0153\u0160\u0161\u0178\u017d\u017e"
_HAN: Final = "\u3400-\u9fff"
_WESTERN: Final = re.compile(f"[ -~\\s\xa0-\xbf\u2010-\u203a\u20ac\u2122{_LATIN}]*")
_WESTERN_MIXED: Final = re.compile(
    f"[{_LATIN}][\xa1-\xbf]+[{_LATIN}]"  # a sign inside a word: a letter of another code page
    f"|[^\x00-\xbf]{{3}}"  # three in a row: Cyrillic or Greek
    f"|[a-z\xdf-\xff][\xc0-\xde]"  # a capital inside a word
)
_CYRILLIC: Final = re.compile(
    "[ -~\\s\xa0\xab\xb0\xb7\xbb\u2013\u2014\u2116\u201c-\u201e"
    "\u0401\u0404\u0406\u0407\u0410-\u044f\u0451\u0454\u0456\u0457]*"
)
_CYRILLIC_MIXED: Final = re.compile("[\u0430-\u044f][\u0410-\u042f]|[A-Za-z][\u0400-\u045f]|[\u0400-\u045f][A-Za-z]")
_CYRILLIC_WORD: Final = re.compile("[\u0400-\u045f]{3}")
_CHINESE_ODD: Final = re.compile(
    "[\x80-\x9f\u0250-\u0390\u0400-\u04ff\u2500-\u25ff\ue000-\uf8ff\ufffd\U000f0000-\U0010ffff]"
    f"|[A-Za-z][{_HAN}][A-Za-z]"
)
_CHINESE_WORD: Final = re.compile(f"[A-Za-z]?[{_HAN}]+[A-Za-z]?")


def _is_western(text: str) -> bool:
    return _WESTERN.fullmatch(text) is not None and _WESTERN_MIXED.search(text) is None


def _is_cyrillic(text: str) -> bool:
    return (
        _CYRILLIC.fullmatch(text) is not None
        and _CYRILLIC_MIXED.search(text) is None
        and _CYRILLIC_WORD.search(text) is not None
    )


def _is_chinese(text: str) -> bool:
    """Tell whether most of its Chinese characters are common ones, and none looks like two letters of another code
    page.

    The bytes of accented letters give rare characters, which GB2312 has in its second half or not at all, and they take
    the ASCII letters behind them along.
    """
    if _CHINESE_ODD.search(text):
        return False
    common = rare = 0
    for word in _CHINESE_WORD.findall(text):
        touches = word[0] < "\x80" or word[-1] < "\x80"
        for char in word:
            if char < "\x80":
                continue
            try:
                first = char.encode("gb2312")[0]
            except UnicodeEncodeError:
                first = 0xFF
            if first == 0xFF and touches:
                return False
            common += first <= 0xD7
            rare += first > 0xD7
    return common >= rare


_SCRIPTS: Final[tuple[tuple[str, str, Callable[[str], bool]], ...]] = (
    ("GB18030", "gb18030", _is_chinese),
    ("Windows-1251", "cp1251", _is_cyrillic),
    ("Windows-1252", "cp1252", _is_western),
)

_HINT: Final = "Convert the file to UTF-8, or say its encoding in the XML declaration."


def unknown_encoding(file: str, why: str) -> AnnotationError:
    """Return the error for a file that cannot be decoded."""
    return AnnotationError(f"the encoding is not known: {why}", code="encoding", file=file, hint=_HINT)
