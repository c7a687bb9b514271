"""Texts of earlier rounds, so that a line of a later round need not repeat them."""

from __future__ import annotations


class Repeats:
    """The last text of each kind and device, with the round in which it was shown first."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[str, int]] = {}

    def shorten(self, kind: str, device: str, number: int, text: str) -> str:
        """Return ``text``, or the number of the round in which it was shown in full.

        Args:
            kind: name of the event.
            device: device of the event, empty for a whole round.
            number: round of the event; 0 if it belongs to none.
            text: what happened. Its own round number does not count as a difference.
        """
        if not number or not text:
            return text
        plain = text.replace(f"round {number} ", "", 1)
        last, first = self._last.get((kind, device), ("", number))
        if last != plain:
            self._last[kind, device] = plain, number
            return text
        return text if first == number else f"as in round {first}"
