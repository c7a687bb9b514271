"""Source of a model: the module that it was split from, to compare training with torch and to split it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.hooks import has_hooks
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import ModelLoss
from edgefl.models.partition.output import Output

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
# By its name, because the import takes seconds.
_COMPILED = "torch._dynamo.eval_frame.OptimizedModule"
_TORCH = str(Path(torch.__file__).parent)

Cuts = tuple[str, ...] | str | None


@dataclass(frozen=True)
class SplitRequest:
    """Arguments of :func:`edgefl.models.split.split` for one module.

    Attributes:
        cuts: Paths of submodules, ``"auto"``, or None for the default.
        sample: Spec of one sample of the input without batch dimension, or of several inputs by name.
        classes: Number of classes of a label.
        units: Most units, or None.
        name: Name of the model.
        accounting_batch: See :class:`edgefl.models.spec.ModelSpec`.
        loss: Loss to minimise, or None for the one that fits.
        labels: Spec of one label of the data, or None.
        output: Selects the output if the module returns several tensors.
        whole: Keep the module as one unit, and ignore ``cuts``.
    """

    cuts: Cuts
    sample: TensorSpec | Mapping[str, TensorSpec]
    classes: int
    units: int | None
    name: str
    accounting_batch: int
    loss: Loss | None
    labels: TensorSpec | None
    output: Output
    whole: bool = False

    @property
    def first(self) -> TensorSpec:
        """Spec of one sample of the first input."""
        return next(iter(self.sample.values())) if isinstance(self.sample, Mapping) else self.sample

    def shortened(self, length: int) -> SplitRequest:
        """Return a copy of the request for samples whose first dimension is ``length``, such as the tokens of a sequence.

        Further inputs and labels change too if their first dimension was as long as that of the first input.
        """
        longest = self.first.shape[:1]

        def cut(each: TensorSpec) -> TensorSpec:
            return replace(each, shape=(length, *each.shape[1:])) if each.shape[:1] == longest else each

        sample = (
            {key: cut(each) for key, each in self.sample.items()}
            if isinstance(self.sample, Mapping)
            else cut(self.sample)
        )
        return replace(self, sample=sample, labels=None if self.labels is None else cut(self.labels))


@dataclass(frozen=True, eq=False)
class ModelSource:
    """User's module, with the request by which it was split.

    Attributes:
        module: User's object, or its initialized copy if it has lazy layers.
        request: Arguments of the split.
        loss: Loss that fits the output.
    """

    module: nn.Module
    request: SplitRequest
    loss: Loss

    def split(self, request: SplitRequest) -> Any:
        """Split the module by another request and return the :class:`edgefl.models.spec.ModelSpec`.

        Raises:
            ModelError: The module cannot be split.
        """
        raise NotImplementedError

    def shortened(self, length: int) -> Any:
        """Split the module for samples of ``length`` entries and return the :class:`edgefl.models.spec.ModelSpec`.

        Raises:
            ModelError: The module cannot read such samples.
        """
        loss = self.returned_loss or self.loss
        return self.split(replace(self.request.shortened(length), loss=loss))

    @property
    def returned_loss(self) -> ModelLoss | None:
        """Loss that the module computes itself, if training minimises it; else None."""
        return self.request.loss if isinstance(self.request.loss, ModelLoss) else None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside of ``nn.DataParallel`` and ``torch.compile`` wrappers, or ``module`` itself.

    A data-parallel wrapper with hooks or its own forward is returned as it is, because it can be traced like any
    module. Wrappers inside of wrappers are removed, too.

    Raises:
        ModelError: A part is scripted, or a compiled or distributed wrapper has hooks or its own forward.
    """
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            where = f"submodule {path!r} is" if path else "the module is"
            raise ModelError(
                f"expected modules of Python code, found a scripted one, which cannot be traced: {where} "
                f"{part.original_name}; give the nn.Module that torch.jit.script or torch.jit.trace was given",
                module=path,
            )
    inside = _inside(module)
    return module if inside is None else unwrap(inside)


def _inside(module: nn.Module) -> nn.Module | None:
    """Return the module that ``module`` calls if it is a wrapper of torch, or None if it is none.

    A data-parallel wrapper with hooks on a machine without GPUs counts as none.

    Raises:
        ModelError: The wrapper has hooks or its own forward, which would be lost.
    """
    kinds = [f"{each.__module__}.{each.__qualname__}" for each in type(module).__mro__]
    compiled = _COMPILED in kinds
    if not compiled and not isinstance(module, _PARALLEL):
        return None
    name = "_orig_mod" if compiled else "module"
    inside = module.get_submodule(name)
    forward = module.__dict__.get("forward")
    is_plain = kinds[0] == _COMPILED if compiled else type(module) in _PARALLEL
    if is_plain and not has_hooks(module) and (forward is None or (compiled and _calls(forward, inside))):
        return inside
    if isinstance(module, nn.DataParallel) and not module.device_ids:
        return None
    raise ModelError(
        f"expected a wrapper as torch makes it, found {type(module).__name__} with hooks or a forward of its own, which "
        f"would be lost; give the module inside (model.{name}), and register the hooks or write the forward there",
        refused=True,
    )


def _calls(forward: Any, inside: nn.Module) -> bool:
    """Return True if torch generated the ``forward`` of a compiled wrapper, which calls the module ``inside``."""
    called = getattr(forward, "_torchdynamo_orig_callable", forward)
    code = getattr(called, "__code__", None)
    return getattr(called, "__self__", None) is inside or code is None or code.co_filename.startswith(_TORCH)
