"""Names another task in its update than in the chunks."""

from __future__ import annotations

from tests.conformance.wrong.update import changed


def plant() -> None:
    changed(lambda executor, update: {"nonce": "0" * 16})
