"""Codecs of updates: pure functions traced into the algorithm's ``finish``, and the form of their output.

``edgefl.wire.update.form`` describes the bytes without torch, ``edgefl.wire.update.decode`` reads them, and the server adds
them without decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_names import lazily_from

if TYPE_CHECKING:
    from edgefl.codecs.catalog import (
        BFloat16,
        BiFL,
        BiFLFull,
        Dense,
        EFSignSGD,
        FedPAQ,
        Float16,
        Int8,
        NoisySignSGD,
        ScaledSign,
        SignSGD,
        StocSignSGD,
        TopK,
        ZeroFL,
    )

__all__ = [
    "BFloat16",
    "BiFL",
    "BiFLFull",
    "Dense",
    "EFSignSGD",
    "FedPAQ",
    "Float16",
    "Int8",
    "NoisySignSGD",
    "ScaledSign",
    "SignSGD",
    "StocSignSGD",
    "TopK",
    "ZeroFL",
]
__getattr__ = lazily_from(__name__, __all__, ("edgefl.codecs.catalog",))
