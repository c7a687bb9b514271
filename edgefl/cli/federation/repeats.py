"""Texts of earlier rounds, so that a line of a later round need not repeat them."""

from __future__ import annotations


class Repeats:
    """Texts that were shown, with the round of each."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str, str], int] = {}

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
        key = (kind, device, text.replace(f"round {number} ", "", 1))
        first = self._rounds.setdefault(key, number)
        return text if first == number else f"as in round {first}"
