"""What a server makes of the averages of an exchange, and how its state is named. Imports torch where a step is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from edgefl.contract.schedule import Scalars
from edgefl.errors import StepError
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import VALUE_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl.contract.tensors import Tensors

_Value = TypeVar("_Value")


def _mean(_before: Tensors, _mean: Tensors, _hyper: Scalars) -> Tensors:
    return {}


def _as_sent(update: Tensors) -> Tensors:
    return update


@dataclass(frozen=True)
class ServerOpt:
    """What the server makes of the averages of an exchange (ServerOpt of Reddi et al. 2021), float tensors by ``name``.

    ``state``: what it keeps beside the weights, by name, with the value that its entries begin with; there is one tensor
    for each trainable parameter of the model, of its shape. ``step(before, mean, hyper)`` gets the weights and the state
    as the exchange began with them, the same tensors with the mean wherever devices sent something and the old value
    elsewhere, and the exchange's scalars, to which the server adds ``share``, the part of all devices that reported. It
    returns the tensors that become something else than that mean. ``unfold(update)`` gives what is averaged in place of
    one update (the squares of what was sent, for example), by the same names. All are pure functions of named tensors.
    ``options`` names those of the algorithm that the server alone reads.

    The methods are the same functions of arrays, as a server has them: where torch is in another process, so are they.
    """

    name: str = "mean"
    state: Mapping[str, float] = field(default_factory=dict)
    step: Callable[[Tensors, Tensors, Scalars], Tensors] = _mean
    unfold: Callable[[Tensors], Tensors] = _as_sent
    options: frozenset[str] = frozenset()

    @property
    def unfolds(self) -> bool:
        """Whether something else is averaged than what was sent."""
        return self.unfold is not _as_sent

    def moved(self, before: Mapping[str, Array], mean: Mapping[str, Array], hyper: Scalars) -> Arrays:
        """What ``step`` gives, in the dtypes of the mean.

        StepError, naming a tensor, if the step fails, or gives what devices could not send back: a tensor that there is
        not, another shape, or what is not finite or beyond the largest weight.
        """
        if self.step is _mean:
            return {}
        try:
            after = _arrays(self.step(_tensors(before), _tensors(mean), hyper))
        except (
            Exception
        ) as error:  # of the user's own: it may raise anything, and must not take the server with it
            raise StepError(
                f"the server's step {self.name!r} failed: {type(error).__name__}: {error}"
            ) from error
        for name, array in after.items():
            self._check(name, array, mean)
        return {name: array.astype(mean[name].dtype, copy=False) for name, array in after.items()}

    def _check(self, name: str, array: Array, mean: Mapping[str, Array]) -> None:
        if name not in mean:
            raise StepError(
                f"the server's step {self.name!r} gives {name!r}, which is neither of the model nor of its state"
            )
        if array.shape != mean[name].shape:
            raise StepError(
                f"the server's step {self.name!r} gives {name} the shape {array.shape} instead of {mean[name].shape}"
            )
        if not (np.abs(array) <= VALUE_LIMIT).all():  # false for NaN too
            raise StepError(
                f"the server's step {self.name!r} made {name} NaN, infinite or larger than {VALUE_LIMIT:.0f}; lower the "
                "learning rates"
            )

    def unfolded(self, update: Mapping[str, Array]) -> Arrays:
        """What is averaged in place of an update's checked arrays."""
        return _arrays(self.unfold(_tensors(update))) if self.unfolds else dict(update)

    def names_unfolded(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """What :meth:`unfolded` has where an update has these names."""
        return tuple(self.unfolded({name: np.zeros(1, np.float32) for name in names}))


MEAN = ServerOpt()
"""FedAvg's: the mean is the new model."""


def beside(state: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    """Name ``named``, values by parameter, as the server's ``state`` has them: ``{"m/conv.weight": x}`` for ``m``."""
    return {f"{state}/{name}": value for name, value in named.items()}


def state_of(tensors: Mapping[str, Tensor], state: str) -> Tensors:
    """Return those of ``tensors`` that belong to one ``state``, by parameter, shapes and dtypes as they are: the inverse of
    :func:`beside`."""
    return {
        name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{state}/")
    }


def _tensors(arrays: Mapping[str, Array]) -> Tensors:
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}
