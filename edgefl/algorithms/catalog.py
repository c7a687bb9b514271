"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
from edgefl.algorithms.personal.adapted import adapted
from edgefl.algorithms.personal.per_fedavg import per_fedavg
from edgefl.algorithms.quantized.binary import binary
from edgefl.algorithms.quantized.fedbat import fedbat
from edgefl.algorithms.quantized.swat import swat
from edgefl.algorithms.submodels.multi_exit import multi_exit
from edgefl.algorithms.submodels.tcbgd import tcbgd
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.options import check_options
from edgefl.errors import ConfigError
from edgefl.models.user_code import user_errors
from edgefl.models.user_factory import factory_of, importing_for
from edgefl.objective.objective import Objective
from edgefl.optimizers import OPTIMIZERS

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = {
    "sgd": sgd,
    "fedavg": fedavg,
    "fedavg_update": fedavg_update,
    "fedavg_matched": fedavg_matched,
    "per_fedavg": per_fedavg,
    "local": local,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "fafed": fafed,
    "stem": stem,
    "naive_adaptive": naive_adaptive,
    "local_amsgrad": local_amsgrad,
    "mimeadam": mimeadam,
    "mimelite": mimelite,
    "adamw": adamw,
    "tcbgd": tcbgd,
    "multi_exit": multi_exit,
    "swat": swat,
    "binary": binary,
    "fedbat": fedbat,
}


PERSONAL = "personal"
"""The option that every algorithm has: the step size of a graph that adapts the model to one user."""


def build(name: str, objective: Objective, **options: object) -> Algorithm:
    """The algorithm ``name`` for ``objective``. Raises ConfigError, with what exists, for a wrong name or option.

    ``personal``, which no factory needs to know, adds the graph of :func:`edgefl.algorithms.personal.adapted.adapted`
    to any algorithm that has none. It is left out otherwise, since it costs each bundle a graph and each export the
    time to make it.
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
