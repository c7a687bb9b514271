"""What a server makes of the mean of a round: optimizers on the change, for any algorithm that has none of its own.

``with_optimizer(algorithm, "fedadam", lr=0.03)`` gives the same local training with Adam at the server (Reddi et al. 2021).
"""

from __future__ import annotations

from edgefl.optimizers.catalog import OPTIMIZERS, build, with_optimizer

__all__ = ["OPTIMIZERS", "build", "with_optimizer"]
