"""Anybody's module with the layers of this folder in place of torch's that work behind the scenes."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from edgefl.contract.tensors import TensorSpec
from edgefl.models.draws.steering import without_dispatch, without_masking
from edgefl.models.layers.explicit import BatchNorm, BnMode
from edgefl.models.layers.recurrent import TorchStack
from edgefl.models.layers.surrounded import Surrounded
from edgefl.models.user_code import blamed
from edgefl.wire.errors import ModelError

_PLAIN = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
_OLD_NORMS: dict[type, str] = {WeightNorm: "weight_norm", SpectralNorm: "spectral_norm"}


def visible(module: nn.Module) -> nn.Module:
    """A deep copy of ``module`` that computes the same, with batch norm replaced by that of
    :mod:`edgefl.models.layers.explicit`.

    LSTM and GRU become :class:`edgefl.models.layers.recurrent.TorchStack`, whose graph does not grow with the sequence.
    A batch norm or dropout in inference mode inside a module in training mode stays so, also where a ``train`` of the
    module's own sees to it. A layer without state that is a
    submodule under several names, such as one ReLU or dropout for all, becomes one of its own under each.

    Integer buffers (position ids, counters) become constants, because only floats are averaged. Raises ModelError
    for tied parameters of batch norms and recurrent layers, cumulative batch-norm averages, and LSTMs with projections.
    """
    _check_copyable(module)
    copied = copy.deepcopy(module)
    without_masking(copied)
    without_dispatch(copied)
    _train_by_own_rules(copied)
    tied = _pairs(copied)
    module = _Replacing(module.training).replaced("", copied)
    for first, second in tied - _pairs(module):
        raise ModelError(
            f"parameters {first!r} and {second!r} are one tensor, and a layer here keeps its own; give each its own",
            names=(first, second),
        )
    for part in module.modules():
        integers = {
            name for name, buffer in part._buffers.items() if buffer is not None and _discrete(buffer)
        }
        part._non_persistent_buffers_set |= integers
    return module


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
    copied = copy.deepcopy(module, fresh)
    modes = {part: part.training for part in copied.modules()}
    with torch.no_grad(), blamed(f"{type(module).__name__} has lazy layers and cannot read a sample"):
        copied.eval()
        if isinstance(sample, Mapping):
            copied(**{name: each.rows(2).zeros() for name, each in sample.items()})
        else:
            copied(sample.rows(2).zeros())
    for part, training in modes.items():
        part.training = training
    return copied


def _check_copyable(module: nn.Module) -> None:
    """ModelError for weights that a hook of torch's older form computes in each call, outside of any layer."""
    for path, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            name = _OLD_NORMS.get(type(hook))
            if name:
                raise ModelError(
                    f"submodule {path!r} has the older torch.nn.utils.{name}, whose weight no graph can hold; use "
                    f"torch.nn.utils.parametrizations.{name}",
                    module=path,
                )


def _train_by_own_rules(module: nn.Module) -> None:
    """Let parts that have a ``train`` of their own, as to keep batch norm frozen, put into inference mode what they will."""
    for part in module.modules() if module.training else ():
        if type(part).train is nn.Module.train:
            continue
        before = {inner: inner.training for inner in part.modules()}
        part.train(True)
        for inner, mode in before.items():
            inner.training = inner.training and mode


def _pairs(module: nn.Module) -> set[tuple[str, str]]:
    """The first name and another of every parameter that has several."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    pairs = {(first.setdefault(id(parameter), name), name) for name, parameter in named}
    return {pair for pair in pairs if len(set(pair)) > 1}


def _discrete(buffer: Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex())


class _Replacing:
    """Replaces the submodules of a module whose mode is ``training``, each object in the same way wherever it is met."""

    def __init__(self, training: bool) -> None:
        self._training = training
        self._done: dict[nn.Module, nn.Module] = {}

    def replaced(self, path: str, module: nn.Module) -> nn.Module:
        made = self._done.get(module)
        if made is not None:
            return made if made.state_dict() else copy.deepcopy(made)
        self._done[module] = made = self._made(path, module)
        return made

    def _made(self, path: str, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return _batch_norm(path, module, frozen=self._training and not module.training)
        if isinstance(module, nn.LSTM | nn.GRU):
            return _recurrent(path, module)
        if isinstance(module, nn.modules.dropout._DropoutNd) and self._training and not module.training:
            return nn.Identity()
        for name, child in list(module._modules.items()):
            if child is not None:
                replacement = self.replaced(f"{path}.{name}" if path else name, child)
                if replacement is not child:
                    setattr(module, name, replacement)
        return module


def _batch_norm(path: str, old: nn.modules.batchnorm._BatchNorm, *, frozen: bool) -> nn.Module:
    if old.momentum is None:
        raise ModelError(
            f"batch norm {path!r} keeps a cumulative average (momentum=None), which depends on a batch counter; "
            "give it a momentum such as 0.1",
            module=path,
        )
    mode: BnMode = "global" if old.track_running_stats else "static"
    new = BatchNorm(
        old.num_features, mode=mode, keep=1 - old.momentum, eps=old.eps, affine=old.affine, frozen=frozen
    )
    own = {name: tensor for name, tensor in old.state_dict().items() if name in new.state_dict()}
    new.load_state_dict(own)
    for name, parameter in old.named_parameters(recurse=False):
        new.get_parameter(name).requires_grad_(parameter.requires_grad)
    new.train(old.training)
    return new if type(old).forward in _PLAIN else Surrounded(old, new)


def _recurrent(path: str, old: nn.LSTM | nn.GRU) -> nn.Module:
    if old.proj_size:
        raise ModelError(
            f"{type(old).__name__} {path!r} has proj_size={old.proj_size}, which has no step-by-step form here; leave "
            "it out and put an nn.Linear behind",
            module=path,
        )
    return TorchStack(old)
