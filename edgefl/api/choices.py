"""The catalogs as objects: algorithms, codecs, submodels and optimizers that arguments and federation files name.

::

    edgefl.OutputSide(cut=3)      edgefl.FedBAT(rho=6)      edgefl.FedPAQ(bits=3)      edgefl.FedAdam(lr=0.01)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgefl.algorithms.adaptive.fafed import fafed
from edgefl.algorithms.adaptive.local_amsgrad import local_amsgrad
from edgefl.algorithms.adaptive.naive_adaptive import naive_adaptive
from edgefl.algorithms.adaptive.stem import stem
from edgefl.algorithms.baselines.adamw import adamw
from edgefl.algorithms.baselines.fedavg import fedavg, fedavg_matched, fedavg_update
from edgefl.algorithms.baselines.fedprox import fedprox
from edgefl.algorithms.baselines.local_only import local
from edgefl.algorithms.baselines.mime import mimeadam, mimelite
from edgefl.algorithms.baselines.scaffold import scaffold
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.algorithms.quantized.binary import binary
from edgefl.algorithms.quantized.fedbat import fedbat
from edgefl.algorithms.quantized.swat import swat
from edgefl.algorithms.submodels.multi_exit import multi_exit
from edgefl.algorithms.submodels.tcbgd import tcbgd
from edgefl.codecs import catalog as codecs
from edgefl.contract.choice import (
    AlgorithmChoice,
    CodecChoice,
    LossChoice,
    Named,
    OptimizerChoice,
    SubmodelChoice,
    built_alone,
    built_upon,
    chosen,
)
from edgefl.contract.options import check_options
from edgefl.models import losses
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import OwnLoss
from edgefl.optimizers import adaptive as server_adaptive
from edgefl.optimizers.momentum import server_momentum
from edgefl.submodels.early_exit.fit import early_exit
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.output_side.submodel import output_side
from edgefl.submodels.structured.submodel import importance_structured
from edgefl.submodels.width.submodel import width
from edgefl.wire.errors import ConfigError

# Algorithms: what devices do in a round.
SGD = built_upon(AlgorithmChoice, "sgd", "SGD", sgd)
FedAvg = built_upon(AlgorithmChoice, "fedavg", "FedAvg", fedavg)
FedAvgUpdate = built_upon(AlgorithmChoice, "fedavg_update", "FedAvgUpdate", fedavg_update)
FedAvgMatched = built_upon(AlgorithmChoice, "fedavg_matched", "FedAvgMatched", fedavg_matched)
PerFedAvg = built_upon(AlgorithmChoice, "per_fedavg", "PerFedAvg", per_fedavg)
LocalOnly = built_upon(AlgorithmChoice, "local", "LocalOnly", local)
FedProx = built_upon(AlgorithmChoice, "fedprox", "FedProx", fedprox)
Scaffold = built_upon(AlgorithmChoice, "scaffold", "Scaffold", scaffold)
FAFED = built_upon(AlgorithmChoice, "fafed", "FAFED", fafed)
STEM = built_upon(AlgorithmChoice, "stem", "STEM", stem)
NaiveAdaptive = built_upon(AlgorithmChoice, "naive_adaptive", "NaiveAdaptive", naive_adaptive)
LocalAMSGrad = built_upon(AlgorithmChoice, "local_amsgrad", "LocalAMSGrad", local_amsgrad)
MimeAdam = built_upon(AlgorithmChoice, "mimeadam", "MimeAdam", mimeadam)
MimeLite = built_upon(AlgorithmChoice, "mimelite", "MimeLite", mimelite)
AdamW = built_upon(AlgorithmChoice, "adamw", "AdamW", adamw)
TCBGD = built_upon(AlgorithmChoice, "tcbgd", "TCBGD", tcbgd)
MultiExit = built_upon(AlgorithmChoice, "multi_exit", "MultiExit", multi_exit)
SWAT = built_upon(AlgorithmChoice, "swat", "SWAT", swat)
Binary = built_upon(AlgorithmChoice, "binary", "Binary", binary)
FedBAT = built_upon(AlgorithmChoice, "fedbat", "FedBAT", fedbat)

# Codecs: how an update becomes bytes, after any training.
Dense = built_upon(CodecChoice, "dense", "Dense", codecs.dense)
Float16 = built_upon(CodecChoice, "float16", "Float16", codecs.half)
BFloat16 = built_upon(CodecChoice, "bfloat16", "BFloat16", codecs.half)
Int8 = built_upon(CodecChoice, "int8", "Int8", codecs.int8)
FedPAQ = built_upon(CodecChoice, "fedpaq", "FedPAQ", codecs.fedpaq)
SignSGD = built_upon(CodecChoice, "signsgd", "SignSGD", codecs.signsgd)
ScaledSign = built_upon(CodecChoice, "scaled_sign", "ScaledSign", codecs.scaled_sign)
EFSignSGD = built_upon(CodecChoice, "ef_signsgd", "EFSignSGD", codecs.ef_signsgd)
NoisySignSGD = built_upon(CodecChoice, "noisy_signsgd", "NoisySignSGD", codecs.noisy_signsgd)
StocSignSGD = built_upon(CodecChoice, "stoc_signsgd", "StocSignSGD", codecs.stoc_signsgd)
TopK = built_upon(CodecChoice, "topk", "TopK", codecs.topk)
ZeroFL = built_upon(CodecChoice, "zerofl", "ZeroFL", codecs.zerofl)
BiFL = built_upon(CodecChoice, "bifl", "BiFL", codecs.bifl)
BiFLFull = built_upon(CodecChoice, "bifl_full", "BiFLFull", codecs.bifl_full)

# Losses: what training minimises.
CrossEntropy = built_alone(LossChoice, "cross_entropy", "CrossEntropy", losses.CrossEntropy)
SequenceCrossEntropy = built_alone(
    LossChoice, "sequence_cross_entropy", "SequenceCrossEntropy", losses.SequenceCrossEntropy
)
CausalLM = built_alone(LossChoice, "causal_lm", "CausalLM", losses.CausalLM)
BinaryCrossEntropy = built_alone(
    LossChoice, "binary_cross_entropy", "BinaryCrossEntropy", losses.BinaryCrossEntropy
)
SquaredError = built_alone(LossChoice, "squared_error", "SquaredError", losses.SquaredError)
AbsoluteError = built_alone(LossChoice, "absolute_error", "AbsoluteError", losses.AbsoluteError)
Huber = built_alone(LossChoice, "huber", "Huber", losses.Huber)
Quantile = built_alone(LossChoice, "quantile", "Quantile", losses.Quantile)
InfoNCE = built_alone(LossChoice, "info_nce", "InfoNCE", losses.InfoNCE)
NTXent = built_alone(LossChoice, "nt_xent", "NTXent", losses.NTXent)
CTC = built_alone(LossChoice, "ctc", "CTC", losses.CTC)
ModelLoss = built_alone(LossChoice, "model", "ModelLoss", losses.ModelLoss)

LossLike = LossChoice | Loss | str | Callable[..., Any]
"""A choice such as ``edgefl.Huber(delta=2.0)``, a loss, its name, or a function ``(out, y)`` of your own."""

# Submodels: how a tier is cut out of the model.
OutputSide = built_upon(SubmodelChoice, "output_side", "OutputSide", output_side)
Width = built_upon(SubmodelChoice, "width", "Width", width)
Importance = built_upon(SubmodelChoice, "importance", "Importance", importance)
ImportanceStructured = built_upon(
    SubmodelChoice, "importance_structured", "ImportanceStructured", importance_structured
)
EarlyExit = built_upon(SubmodelChoice, "early_exit", "EarlyExit", early_exit)

# Optimizers of the server.
FedAdam = built_alone(OptimizerChoice, "fedadam", "FedAdam", server_adaptive.fedadam)
FedYogi = built_alone(OptimizerChoice, "fedyogi", "FedYogi", server_adaptive.fedyogi)
FedAdagrad = built_alone(OptimizerChoice, "fedadagrad", "FedAdagrad", server_adaptive.fedadagrad)
FedAMS = built_alone(OptimizerChoice, "fedams", "FedAMS", server_adaptive.fedams)
ServerMomentum = built_alone(OptimizerChoice, "server_momentum", "ServerMomentum", server_momentum)


def own_algorithm(factory: Callable[..., Any], **options: object) -> AlgorithmChoice:
    """An algorithm of your own: ``factory(objective, **options)`` returns a :class:`edgefl.contract.algorithm.Algorithm`.

    The factory is a function at the top level of a file, which the server's process loads again. ConfigError for one
    that is not (a lambda, a function inside another one, one that was typed into an interpreter), and for an option
    that it has not, or of another type.
    """
    address = address_of(factory, "an algorithm")
    check_options(factory.__name__, factory, options)
    return AlgorithmChoice(address, options, factory.__name__)


def address_of(factory: Callable[..., Any], what: str) -> str:
    """``path/to/file.py:name`` of a function at the top level of a file."""
    name = getattr(factory, "__qualname__", "")
    try:
        file = inspect.getsourcefile(factory)
    except TypeError:
        file = None
    if not name.isidentifier() or file is None or not Path(file).is_file():
        raise ConfigError(
            f"{what} of your own is a function at the top level of a file, found {_short(factory)}: other processes load "
            "it from there",
            factory=repr(factory),
        )
    return f"{Path(file).resolve()}:{name}"


def _short(factory: object) -> str:
    """A module would show all of its layers."""
    return repr(factory) if inspect.isfunction(factory) else f"an object of {type(factory).__name__}"


def codec_choice(value: object) -> CodecChoice:
    """The codec that the argument ``codec`` names; an algorithm that is a codec of its own, too, such as FedBAT."""
    made = value() if isinstance(value, Named) else value
    if isinstance(made, AlgorithmChoice) and made.name in codecs.CODECS:
        return CodecChoice(made.name, made.options, made.label)
    return chosen("codec", CodecChoice, made)


def loss_of(value: LossLike | None) -> Loss | None:
    """The loss that the argument ``loss`` names; None: the model's own."""
    if value is None:
        return None
    if isinstance(value, Named | LossChoice | str):
        made = chosen("loss", LossChoice, value)
        return losses.build(made.name, **made.options)
    try:
        made_loss = value() if inspect.isclass(value) else value
    except TypeError as error:
        raise ConfigError(
            f"argument `loss` is a class that needs arguments ({error}): give an instance, such as "
            f"{getattr(value, '__name__', 'Loss')}(...)",
            argument="loss",
        ) from error
    if not isinstance(made_loss, Loss) and not callable(made_loss):
        raise ConfigError(
            f"argument `loss` is {value!r}; give a loss such as edgefl.Huber(delta=2.0), its name, or a function "
            "(out, y) -> one loss per sample",
            argument="loss",
        )
    return losses.own_loss(made_loss)


