"""Check that a submodel can learn at all (invariant 31 of fiarse.md), and the guards that make it able to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.loss import training_loss
from edgefl.models.spec import ModelSpec, skeleton
from edgefl.submodels.importance.strategy import GroupingStrategy, maskable
from edgefl.submodels.importance.thresholds import NO_GUARDS, Guards, ImportanceMasks, cut, layer_of, scales
from edgefl.wire.tensors import Array, Arrays

_ROWS = 8
# Number of tensors that a verdict lists.
_TOLD = 6
_MIN_KEEPS = (16, 256, 4096)


@dataclass(frozen=True)
class LearnabilityReport:
    """Result of the check that a submodel can learn: its output depends on the input, and layers get gradients
    (invariant 31 of fiarse.md).

    Attributes:
        kept: Kept fraction of each tensor, by name.
        classifier: Name of the classifier's weight.
        guards: Entries that the submodel keeps whatever their rank.
        reads_input: True if the output depends on the input.
        trains_below: True if a tensor before the classifier gets a gradient.
    """

    kept: Mapping[str, float]
    # The classifier's weight: the last kernel of the model.
    classifier: str
    # The guards that the submodel was cut with.
    guards: Guards
    # The logits of two batches differ.
    reads_input: bool
    # A kept entry before the classifier gets a gradient that is not zero. Also true if there is no layer before it.
    trains_below: bool

    @property
    def keeps_classifier(self) -> bool:
        """True if the classifier's weight keeps an entry."""
        return self.kept[self.classifier] > 0.0

    @property
    def alive(self) -> bool:
        """True if the submodel can learn: its output depends on the input, lower layers train, and the classifier keeps an
        entry.
        """
        return self.reads_input and self.trains_below and self.keeps_classifier

    @property
    def empty(self) -> tuple[str, ...]:
        """Names of the tensors without kept entries."""
        return tuple(name for name, fraction in self.kept.items() if fraction == 0.0)

    @property
    def verdict(self) -> str:
        """Text of the failed conditions and the tensors without kept entries, for a submodel that is not :attr:`alive`."""
        failed = {
            "the output does not depend on the input": self.reads_input,
            f"nothing before {self.classifier} gets a gradient": self.trains_below,
            f"{self.classifier} keeps nothing": self.keeps_classifier,
        }
        failure_text = " and ".join(text for text, passed in failed.items() if not passed)
        more = len(self.empty) - _TOLD
        names = ", ".join(self.empty[:_TOLD]) + (f" and {more} more" if more > 0 else "")
        return f"{failure_text} ({names} keep nothing)" if names else failure_text


def check_liveness(
    spec: ModelSpec, submodel: ImportanceMasks, weights: Mapping[str, Array] | None = None, *, seed: int = 0
) -> LearnabilityReport:
    """Check whether ``submodel`` can learn, on random inputs and labels.

    It runs as in training, without dropout. Weights do not change, and torch's generator is not used.

    Args:
        spec: Model.
        submodel: Masks and thresholds.
        weights: Weights from which it was cut. None: those of ``spec``.
        seed: Seed of inputs and labels.

    Raises:
        ModelError: No masked tensor is a kernel that could be the classifier.
    """
    whole = spec_arrays(spec) if weights is None else weights
    tensors = {name: torch.from_numpy(array.copy()) for name, array in submodel.apply(whole).items()}
    module = _trainable_copy(spec)
    generator = torch.Generator().manual_seed(seed)
    first, second = (_rows(spec.sample, generator) for _ in range(2))
    # Exact: behind a layer that lets nothing of the input through, both passes compute with the same numbers.
    with torch.no_grad():
        reads_input = not torch.equal(_logits(module, tensors, first), _logits(module, tensors, second))
    classifier = _classifier(spec, submodel)
    below = [name for name in submodel.masks if layer_of(name) != layer_of(classifier)]
    return LearnabilityReport(
        kept=submodel.fractions,
        classifier=classifier,
        guards=submodel.guards,
        reads_input=reads_input,
        trains_below=not below
        or _has_gradient(spec, module, tensors, submodel, below, first, _rows(spec.label, generator)),
    )


def find_remedies(
    spec: ModelSpec, gamma: float, weights: Mapping[str, Array] | None = None
) -> tuple[tuple[GroupingStrategy, Guards], ...]:
    """Return the (strategy, guards) pairs with which the submodel of size ``gamma`` can learn, or () if none of them
    helps.

    It tries one guard of fiarse.md A9 at a time on a model-wise ranking: the smallest sufficient ``min_keep`` of a
    few, first and last kernel dense, relative importance. Then it tries the shard-wise and layer-wise strategies.

    Args:
        spec: Model.
        gamma: Share of the entries, in (0, 1].
        weights: Weights to cut. None: those of ``spec``.
    """
    whole = spec_arrays(spec) if weights is None else weights
    working: list[tuple[GroupingStrategy, Guards]] = []
    for strategy, guards in _candidates(maskable(spec), whole):
        done = guards.min_keep and any(earlier_guards.min_keep for _, earlier_guards in working)
        if not done and _is_alive_with(spec, gamma, whole, strategy, guards):
            working.append((strategy, guards))
    return tuple(working)


