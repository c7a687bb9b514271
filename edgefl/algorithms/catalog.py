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
from edgefl.algorithms.personal.personal_layers import fedbn, fedper, fedrep
from edgefl.algorithms.personalize import add_personalize
from edgefl.algorithms.quantized.binary import binary
from edgefl.algorithms.quantized.fedbat import fedbat
from edgefl.algorithms.quantized.swat import swat
from edgefl.algorithms.submodels.multi_exit import multi_exit
from edgefl.algorithms.submodels.tcbgd import tcbgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.choice import AlgorithmChoice, collect_factories, define_entry
from edgefl.contract.options import check_options
from edgefl.errors import ConfigError
from edgefl.models.user_code import user_errors
from edgefl.models.user_factory import address_of, factory_of, importing_for
from edgefl.objective.objective import Objective
from edgefl.optimizers import OPTIMIZERS

SGD = define_entry(AlgorithmChoice, "sgd", "SGD", sgd)
FedAvg = define_entry(AlgorithmChoice, "fedavg", "FedAvg", fedavg)
FedAvgUpdate = define_entry(AlgorithmChoice, "fedavg_update", "FedAvgUpdate", fedavg_update)
FedAvgMatched = define_entry(AlgorithmChoice, "fedavg_matched", "FedAvgMatched", fedavg_matched)
PerFedAvg = define_entry(AlgorithmChoice, "per_fedavg", "PerFedAvg", per_fedavg)
FedPer = define_entry(AlgorithmChoice, "fedper", "FedPer", fedper)
FedRep = define_entry(AlgorithmChoice, "fedrep", "FedRep", fedrep)
FedBN = define_entry(AlgorithmChoice, "fedbn", "FedBN", fedbn)
LocalOnly = define_entry(AlgorithmChoice, "local", "LocalOnly", local)
FedProx = define_entry(AlgorithmChoice, "fedprox", "FedProx", fedprox)
Scaffold = define_entry(AlgorithmChoice, "scaffold", "Scaffold", scaffold)
FAFED = define_entry(AlgorithmChoice, "fafed", "FAFED", fafed)
STEM = define_entry(AlgorithmChoice, "stem", "STEM", stem)
NaiveAdaptive = define_entry(AlgorithmChoice, "naive_adaptive", "NaiveAdaptive", naive_adaptive)
LocalAMSGrad = define_entry(AlgorithmChoice, "local_amsgrad", "LocalAMSGrad", local_amsgrad)
MimeAdam = define_entry(AlgorithmChoice, "mimeadam", "MimeAdam", mimeadam)
MimeLite = define_entry(AlgorithmChoice, "mimelite", "MimeLite", mimelite)
AdamW = define_entry(AlgorithmChoice, "adamw", "AdamW", adamw)
TCBGD = define_entry(AlgorithmChoice, "tcbgd", "TCBGD", tcbgd)
MultiExit = define_entry(AlgorithmChoice, "multi_exit", "MultiExit", multi_exit)
SWAT = define_entry(AlgorithmChoice, "swat", "SWAT", swat)
Binary = define_entry(AlgorithmChoice, "binary", "Binary", binary)
FedBAT = define_entry(AlgorithmChoice, "fedbat", "FedBAT", fedbat)

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = collect_factories(globals())
PERSONAL = "personal"
"""Option of every algorithm: the step size of a graph that adapts the model to one user."""


def build(name: str, objective: Objective, **options: object) -> Algorithm:
    """Return the algorithm ``name`` with ``options`` for ``objective``.

    Every algorithm has the option ``personal``, a step size. It adds the graph of
    :func:`edgefl.algorithms.personalize.add_personalize`. It is off by default: it makes each bundle larger.

    Args:
        name: Name in the catalog, or ``package.module:factory`` or ``path/to/file.py:factory`` of the user's own
            factory.
        objective: Model part that a tier trains, with its loss.
        options: Options by name. Others have the defaults of the algorithm.

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
    return add_personalize(algorithm, objective, alpha=personal)


def own(factory: Callable[..., Any], **options: object) -> AlgorithmChoice:
    """Return an algorithm of your own: ``factory(objective, **options)`` returns an
    :class:`edgefl.algorithms.Algorithm`.

    The factory is not called here, but when the server or a simulation builds the algorithm for a tier.

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
