"""The loss that a model returns itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError


@dataclass(frozen=True)
class ModelLoss:
    """The loss that a module returns beside its output when its forward is given labels, as models of transformers do.

    ``labels`` is what forward calls them, ``key`` what it calls the loss: a key or an attribute of what it returns. When
    the module is cut, the loss is lifted out of its graph and becomes an
    :class:`~edgefl.models.losses.own.OwnLoss`: it is computed from the output and the labels alone, the same way in training
    and in inference. The data define a label; labels to ignore must be those that the model ignores, often -100.
    """

    labels: str = "labels"
    key: str = "loss"

    def each(self, out: Tensor, y: Tensor) -> NoReturn:
        raise self._refusal()

    def correct(self, out: Tensor, y: Tensor) -> NoReturn:
        raise self._refusal()

    def label(self, out: TensorSpec) -> NoReturn:
        raise self._refusal()

    def read(self, label: TensorSpec | None) -> TensorSpec:
        """Return one label of the data, as forward is given it; ModelError if it is unknown."""
        if label is None:
            raise ModelError(
                "the loss `model` does not say what labels it reads: give `data`, or the TensorSpec of one sample's label "
                "as `labels` of edgefl.submodels.split"
            )
        return label

    def _refusal(self) -> ModelError:
        return ModelError(
            "the loss `model` is what an nn.Module returns when it is given labels; this model is made of units already: "
            "name another loss"
        )
