"""The loss that a model returns itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from edgefl.contract.tensors import TensorSpec
from edgefl.wire.errors import ModelError


@dataclass(frozen=True)
class ModelLoss:
    """The loss that a module returns beside its output when its forward is given labels, as models of transformers do.

    ``labels`` is what forward calls them, ``key`` what it calls the loss: a key or an attribute of what it returns. When
    the module is cut, the loss is lifted out of its graph and becomes an
    :class:`~edgefl.models.losses.own.OwnLoss`, whose limits it has: it is made of the output and the labels alone, and a
    sample has no part in the loss of another. Data tell what a label is; none may be left out (``ignore_index``).
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
        """One label of the data, as forward is given it; ModelError where nobody says, or some of them do not count."""
        if label is None:
            raise ModelError(
                "the loss `model` does not say what labels it reads: give `data`, or the TensorSpec of one sample's label "
                "as `labels` of edgefl.split"
            )
        if label.ignored is not None:
            raise ModelError(
                f"the loss `model` cannot leave out labels of {label.ignored}, because the mean that the model returns "
                "does not say how much a sample weighs: take cross_entropy, sequence_cross_entropy or causal_lm",
                ignored=label.ignored,
            )
        return label

    def _refusal(self) -> ModelError:
        return ModelError(
            "the loss `model` is what an nn.Module returns when it is given labels; this model is made of units already: "
            "name another loss"
        )
