"""Algorithms by name, and as objects with their options: ``FedBAT(rho=6)``, ``PerFedAvg(alpha=0.03)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from edgefl.algorithms.personal.personalize import adapted
from edgefl.algorithms.quantized.binary import binary
from edgefl.algorithms.quantized.fedbat import fedbat
from edgefl.algorithms.quantized.swat import swat
from edgefl.algorithms.submodels.multi_exit import multi_exit
from edgefl.algorithms.submodels.tcbgd import tcbgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.choice import AlgorithmChoice, built_upon, factories_among
from edgefl.contract.options import check_options
from edgefl.errors import ConfigError
from edgefl.models.user_code import user_errors
from edgefl.models.user_factory import address_of, factory_of, importing_for
from edgefl.objective.objective import Objective
from edgefl.optimizers import OPTIMIZERS

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

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = factories_among(globals())
PERSONAL = "personal"
"""Option of every algorithm: the step size of a graph that adapts the model to one user."""


def build(name: str, objective: Objective, **options: object) -> Algorithm:
    """Return the algorithm ``name`` with ``options`` for ``objective``.

    Every algorithm has the option ``personal``, a step size. It adds the graph of
    :func:`edgefl.algorithms.personal.personalize.adapted`. It is off by default, because it makes each bundle larger.

    Args:
        name: Name in the catalog, or ``package.module:factory`` or ``path/to/file.py:factory`` of the user's own factory.
        objective: Objective of a tier.
        options: Options by name.

    Raises:
        ConfigError: The name or an option is wrong. The text lists the alternatives.
    """
    factory = factory_of(name, "algorithm") if ":" in name else ALGORITHMS.get(name)
    if factory is None:
        known = ", ".join(sorted(ALGORITHMS))
        if name in OPTIMIZERS:
            raise ConfigError(
                f"{name!r} is an optimizer of the server and no algorithm: set algorithm fedavg and optimizer {name}, in a "
                f'federation file [optimizer] name = "{name}"',
                name=name,
            )
        raise ConfigError(
            f"no algorithm {name!r}; there are: {known}, 'package.module:factory' or 'path/to/file.py:factory'",
            name=name,
            known=known,
        )
    personal = options.pop(PERSONAL, None)
    check_options(f"algorithm {name!r}", factory, options)
    if ":" in name:
        with user_errors(f"the factory {name!r} of an algorithm failed"), importing_for(name):
            algorithm = factory(objective, **options)
    else:
        algorithm = factory(objective, **options)
    if personal is None:
        return algorithm
    if isinstance(personal, bool) or not isinstance(personal, int | float):
        raise ConfigError(
            f"algorithm {name!r}: personal is {personal!r}; set it to the step size of the graph that adapts the "
            f"model to one "
            "user, such as 0.01",
            option=PERSONAL,
        )
    return adapted(algorithm, objective, alpha=personal)


def own(factory: Callable[..., Any], **options: object) -> AlgorithmChoice:
    """Return an algorithm of your own: ``factory(objective, **options)`` returns an :class:`edgefl.algorithms.Algorithm`.

    Args:
        factory: Function at the top level of a file, which the server's process imports again.
        options: Options of the factory, by name.

    Raises:
        ConfigError: ``factory`` cannot be imported (a lambda, a function inside another one, or one typed into an
            interpreter), or an option is unknown or has another type.
    """
    address = address_of(factory, "an algorithm")
    check_options(factory.__name__, factory, options)
    return AlgorithmChoice(address, options, factory.__name__)
