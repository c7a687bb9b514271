"""Server side of an algorithm: scalars per exchange, and the server optimizer. torch is imported at the first step only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from edgefl.errors import ServerStepError
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import VALUE_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.contract.tensors import Tensors


Scalars = Mapping[str, float]

Schedule = Callable[[int, int], Scalars]
"""(position, rounds) -> scalars that the server announces for an exchange.

``position`` is the number of completed exchanges of this algorithm, ``rounds`` the planned total.
"""


def constant(_position: int, _rounds: int) -> Scalars:
    """Return {}: the schedule of an algorithm whose scalars keep their defaults in every exchange (round trip between
    server and device).
    """
    return {}


_Value = TypeVar("_Value")


def _mean(_before: Tensors, _mean: Tensors, _hyper: Scalars) -> Tensors:
    return {}


def _as_sent(update: Tensors) -> Tensors:
    return update


@dataclass(frozen=True)
class ServerOpt:
    """Server optimizer (ServerOpt of Reddi et al. 2021) over float tensors by name.

    ``step`` and ``unfold`` are pure functions of torch tensors. The methods apply them to NumPy arrays. A state is a
    set of tensors that the server keeps beside the model, such as Adam's m; its tensor for ``conv.weight`` is named
    ``m/conv.weight``. An exchange is one round trip between server and devices.

    Attributes:
        name: Name in messages and error texts.
        state: Initial value of each state, by its name. A state has one tensor per trainable parameter, of the
            parameter's shape.
        step: ``step(before, mean, hyper)`` returns the new value of each tensor that differs from its mean.
            ``before`` holds weights and state at the start of the exchange. ``mean`` holds the same tensors: the
            mean of what devices sent, and the old value of a tensor that no device sent. ``hyper`` holds the
            scalars of the exchange and ``share``, the fraction of all devices that reported.
        unfold: ``unfold(update)`` returns the tensors to average instead of one update, such as squares, by the
            same names.
        options: Names of the algorithm's options that only the server reads.
    """

    name: str = "mean"
    state: Mapping[str, float] = field(default_factory=dict)
    step: Callable[[Tensors, Tensors, Scalars], Tensors] = _mean
    unfold: Callable[[Tensors], Tensors] = _as_sent
    options: frozenset[str] = frozenset()

    @property
    def unfolds(self) -> bool:
        """True if ``unfold`` is set, so that the averaged tensors differ from those that devices send."""
        return self.unfold is not _as_sent

    def moved(self, before: Mapping[str, Array], mean: Mapping[str, Array], hyper: Scalars) -> Arrays:
        """Run ``step`` on arrays and return the tensors that it changes, by name, in the dtypes of ``mean``.

        Return {} if ``step`` is the plain mean, because the new model is then ``mean`` itself.

        Args:
            before: Weights and state at the start of the exchange (round trip between server and device), by name.
            mean: Averages, by the same names.
            hyper: Scalars of the exchange, and ``share``, the fraction of all devices that reported.

        Raises:
            ServerStepError: The step raised an error, or returned an unknown tensor, another shape, or values that are
                not finite or too large for an update.
        """
        if self.step is _mean:
            return {}
        try:
            after = _arrays(self.step(_tensors(before), _tensors(mean), hyper))
        except (
            Exception
        ) as error:  # of the user's own: it may raise anything, and must not take the server with it
            raise ServerStepError(
                f"the server's step {self.name!r} failed: {type(error).__name__}: {error}"
            ) from error
        for name, array in after.items():
            self._check(name, array, mean)
        return {name: array.astype(mean[name].dtype, copy=False) for name, array in after.items()}

    def _check(self, name: str, array: Array, mean: Mapping[str, Array]) -> None:
        if name not in mean:
            raise ServerStepError(
                f"the server's step {self.name!r} gives {name!r}, which is neither of the model nor of its state"
            )
        if array.shape != mean[name].shape:
            raise ServerStepError(
                f"the server's step {self.name!r} gives {name} the shape {array.shape} instead of {mean[name].shape}"
            )
        if not (np.abs(array) <= VALUE_LIMIT).all():  # false for NaN too
            raise ServerStepError(
                f"the server's step {self.name!r} made {name} NaN, infinite or larger than {VALUE_LIMIT:.0f}; lower the "
                "learning rates",
                step=self.name,
                name=name,
            )

    def unfolded(self, update: Mapping[str, Array]) -> Arrays:
        """Return the arrays to average for one validated ``update``, by name.

        If ``unfold`` is set, they are its result. Else they are a copy of the dictionary ``update`` with the same
        arrays.
        """
        return _arrays(self.unfold(_tensors(update))) if self.unfolds else dict(update)

    def names_unfolded(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the arrays that :meth:`unfolded` returns for an update with these ``names``.

        It calls ``unfold`` with arrays of one zero each.
        """
        return tuple(self.unfolded({name: np.zeros(1, np.float32) for name in names}))


MEAN = ServerOpt()
"""Server optimizer of FedAvg: the mean is the new model."""


def beside(state: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return ``named`` with each name prefixed by the server state ``state``: ``m/conv.weight`` for state ``m``."""
    return {f"{state}/{name}": value for name, value in named.items()}


def state_of(tensors: Mapping[str, Tensor], state: str) -> Tensors:
    """Return the tensors of one server state by parameter name: the inverse of :func:`beside`. Omit all other tensors.

    Args:
        tensors: Tensors of any shape and dtype, some of them named ``<state>/<parameter>``.
        state: Name of the state.
    """
    return {
        name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{state}/")
    }


def _tensors(arrays: Mapping[str, Array]) -> Tensors:
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}
