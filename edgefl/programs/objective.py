"""The trained suffix of a model as pure functions of its named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from edgefl.models.layers import Dropout
from edgefl.models.loss import CROSS_ENTROPY, Loss
from edgefl.models.spec import ModelSpec, output_spec, skeleton
from edgefl.programs.contract import Tensors, TensorSpec
from edgefl.wire.errors import ModelError


class TrainedPart(Protocol):
    """What an objective needs of a submodel: its trained units, what they read, and the model they come from."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def suffix(self) -> nn.Sequential: ...
    @property
    def boundary(self) -> TensorSpec: ...


@dataclass(frozen=True, eq=False)
class Objective:
    """Mean ``loss`` of ``suffix`` on a batch, its gradient's ingredients and its inference.

    ``suffix`` maps the boundary tensor (B, *boundary.shape) to what the loss reads: for the default, logits
    (B, classes), or one logit (B, 1) for two classes. Only its structure and shapes are used; values always come
    from the arguments. Raises ModelError for a suffix without a parameter that gradients move.
    """

    suffix: nn.Sequential
    # One sample of the suffix's input, without the batch dimension.
    boundary: TensorSpec
    loss: Loss = CROSS_ENTROPY
    _modes: dict[bool, nn.Sequential] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.trainable:
            raise ModelError(
                f"nothing to train: of the suffix's {len(self.weights)} state tensors ({len(self.suffix)} units) none is a "
                "parameter that requires a gradient; give the model a layer with weights, cut it earlier, or set "
                "requires_grad",
                units=len(self.suffix),
            )
        for training in (True, False):
            self._modes[training] = skeleton(self.suffix, training=training)

    @classmethod
    def of(cls, part: TrainedPart) -> Objective:
        """The objective of a submodel (output-side suffix, width slice or full model)."""
        return cls(part.suffix, part.boundary, part.spec.loss)

    @cached_property
    def weights(self) -> Mapping[str, TensorSpec]:
        """Every state tensor of the suffix, moving statistics included, in state order."""
        return {name: TensorSpec.of(tensor) for name, tensor in self.suffix.state_dict().items()}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the tensors that gradients move."""
        return tuple(name for name, parameter in self.suffix.named_parameters() if parameter.requires_grad)

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """Names of the other state tensors: moving statistics, and parameters that require no gradient."""
        return tuple(name for name in self.weights if name not in self.trainable)

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Trainable kernels of conv, dense and recurrent layers: what weight decay acts on (spec 8, row 12)."""
        embeddings = {
            f"{path}.weight" if path else "weight"
            for path, module in self.suffix.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        return frozenset(
            name for name in self.trainable if len(self.weights[name].shape) >= 2 and name not in embeddings
        )

    def batch(self, size: int) -> TensorSpec:
        """The port of ``size`` boundary samples."""
        return self.boundary.rows(size)

    def labels(self, size: int) -> TensorSpec:
        """The port of ``size`` labels, as the loss reads them. ModelError if it cannot read the suffix's output."""
        return self._label.rows(size)

    @cached_property
    def _label(self) -> TensorSpec:
        return self.loss.label(output_spec(self.suffix, self.boundary))

    def noise(self, size: int) -> Mapping[str, TensorSpec]:
        """The uniform tensors that dropout layers read in training, by name; empty for models without dropout."""
        found: dict[str, TensorSpec] = {}
        bare = skeleton(self.suffix, training=False).to("meta")
        for path, module in bare.named_modules():
            if isinstance(module, Dropout) and module.rate > 0.0:
                module.register_forward_pre_hook(_shape_into(found, f"{path}.uniform"))
        if any(isinstance(module, Dropout) for module in bare.modules()):
            with torch.no_grad():
                bare(self.batch(size).zeros().to("meta"))
        return found

    def __call__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        noise: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Training mode: (mean loss (), number correct () float32, buffers after the pass).

        ``params`` holds :attr:`trainable`, ``buffers`` holds :attr:`fixed`, ``x`` is (B, *boundary), ``y`` as
        :meth:`labels` says. The arguments are never changed: batch norm's moving statistics come back as new tensors.
        """
        tensors = {**params, **{name: buffers[name].clone() for name in self.fixed}, **(noise or {})}
        out = self._output(tensors, x, training=True)
        losses = self.loss.each(out, y)
        moved = {name: tensors[name].detach() for name in self.fixed}
        return losses.mean(), self.loss.correct(out.detach(), y).sum(), moved

    def evaluate(self, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Inference mode: per sample, the loss (B,) and how right it is (B,), float32 from 0 to 1."""
        out = self.predict(weights, x)
        return self.loss.each(out, y), self.loss.correct(out, y)

    def predict(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Inference mode: the output. ``weights`` may hold more than the suffix, such as the whole model."""
        tensors = {name: tensor for name, tensor in weights.items() if name in self.weights}
        return self._output(tensors, x, training=False)

    def _output(self, tensors: Tensors, x: Tensor, *, training: bool) -> Tensor:
        missing = [name for name in self.weights if name not in tensors]
        if missing:
            raise ModelError(f"the suffix needs {missing[0]!r}, which was not given", missing=missing)
        # Rebound buffers are written back into `tensors`, which is how the new moving statistics get out.
        return cast(Tensor, torch.func.functional_call(self._modes[training], tensors, (x,)))


def _shape_into(found: dict[str, TensorSpec], name: str):  # type: ignore[no-untyped-def]
    def hook(_module: nn.Module, args: tuple[Tensor]) -> None:
        found[name] = TensorSpec(tuple(args[0].shape))

    return hook
