"""The other side's own words, so that they fit any log and any terminal."""

from __future__ import annotations

MOST_TEXT = 1000
"""Letters of what the other side says that are told."""


def cleaned(text: str) -> str:
    """Return ``text`` with a blank for each character that steers a terminal. Line ends stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def printable(text: str, most: int = MOST_TEXT) -> str:
    """At most ``most`` letters of ``text``; what belongs in no line (escapes, line ends, marks of direction) is a blank."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:most])
