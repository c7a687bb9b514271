"""Range of seeds."""

from __future__ import annotations

from edgefl.wire.errors import ConfigError

SEED_MAX = 2**63 - 1
"""Largest seed: the largest integer of a TOML file, and torch's generators, which take one bit more, also get the numbers
that follow a seed."""


def checked_seed(seed: int) -> int:
    """Return ``seed``. Raises ConfigError if it is not between 0 and :data:`SEED_MAX`."""
    if not 0 <= seed <= SEED_MAX:
        raise ConfigError(
            f"seed: expected a number from 0 to {SEED_MAX} (2**63 - 1), found {seed}; choose another",
            seed=seed,
        )
    return seed
