"""Algorithms as objects, with their options: ``FedBAT(rho=6)``, ``PerFedAvg(alpha=0.03)``."""

from __future__ import annotations

from collections.abc import Callable
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
from edgefl.contract.choice import AlgorithmChoice, built_upon
from edgefl.contract.options import check_options
from edgefl.models.user_factory import address_of

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


def own(factory: Callable[..., Any], **options: object) -> AlgorithmChoice:
    """Return an algorithm of your own: ``factory(objective, **options)`` returns an :class:`edgefl.algorithms.Algorithm`.

    The factory is a function at the top level of a file, which the server's process loads again.

    Raises:
        ConfigError: it is not (a lambda, a function inside another one, one that was typed into an interpreter), or it has
            no such option, or one of another type.
    """
    address = address_of(factory, "an algorithm")
    check_options(factory.__name__, factory, options)
    return AlgorithmChoice(address, options, factory.__name__)
