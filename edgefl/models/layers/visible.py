"""Anybody's module with the layers of this folder in place of torch's that work behind the scenes."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from edgefl.models.draws.steering import without_masking
from edgefl.models.layers.explicit import BatchNorm, BnMode
from edgefl.models.layers.recurrent import TorchStack
from edgefl.wire.errors import ModelError


def visible(module: nn.Module) -> nn.Module:
    """A deep copy of ``module`` that computes the same, with batch norm replaced by that of
    :mod:`edgefl.models.layers.explicit`.

    LSTM and GRU become :class:`edgefl.models.layers.recurrent.TorchStack`, whose graph does not grow with the sequence.
    A batch norm in inference mode inside a module in training mode stays frozen. A layer without state that is a
    submodule under several names, such as one ReLU or dropout for all, becomes one of its own under each.

    Integer buffers (position ids, counters) become constants, because only floats are averaged. Raises ModelError
    for tied parameters of batch norms and recurrent layers, cumulative batch-norm averages, and LSTMs with projections.
    """
    copied = copy.deepcopy(module)
    without_masking(copied)
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
        for name, child in list(module._modules.items()):
            if child is not None:
                replacement = self.replaced(f"{path}.{name}" if path else name, child)
                if replacement is not child:
                    setattr(module, name, replacement)
        return module


def _batch_norm(path: str, old: nn.modules.batchnorm._BatchNorm, *, frozen: bool) -> BatchNorm:
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
    state = {name: tensor for name, tensor in old.state_dict().items() if name != "num_batches_tracked"}
    new.load_state_dict(state)
    for name, parameter in old.named_parameters():
        new.get_parameter(name).requires_grad_(parameter.requires_grad)
    return new.train(old.training)


def _recurrent(path: str, old: nn.LSTM | nn.GRU) -> nn.Module:
    if old.proj_size:
        raise ModelError(
            f"{type(old).__name__} {path!r} has proj_size={old.proj_size}, which has no step-by-step form here; leave "
            "it out and put an nn.Linear behind",
            module=path,
        )
    return TorchStack(old)
