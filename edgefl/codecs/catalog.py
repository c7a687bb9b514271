"""Codecs by name, and as objects with their options: ``FedPAQ(bits=3)``, ``TopK(share=0.01)``.

Defaults are the papers' hyper-parameters (fedbat.md, sections 2 and 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from edgefl.codecs.codec import STATISTICS_BITS, Codec, CodecTraining
from edgefl.codecs.coders import (
    FixedSign,
    MeanSign,
    NearestLevels,
    NoisySign,
    ScaledSignCoder,
    Sign0,
    StochasticLevels,
    StochasticSign,
)
from edgefl.contract.choice import CodecChoice, collect_factories, define_entry
from edgefl.contract.options import check_options
from edgefl.errors import ConfigError
from edgefl.wire.update.form import CHANGE_LIMIT, FloatEncoding, SparseEncoding

_LEAST = 2.0**-126
"""Smallest number that float32 holds with all its digits. Engines may flush smaller ones to 0."""


def dense(name: str) -> Codec:
    """Return the codec that sends the weights as float32, by name: FedAvg's update.

    Args:
        name: Name of the codec, which the update's form contains.
    """
    return Codec(name)


def half(name: str, *, statistics: int = 32, binarize_1d: bool = True) -> Codec:
    """Return the codec that sends the change of the round as float16 or bfloat16, according to its name.

    Args:
        name: ``float16`` or ``bfloat16``.
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.
    """
    dtype: Literal["float16", "bfloat16"] = "float16" if name == "float16" else "bfloat16"
    return Codec(name, FloatEncoding(dtype), statistics=statistics, binarize_1d=binarize_1d)


def int8(
    name: str, *, feedback: bool = False, statistics: int = STATISTICS_BITS, binarize_1d: bool = True
) -> Codec:
    """Return the codec of the nearest of 255 even levels up to the largest change of each tensor, 8 bits an entry.

    Args:
        name: Name of the codec, which the update's form contains.
        feedback: True: the device keeps the rounding error and adds it to its next change.
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.
    """
    return Codec(name, NearestLevels(8), feedback=feedback, statistics=statistics, binarize_1d=binarize_1d)


def fedpaq(name: str, *, bits: int = 4, statistics: int = STATISTICS_BITS, binarize_1d: bool = True) -> Codec:
    """Return FedPAQ: unbiased stochastic levels of 2 to 8 ``bits`` an entry, up to the largest change of each tensor
    (Reisizadeh et al. 2020; fedbat.md 3).

    Args:
        name: Name of the codec, which the update's form contains.
        bits: Bits of an entry, 2 to 8.
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.

    Raises:
        ConfigError: A number is out of range.
    """
    return Codec(name, StochasticLevels(bits), statistics=statistics, binarize_1d=binarize_1d)


def signsgd(
    name: str,
    *,
    alpha: float = 0.001,
    sign0: Sign0 = "random",
    statistics: int = STATISTICS_BITS,
    binarize_1d: bool = True,
) -> Codec:
    """Return SignSGD: the sign of the change, times a constant ``alpha`` (Bernstein et al. 2018; fedbat.md 3).

    Args:
        name: Name of the codec, which the update's form contains.
        alpha: Magnitude of the decoded change, which server and device know.
        sign0: Code of an unchanged entry: "random" sign or "plus".
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.

    Raises:
        ConfigError: A number is out of range.
    """
    return Codec(
        name,
        FixedSign(_check_size(name, "alpha", alpha), sign0),
        statistics=statistics,
        binarize_1d=binarize_1d,
    )


def scaled_sign(
    name: str, *, sign0: Sign0 = "random", statistics: int = STATISTICS_BITS, binarize_1d: bool = True
) -> Codec:
    """Return the codec of the sign of the change times its mean magnitude: EF-SignSGD without memory (fedbat.md 3).

    Args:
        name: Name of the codec, which the update's form contains.
        sign0: Code of an unchanged entry: "random" sign or "plus".
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.
    """
    return Codec(name, ScaledSignCoder(sign0), statistics=statistics, binarize_1d=binarize_1d)


def ef_signsgd(
    name: str, *, sign0: Sign0 = "random", statistics: int = STATISTICS_BITS, binarize_1d: bool = True
) -> Codec:
    """Return EF-SignSGD: the scaled sign of the change plus the residual of earlier rounds, which the device keeps
    (Karimireddy et al. 2019; fedbat.md 3).

    Args:
        name: Name of the codec, which the update's form contains.
        sign0: Code of an unchanged entry: "random" sign or "plus".
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.
    """
    return Codec(name, ScaledSignCoder(sign0), feedback=True, statistics=statistics, binarize_1d=binarize_1d)


def noisy_signsgd(
    name: str,
    *,
    alpha: float = 0.01,
    sigma: float = 0.01,
    statistics: int = STATISTICS_BITS,
    binarize_1d: bool = True,
) -> Codec:
    """Return Noisy-SignSGD: ``alpha`` times the sign of the change plus normal noise of deviation ``sigma`` (fedbat.md 3).

    Args:
        name: Name of the codec, which the update's form contains.
        alpha: Magnitude of the decoded change.
        sigma: Standard deviation of the noise.
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.

    Raises:
        ConfigError: A number is out of range.
    """
    coder = NoisySign(_check_size(name, "alpha", alpha), _check_size(name, "sigma", sigma))
    return Codec(name, coder, statistics=statistics, binarize_1d=binarize_1d)


def stoc_signsgd(
    name: str, *, alpha: float = 0.01, statistics: int = STATISTICS_BITS, binarize_1d: bool = True
) -> Codec:
    """Return Stoc-SignSGD: ``alpha`` times the sign of the change plus uniform noise up to the largest magnitude of the
    tensor (fedbat.md 3).

    Args:
        name: Name of the codec, which the update's form contains.
        alpha: Magnitude of the decoded change.
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.

    Raises:
        ConfigError: A number is out of range.
    """
    coder = StochasticSign(_check_size(name, "alpha", alpha))
    return Codec(name, coder, statistics=statistics, binarize_1d=binarize_1d)


def topk(
    name: str,
    *,
    share: float = 0.03,
    feedback: bool = False,
    statistics: int = STATISTICS_BITS,
    binarize_1d: bool = True,
) -> Codec:
    """Return the codec of the ``share`` of largest entries of the change of each tensor: ZeroFL's upload after dense
    training (fedbat.md 3).

    Args:
        name: Name of the codec, which the update's form contains.
        share: Share of the entries that are sent, in (0, 1].
        feedback: True: the device keeps the entries that were not sent and adds them to its next change.
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.

    Raises:
        ConfigError: A number is out of range.
    """
    return Codec(
        name, _sparse(name, share), feedback=feedback, statistics=statistics, binarize_1d=binarize_1d
    )


def zerofl(
    name: str,
    *,
    sparsity: float = 0.97,
    activations: bool = True,
    sparse_training: bool = True,
    sparse_upload: bool = True,
    statistics: int = STATISTICS_BITS,
    binarize_1d: bool = True,
) -> Codec:
    """Return ZeroFL: SWAT's sparse training, and the 1 - ``sparsity`` largest entries of the change (Qiu et al. 2022;
    fedbat.md 3).

    Args:
        name: Name of the codec, which the update's form contains.
        sparsity: Share of the entries that are left out, in training and in the update.
        activations: True: a weight's gradient reads only the largest entries of its layer's input. False: it
            reads all.
        sparse_training: False: train by dense SGD (fedbat.md 8.16).
        sparse_upload: False: send the whole change as float32 (fedbat.md 8.16).
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: send them as float32.

    Raises:
        ConfigError: A number is out of range.
    """
    training = (
        CodecTraining("swat", {"sparsity": sparsity, "activations": activations}) if sparse_training else None
    )
    # 1 - 0.97 is a hair above 0.03.
    upload = _sparse(name, round(1 - sparsity, 12)) if sparse_upload else FloatEncoding()
    return Codec(name, upload, statistics=statistics, binarize_1d=binarize_1d, training=training)


def bifl(name: str, *, clip: bool = False) -> Codec:
    """Return BiFL: a net with binary weights, of which each device sends sign and mean magnitude (fedbat.md 3, 8.17).

    Args:
        name: Name of the codec, which the update's form contains.
        clip: True: in training, entries W with |W| > 1 get no gradient.
    """
    training = CodecTraining("binary", {"clip": clip})
    return Codec(name, MeanSign(), change=False, statistics=32, kernels_only=True, training=training)


def bifl_full(name: str, *, clip: bool = False) -> Codec:
    """Return BiFL-Full: BiFL's training, and the weights behind the signs as float32 (fedbat.md 3, 8.17).

    Args:
        name: Name of the codec, which the update's form contains.
        clip: True: in training, entries W with |W| > 1 get no gradient.
    """
    return Codec(name, training=CodecTraining("binary", {"clip": clip}))


def fedbat(
    name: str,
    *,
    rho: float = 6.0,
    phi: float = 0.5,
    granularity: Literal["tensor", "module", "global"] = "tensor",
    upload_mode: Literal["resample_final", "last_forward", "det_sign"] = "resample_final",
    step_size: Literal["learned", "largest"] = "learned",
    alpha_range: tuple[float, float] | None = None,
    statistics: int = STATISTICS_BITS,
    binarize_1d: bool = True,
) -> Codec:
    """Return FedBAT: training binarizes the update with learned step sizes
    (:func:`edgefl.algorithms.quantized.fedbat.fedbat` explains the options).

    Args:
        name: Name of the codec, which the update's form contains.
        rho: Learning speed of the step sizes alpha.
        phi: Share of the local steps that train in full precision first.
        granularity: One step size per tensor, module or model.
        upload_mode: Signs of a new draw, signs of the last step's draw, or signs of the change itself.
        step_size: "learned", or "largest": the largest magnitude of the change in each step.
        alpha_range: Smallest and largest step size. None: no bounds.
        statistics: Bits per entry of moving statistics; 32 sends float32.
        binarize_1d: True: code biases and norms like kernels. False: train and send them in full precision.
    """
    options = {
        "rho": rho,
        "phi": phi,
        "granularity": granularity,
        "upload_mode": upload_mode,
        "step_size": step_size,
        "alpha_range": alpha_range,
        "statistics": statistics,
        "binarize_1d": binarize_1d,
    }
    return Codec(name, training=CodecTraining("fedbat", options))


Dense = define_entry(CodecChoice, "dense", "Dense", dense)
Float16 = define_entry(CodecChoice, "float16", "Float16", half)
BFloat16 = define_entry(CodecChoice, "bfloat16", "BFloat16", half)
Int8 = define_entry(CodecChoice, "int8", "Int8", int8)
FedPAQ = define_entry(CodecChoice, "fedpaq", "FedPAQ", fedpaq)
SignSGD = define_entry(CodecChoice, "signsgd", "SignSGD", signsgd)
ScaledSign = define_entry(CodecChoice, "scaled_sign", "ScaledSign", scaled_sign)
EFSignSGD = define_entry(CodecChoice, "ef_signsgd", "EFSignSGD", ef_signsgd)
NoisySignSGD = define_entry(CodecChoice, "noisy_signsgd", "NoisySignSGD", noisy_signsgd)
StocSignSGD = define_entry(CodecChoice, "stoc_signsgd", "StocSignSGD", stoc_signsgd)
_FedBAT = define_entry(CodecChoice, "fedbat", "FedBAT", fedbat)
TopK = define_entry(CodecChoice, "topk", "TopK", topk)
ZeroFL = define_entry(CodecChoice, "zerofl", "ZeroFL", zerofl)
BiFL = define_entry(CodecChoice, "bifl", "BiFL", bifl)
BiFLFull = define_entry(CodecChoice, "bifl_full", "BiFLFull", bifl_full)

CODECS: Mapping[str, Callable[..., Codec]] = collect_factories(globals())


def build(name: str, **options: object) -> Codec:
    """Return the codec ``name`` with ``options``.

    Args:
        name: Name in the catalog.
        options: Options of the codec by name. Others have their defaults.

    Raises:
        ConfigError: The name, an option or a value is wrong. The text lists what is accepted.
    """
    factory = CODECS.get(name)
    if factory is None:
        known = ", ".join(CODECS)
        raise ConfigError(f"no codec {name!r}; there are: {known}", name=name, known=known)
    check_options(f"codec {name!r}", factory, options)
    return factory(name, **options)


def _check_size(codec: str, option: str, value: float) -> float:
    """Return ``value``. Raise ConfigError unless it is a normal float32 number of at most ``CHANGE_LIMIT``."""
    if not _LEAST <= value <= CHANGE_LIMIT:
        raise ConfigError(
            f"{option} of codec {codec!r} is from {_LEAST:.3g} to {CHANGE_LIMIT:.0f}, found {value}; "
            "choose about the size of a typical change, such as 0.001",
            codec=codec,
        )
    return value


def _sparse(codec: str, share: float) -> SparseEncoding:
    if not 0 < share <= 1:
        raise ConfigError(
            f"codec {codec!r} sends a share of the entries in (0, 1], found {share}", codec=codec
        )
    return SparseEncoding(share)