def as_options(strategy: GroupingStrategy, guards: Guards, *, named: bool = False) -> str:
    """Return strategy and guards as the text of a tier's options in a federation file, such as ``min_keep = 1``.

    Args:
        strategy: Rule by which tensors share a threshold.
        guards: Entries that are held regardless of rank. Options with their default are left out.
        named: True: include the strategy even if it is the default.
    """
    options = {
        "strategy": strategy.kind if named or strategy.kind != "model" else None,
        "min_keep": guards.min_keep or None,
        "dense": list(guards.dense) or None,
        "relative": guards.relative or None,
    }
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items() if value is not None)


def spec_arrays(spec: ModelSpec) -> Arrays:
    """Return the state of ``spec`` as arrays by name, which share its memory."""
    return {name: tensor.numpy() for name, tensor in spec.weights.items()}


def _candidates(
    names: tuple[str, ...], weights: Mapping[str, Array]
) -> Iterator[tuple[GroupingStrategy, Guards]]:
    """Yield the pairs (rule by which tensors share a threshold, entries held regardless of rank) of :func:`find_remedies`.

    Args:
        names: Names of the maskable tensors, in order.
        weights: Weights by name.
    """
    kernels = [name for name in names if weights[name].ndim > 1]
    ends = tuple(dict.fromkeys((layer_of(kernels[0]), layer_of(kernels[-1])))) if kernels else ()
    for least in _MIN_KEEPS:
        yield GroupingStrategy(), Guards(min_keep=least)
    yield GroupingStrategy(), Guards(dense=ends[-1:])
    yield GroupingStrategy(), Guards(dense=ends)
    yield GroupingStrategy(), Guards(relative=True)
    yield GroupingStrategy("shard"), NO_GUARDS
    yield GroupingStrategy("layer"), NO_GUARDS


def _is_alive_with(
    spec: ModelSpec, gamma: float, weights: Mapping[str, Array], strategy: GroupingStrategy, guards: Guards
) -> bool:
    """Return True if the submodel with this strategy and these guards exists and can learn."""
    groups = strategy.groups(spec)
    spreads = scales({name: weights[name] for group in groups for name in group})
    try:
        submodel = cut(weights, gamma, groups, guards, spreads)
    except ModelError:
        return False
    return check_liveness(spec, submodel, weights).alive


def _trainable_copy(spec: ModelSpec) -> nn.Module:
    """Return a copy of the model in training mode, without dropout."""
    module = skeleton(spec.module, training=True)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.eval()
    return module


def _logits(module: nn.Module, tensors: Tensors, x: Tensor) -> Tensor:
    # A copy of the dict, because moving statistics are written back into it.
    out: Tensor = torch.func.functional_call(module, dict(tensors), (x,))
    return out


def _has_gradient(
    spec: ModelSpec,
    module: nn.Module,
    tensors: Tensors,
    submodel: ImportanceMasks,
    below: list[str],
    x: Tensor,
    y: Tensor,
) -> bool:
    """Return True if the loss has a gradient at a kept entry of one of the tensors ``below`` the classifier."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in below}
    loss = training_loss(spec.loss, _logits(module, tensors | leaves, x), y)
    if not loss.requires_grad:
        return False
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return any(
        grad is not None and bool((grad[torch.from_numpy(submodel.masks[name])] != 0).any())
        for name, grad in zip(leaves, grads, strict=True)
    )


def _rows(sample: TensorSpec, generator: torch.Generator) -> Tensor:
    shape = (_ROWS, *sample.shape)
    if sample.below is not None or not sample.dtype.is_floating_point:
        below = 2 if sample.below is None else sample.below
        return torch.randint(0, below, shape, generator=generator).to(sample.dtype)
    return torch.randn(shape, generator=generator, dtype=sample.dtype)


def _classifier(spec: ModelSpec, submodel: ImportanceMasks) -> str:
    """Return the name of the last kernel among the masked tensors.

    Raises:
        ModelError: There is no kernel among them.
    """
    kernels = [name for name, mask in submodel.masks.items() if mask.ndim > 1]
    if not kernels:
        raise ModelError(f"{spec.name} has no kernel that could be its classifier", model=spec.name)
    return kernels[-1]
