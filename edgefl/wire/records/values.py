"""Values of records as text: numbers, texts and classes, alike on devices and for the server's data."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

_NAMED = 12
"""Classes that a message lists."""
_WHOLE = re.compile(r"\.0*$")
"""What programs for tables write behind a whole number."""
_DIGITS = 12
"""No class has a longer number: Python refuses to read one of thousands of digits."""
_LONG = 60
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """Return ``value`` as a message shows it: in one line, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


class BadRow(Exception):
    """Row that cannot be used. Its text says why."""


def finite(value: object, what: str, dtype: str) -> float:
    """Return the number that a file has as ``value``.

    Raises:
        BadRow: ``value`` is no number, NaN, infinite, or beyond the range of ``dtype``.
    """
    if value is None or value == "":
        raise BadRow(f"{what} is empty")
    try:
        number = float(value) if isinstance(value, str | int | float) and "_" not in str(value) else np.nan
    except (ValueError, OverflowError):
        number = np.nan
    if not np.isfinite(number):
        raise BadRow(f"{what} is {shown(value)}, which is no number")
    least, most = limits_of(dtype)
    if not least <= number <= most:
        raise BadRow(f"{what} is {shown(value)}, which is beyond what {dtype} holds")
    return number


def limits_of(dtype: str) -> tuple[float, float]:
    """Return the smallest and the largest number that ``dtype`` holds."""
    if dtype == "bool":
        return 0.0, 1.0
    limits = np.finfo(dtype) if np.issubdtype(dtype, np.floating) else np.iinfo(dtype)
    least, most = float(limits.min), float(limits.max)
    return least, most if most <= limits.max else math.nextafter(most, 0.0)  # 2**63 is no int64


def is_number(text: str) -> bool:
    """Return True if ``text`` is a finite number."""
    try:
        finite(text, "", "float64")
    except BadRow:
        return False
    return True


def is_text(text: str) -> bool:
    """Return True if ``text`` can be written in UTF-8: no bytes of another encoding, no half of a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


NO_TEXT = "it is no text in UTF-8"


def listed(names: Sequence[str]) -> str:
    """Return the first of ``names``, and how many there are if that is not all."""
    more = f", ... ({len(names)} in all)" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def whole(text: str) -> str:
    """Return ``text`` without the point and zeros that tables write behind a whole number."""
    return _WHOLE.sub("", text)


def class_number(value: object, names: Sequence[str], classes: int) -> int:
    """Return the number of the class ``value``: its place in ``names``, or the number itself if classes have no names.

    Raises:
        BadRow: The federation has no such class.
    """
    text = str(value).strip()
    if names:
        # macOS writes e and its accent apart.
        alike = [unicodedata.normalize("NFC", each) for each in names]
        written = unicodedata.normalize("NFC", text)
        for each in (written, whole(written)):
            if each in alike:
                return alike.index(each)
        raise BadRow(f"no class is called {shown(text)}; the federation's are {listed(names)}")
    digits = whole(text)
    if digits.isdecimal() and len(digits) <= _DIGITS and int(digits) < classes:
        return int(digits)
    raise BadRow(
        f"class {shown(text)} is no number from 0 to {classes - 1}, which is what the federation's classes are called by"
    )
