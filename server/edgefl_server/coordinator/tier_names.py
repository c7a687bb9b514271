"""The names of tiers and of their candidates, which tasks and bundles go by."""

from __future__ import annotations

CANDIDATE = "@candidate"
"""What follows the tier's name: ``weak@candidate``. No tier of a federation file has an ``@``."""


def base_of(tier: str) -> str:
    """The tier that a task's tier is of: ``weak`` for ``weak@candidate``."""
    return tier.removesuffix(CANDIDATE)
