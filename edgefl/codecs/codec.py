"""A codec: how each part of an update is coded, and which local training belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgefl.codecs.coder import Coder
from edgefl.wire.update.form import VERSION, Sparse, Values

STATISTICS_BITS = 6
"""Of a moving statistic. They are 1 % of a ResNet's entries, and as float32 would be a fifth of a one-bit update."""


@dataclass(frozen=True)
class Training:
    """The algorithm that a codec cannot do without, and the options that it gives it."""

    algorithm: str
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Codec:
    """What happens to the trained tensors: a ``Coder`` per tensor, other floats, the largest entries, or (None) nothing.

    ``change``: what is coded is the change of the round, else the weights. ``feedback``: what coding lost is kept on the
    device (``carry.residual.*``) and added to the next change. ``statistics``: bits per entry of tensors that are no
    parameters, the moving statistics of batch norm; 32 sends them as float32 (fedbat.md 8.4). ``binarize_1d``: whether
    biases and norms are coded as the kernels are, or sent as float32 (fedbat.md 2.7); ``kernels_only`` sends whatever
    is no kernel so. ``training``: see :class:`Training`; where its algorithm codes the update itself, ``trained`` is
    None.
    """

    name: str
    trained: Coder | Values | Sparse | None = None
    change: bool = True
    feedback: bool = False
    statistics: int = STATISTICS_BITS
    binarize_1d: bool = True
    kernels_only: bool = False
    training: Training | None = None
    version: int = VERSION
