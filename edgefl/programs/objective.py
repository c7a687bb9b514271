"""The trained suffix of a model as pure functions of its named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.models.layers import Dropout
from edgefl.models.spec import ModelSpec, skeleton
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
    """Mean cross-entropy of ``suffix`` on a batch, its gradient's ingredients and its inference.

    ``suffix`` maps the boundary tensor (B, *boundary.shape) to logits (B, classes), or to one logit (B, 1) when
    there are two classes. Only its structure and shapes are used; values always come from the arguments.
    """

    suffix: nn.Sequential
    # One sample of the suffix's input, without the batch dimension.
    boundary: TensorSpec
    classes: int
    _modes: dict[bool, nn.Sequential] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for training in (True, False):
            self._modes[training] = skeleton(self.suffix, training=training)

    @classmethod
    def of(cls, part: TrainedPart) -> Objective:
        """The objective of a submodel (output-side suffix, width slice or full model)."""
        return cls(part.suffix, part.boundary, part.spec.classes)

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
        return TensorSpec((size, *self.boundary.shape), self.boundary.dtype)

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
        """Training mode: (mean cross-entropy (), number correct () float32, buffers after the pass).

        ``params`` holds :attr:`trainable`, ``buffers`` holds :attr:`fixed`, ``x`` is (B, *boundary), ``y`` (B,)
        int64. The arguments are never changed: batch norm's moving statistics come back as new tensors.
        """
        tensors = {**params, **{name: buffers[name].clone() for name in self.fixed}, **(noise or {})}
        logits = self._logits(tensors, x, training=True)
        losses = cross_entropy(logits, y)
        moved = {name: tensors[name].detach() for name in self.fixed}
        return losses.mean(), correct(logits.detach(), y).sum(), moved

    def evaluate(self, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Inference mode: per sample, the cross-entropy (B,) and whether the label was found (B,), float32."""
        logits = self.predict(weights, x)
        return cross_entropy(logits, y), correct(logits, y)

    def predict(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Inference mode: the logits. ``weights`` may hold more than the suffix, such as the whole model."""
        tensors = {name: tensor for name, tensor in weights.items() if name in self.weights}
        return self._logits(tensors, x, training=False)

    def _logits(self, tensors: Tensors, x: Tensor, *, training: bool) -> Tensor:
        missing = [name for name in self.weights if name not in tensors]
        if missing:
            raise ModelError(f"the suffix needs {missing[0]!r}, which was not given", missing=missing)
        # Rebound buffers are written back into `tensors`, which is how the new moving statistics get out.
        logits = torch.func.functional_call(self._modes[training], tensors, (x,))
        return cast(Tensor, logits)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log softmax(logits)[y] per sample, (B,). Written with comparisons, so that its gradient needs no scatter."""
    logp = F.log_softmax(_two_sided(logits), dim=1)
    chosen = torch.arange(logp.shape[1], device=y.device) == y.unsqueeze(1)
    return -torch.where(chosen, logp, torch.zeros_like(logp)).sum(dim=1)


def correct(logits: Tensor, y: Tensor) -> Tensor:
    """1.0 where the largest logit is the label's, (B,) float32."""
    return (_two_sided(logits).argmax(dim=1) == y).to(torch.float32)


def _two_sided(logits: Tensor) -> Tensor:
    """One logit z is the pair (0, z): its cross-entropy is that of sigmoid(z)."""
    return torch.cat((torch.zeros_like(logits), logits), dim=1) if logits.shape[1] == 1 else logits


def _shape_into(found: dict[str, TensorSpec], name: str):  # type: ignore[no-untyped-def]
    def hook(_module: nn.Module, args: tuple[Tensor]) -> None:
        found[name] = TensorSpec(tuple(args[0].shape))

    return hook
