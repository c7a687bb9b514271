"""Detection of runaway FedBAT step sizes in a device's metrics. Without torch, because servers import it."""

from __future__ import annotations

from collections.abc import Mapping

RUNAWAY = 10.0
"""Mean of ``alpha_growth`` over the steps above which step sizes ran away. Otherwise it is below 5."""


def runaway_warning(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if FedBAT's step sizes ran away on a device; else None.

    They did if the metric ``alpha_growth`` is above :data:`RUNAWAY`. A device without this metric gets no warning.

    Args:
        metrics: Metrics that the device reported, by name: means over its local steps.
    """
    growth = metrics.get("alpha_growth", 1.0)
    if not growth > RUNAWAY:
        return None
    return (
        f"step sizes of fedbat ran away: they moved by a factor of {growth:.3g} in the mean over the steps, where up to "
        f"{RUNAWAY:g} is sound; set codec.options.alpha_range, such as [5e-4, 5e-2], or a smaller algorithm.lr or rho"
    )
