"""Whether FedBAT's step sizes ran away, by what a device reports of its training. Without torch: servers ask."""

from __future__ import annotations

from collections.abc import Mapping

RUNAWAY = 10.0
"""A mean over the steps of ``alpha_growth`` that says that step sizes ran away; where they did not it is below 5."""


def warning(metrics: Mapping[str, float]) -> str | None:
    """What a person should know about the step sizes of the device that reported these ``metrics``; None: nothing."""
    growth = metrics.get("alpha_growth", 1.0)
    if not growth > RUNAWAY:
        return None
    return (
        f"step sizes of fedbat ran away: they moved by a factor of {growth:.3g} in the mean over the steps, where up to "
        f"{RUNAWAY:g} is sound; set codec.options.alpha_range, such as [5e-4, 5e-2], or a smaller algorithm.lr or rho"
    )
