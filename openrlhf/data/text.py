"""Characters that text from outside must not hold."""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")
# Also the separators of lines and paragraphs, which break a line as a control character does.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def broken_character(text: str) -> str | None:
    """Returns: the first half of a surrogate pair that stands alone, escaped; None where the text can be encoded.

    JSON and Python may spell out such a half, and no tokenizer and no file can take it.
    """
    found = _SURROGATE.search(text)
    return None if found is None else ascii(found[0])


def control_character(text: str) -> str | None:
    """Returns: the first character that would spoil a line, escaped; None where there is none."""
    found = _CONTROL.search(text)
    return None if found is None else ascii(found[0])
