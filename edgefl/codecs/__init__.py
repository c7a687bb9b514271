"""Codecs of updates: pure functions traced into the algorithm's ``finish``, and the form of their output.

``edgefl.wire.update.form`` describes the bytes without torch, ``edgefl.wire.update.decode`` reads them, and the server adds
them without decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_modules import lazily

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

_PLACES: dict[str, tuple[str, ...]] = {
    "edgefl.codecs.catalog": (
        "Dense",
        "Float16",
        "BFloat16",
        "Int8",
        "FedPAQ",
        "SignSGD",
        "ScaledSign",
        "EFSignSGD",
        "NoisySignSGD",
        "StocSignSGD",
        "TopK",
        "ZeroFL",
        "BiFL",
        "BiFLFull",
    ),
}
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
__getattr__ = lazily(__name__, _PLACES)
