"""Optimizers of the server: steps on the mean change of a round, for any algorithm that has no server step of its own.

``edgefl.optimizers.FedAdam(lr=0.03)`` names one with its options (Reddi et al. 2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_names import lazily_from

if TYPE_CHECKING:
    from edgefl.optimizers.catalog import (
        OPTIMIZERS,
        FedAdagrad,
        FedAdam,
        FedAMS,
        FedYogi,
        ServerMomentum,
        build,
        with_optimizer,
    )

__all__ = [
    "OPTIMIZERS",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
    "ServerMomentum",
    "build",
    "with_optimizer",
]
__getattr__ = lazily_from(__name__, __all__, ("edgefl.optimizers.catalog",))
