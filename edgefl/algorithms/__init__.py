"""Local algorithms as pure functions of named tensors, and the parts from which users build their own.

``edgefl.algorithms.FedProx(mu=0.1)`` is an algorithm with its options. Your own algorithm is a function that returns an
:class:`Algorithm`; all its parts are here (docs/tutorials/new-method.md), and :func:`own` makes it usable in a federation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgefl.system.lazy_names import lazily_from

if TYPE_CHECKING:
    from edgefl.algorithms.catalog import (
        FAFED,
        SGD,
        STEM,
        SWAT,
        TCBGD,
        AdamW,
        Binary,
        FedAvg,
        FedAvgMatched,
        FedAvgUpdate,
        FedBAT,
        FedBN,
        FedPer,
        FedProx,
        FedRep,
        LocalAMSGrad,
        LocalOnly,
        MimeAdam,
        MimeLite,
        MultiExit,
        NaiveAdaptive,
        PerFedAvg,
        Scaffold,
        own,
    )
    from edgefl.contract import (
        Algorithm,
        CarryRule,
        Function,
        Phase,
        Scalars,
        ServerOpt,
        Tensors,
        TensorSpec,
        beside,
        prefixed,
        role_of,
        select,
        state_of,
    )
    from edgefl.errors import ConfigError
    from edgefl.objective.derivatives import gradient
    from edgefl.objective.objective import Objective
    from edgefl.objective.parts import SCALAR, begun, evaluate, finish, held_ports, step_ports

__all__ = [
    "FAFED",
    "SCALAR",
    "SGD",
    "STEM",
    "SWAT",
    "TCBGD",
    "AdamW",
    "Algorithm",
    "Binary",
    "CarryRule",
    "ConfigError",
    "FedAvg",
    "FedAvgMatched",
    "FedAvgUpdate",
    "FedBAT",
    "FedBN",
    "FedPer",
    "FedProx",
    "FedRep",
    "Function",
    "LocalAMSGrad",
    "LocalOnly",
    "MimeAdam",
    "MimeLite",
    "MultiExit",
    "NaiveAdaptive",
    "Objective",
    "PerFedAvg",
    "Phase",
    "Scaffold",
    "Scalars",
    "ServerOpt",
    "TensorSpec",
    "Tensors",
    "begun",
    "beside",
    "evaluate",
    "finish",
    "gradient",
    "held_ports",
    "own",
    "prefixed",
    "role_of",
    "select",
    "state_of",
    "step_ports",
]
__getattr__ = lazily_from(
    __name__,
    __all__,
    (
        "edgefl.errors",
        "edgefl.contract",
        "edgefl.objective.derivatives",
        "edgefl.objective.objective",
        "edgefl.objective.parts",
        "edgefl.algorithms.catalog",
    ),
)


def build(name: str, objective: Objective, **options: object) -> Algorithm:
    """Return the algorithm ``name`` with ``options`` for ``objective``.

    Args:
        name: Name in the catalog, or ``package.module:factory`` or ``path/to/file.py:factory`` of the user's own
            factory.
        objective: Model part that a tier trains, with its loss.
        options: Options by name. Others have the defaults of the algorithm.

    Raises:
        ConfigError: The name or an option is wrong. The text lists the alternatives.
    """
    # Here, because the models need this package's contract and no algorithm.
    from edgefl.algorithms import catalog

    return catalog.build(name, objective, **options)