def loss_choice(value: LossLike) -> LossChoice:
    """The same as a federation file has it. ConfigError for what another process could not load, or a file not say."""
    if isinstance(value, Named | LossChoice | str):
        return _sayable(chosen("loss", LossChoice, value))
    if isinstance(value, OwnLoss):
        return LossChoice(address_of(value.function, "a loss"))
    for name, kind in losses.LOSSES.items():
        if type(value) is kind:
            parameters = inspect.signature(kind).parameters.values()
            options = {each.name: getattr(value, each.name) for each in parameters}
            given = {
                each.name: options[each.name] for each in parameters if options[each.name] != each.default
            }
            return _sayable(LossChoice(name, given))
    if not callable(value):
        raise ConfigError(
            f"argument `loss` is {value!r}, which other processes cannot load: give a loss such as edgefl.Huber(delta=2.0), "
            "its name, or a function or class at the top level of a file",
            argument="loss",
        )
    return LossChoice(address_of(value, "a loss"))


def _sayable(choice: LossChoice) -> LossChoice:
    parameters = (
        inspect.signature(losses.LOSSES[choice.name]).parameters if choice.name in losses.LOSSES else {}
    )
    for name, value in choice.options.items():
        if value is None and name in parameters and parameters[name].default is not None:
            raise ConfigError(
                f"{name} of the loss {choice.name!r} is None, which a file cannot say: give it a number that no label has, "
                "such as -1",
                option=name,
            )
    return choice
