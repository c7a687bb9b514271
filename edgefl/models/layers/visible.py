"""Copies of people's modules that can be traced and trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.modes import is_inference, mark_inference
from edgefl.models.user_code import blamed


def visible(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module`` that computes the same.

    Parts in inference mode inside a module in training mode stay so, also where a ``train`` of the module's own sees to
    it. A layer without state that is a submodule under several names, such as one ReLU for all, becomes one of its own
    under each. Buffers of integers (position ids, counters) and of complex numbers become constants, because only floats are
    averaged.

    Raises ModelError for cumulative batch-norm averages.
    """
    made = copy_module(module)
    mark_inference(made)
    _check_averages(made)
    _part_stateless(made)
    for part in made.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.register_load_state_dict_post_hook(_without_counter)
        part._non_persistent_buffers_set |= {
            name
            for name, buffer in part._buffers.items()
            if buffer is not None and not buffer.is_floating_point()
        }
    return made


def shaped(module: nn.Module, sample: TensorSpec | Mapping[str, TensorSpec]) -> nn.Module:
    """``module``, or a copy whose lazy layers have the shapes that a batch of ``sample`` gives them. ModelError if it
    cannot read one."""
    waiting = [each for each in (*module.parameters(), *module.buffers()) if is_lazy(each)]
    if not waiting:
        return module
    # torch copies parameters without a shape, but no buffers.
    fresh: dict[int, object] = {
        id(each): UninitializedBuffer(device=each.device, dtype=each.dtype)  # type: ignore[call-arg]
        for each in waiting
        if isinstance(each, UninitializedBuffer)
    }
    made = copy_module(module, fresh)
    modes = {part: part.training for part in made.modules()}
    with torch.no_grad(), blamed(f"{type(module).__name__} has lazy layers and cannot read a sample"):
        made.eval()
        if isinstance(sample, Mapping):
            made(**{name: each.rows(2).zeros() for name, each in sample.items()})
        else:
            made(sample.rows(2).zeros())
    for part, training in modes.items():
        part.training = training
    return made


def _check_averages(module: nn.Module) -> None:
    for path, part in module.named_modules():
        averages = isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats
        if averages and not is_inference(part) and part.momentum is None:
            raise ModelError(
                f"batch norm {path!r} keeps a cumulative average (momentum=None), which depends on a batch counter; "
                "give it a momentum such as 0.1",
                module=path,
            )


def _part_stateless(module: nn.Module) -> None:
    """Give each name of a layer without state a copy of its own, so that units can be cut between the uses."""
    seen: set[nn.Module] = set()
    for part in module.modules():
        for name, child in part._modules.items():
            if child in seen and child is not None and _is_plain(child):
                part._modules[name] = copy_module(child)
            elif child is not None:
                seen.add(child)


def _is_plain(module: nn.Module) -> bool:
    parts = list(module.modules())
    return not module.state_dict() and all(type(part).__module__.startswith("torch.nn.") for part in parts)


def _without_counter(_norm: nn.Module, keys: Any) -> None:
    """Ignore the counter of batches, which torch's batch norm adds to every state that it loads."""
    keys.unexpected_keys[:] = [
        key for key in keys.unexpected_keys if not key.endswith(".num_batches_tracked")
    ]
