"""Layers whose effects are visible: statistics and randomness go in and out as tensors, never behind the scenes.

``torch.nn.BatchNorm2d`` changes its buffers in place and counts batches in an integer; ``torch.nn.Dropout`` draws
from a global generator. Both break a graph that must give the same outputs on three engines, so models here use
these two instead, and :func:`visible` puts them into anybody's module.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.wire.errors import ModelError

BnMode = Literal["global", "static"]


class BatchNorm(nn.Module):
    """Batch normalisation over every dimension but the channel (dim 1), in both modes of spec 2.7.

    ``global``: training normalises with batch statistics and *rebinds* ``running_mean`` / ``running_var`` to
    ``keep * old + (1 - keep) * batch`` (unbiased variance, as torch), so that ``torch.func.functional_call`` hands
    the new values back; inference uses them. ``static``: there are no moving statistics, every pass normalises
    with those of its own batch (EmbracingFL section 4.5, after HeteroFL).

    ``frozen``: training too uses the moving statistics and leaves them as they are, whatever mode the module is
    in, as people do who call ``bn.eval()`` before they fine-tune; of no effect in ``static``.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        channels: int,
        *,
        mode: BnMode = "global",
        keep: float = 0.9,
        eps: float = 1e-5,
        affine: bool = True,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        if mode not in ("global", "static"):
            raise ModelError(f"batch norm mode must be 'global' or 'static', found {mode!r}", mode=mode)
        self.channels, self.mode, self.keep, self.eps = channels, mode, keep, eps
        self.frozen = frozen
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        if mode == "global":
            self.register_buffer("running_mean", torch.zeros(channels))
            self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "global" and (self.frozen or not self.training):
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        out, mean, inverse_std = torch.native_batch_norm(
            x, self.weight, self.bias, None, None, True, 0.0, self.eps
        )
        if self.mode == "global":
            self._move(mean.detach(), inverse_std.detach(), x.numel() // x.shape[1])
        return out

    def _move(self, mean: Tensor, inverse_std: Tensor, count: int) -> None:
        # The kernel has the variance already; recovering it from 1/std saves a second pass over the batch.
        biased = (inverse_std.pow(-2) - self.eps).clamp_min(0.0)
        unbiased = biased * (count / max(count - 1, 1))
        self.running_mean = self.running_mean * self.keep + mean * (1 - self.keep)
        self.running_var = self.running_var * self.keep + unbiased * (1 - self.keep)

    def extra_repr(self) -> str:
        frozen = ", frozen=True" if self.frozen else ""
        return f"{self.channels}, mode={self.mode!r}, keep={self.keep}, eps={self.eps}{frozen}"


class Dropout(nn.Module):
    """Dropout whose randomness is an input: training keeps the entries with ``uniform >= rate``, scaled by 1/(1-rate).

    ``uniform`` is a non-persistent buffer that a program replaces through ``functional_call`` by its
    ``noise.<path>.uniform`` port, uniform in [0, 1) and shaped like the layer's input. Without a replacement
    (plain torch training) it is drawn from torch's generator. Inference is the identity.
    """

    uniform: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise ModelError(f"a dropout rate lies in [0, 1), found {rate}", rate=rate)
        self.rate = rate
        self.register_buffer("uniform", torch.empty(0), persistent=False)

    @property
    def p(self) -> float:
        """The rate under the name of ``torch.nn.Dropout``, which other people's code reads."""
        return self.rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        uniform = self.uniform if self.uniform.numel() else torch.rand_like(x)
        return torch.where(uniform >= self.rate, x / (1 - self.rate), torch.zeros_like(x))

    def extra_repr(self) -> str:
        return f"{self.rate}"


def visible(module: nn.Module) -> nn.Module:
    """A deep copy of ``module`` that computes the same, with batch norm and dropout replaced by the layers above.

    LSTM and GRU become :class:`edgefl.models.layers.recurrent.TorchStack`, whose graph does not grow with the sequence.
    A batch norm in inference mode inside a module in training mode stays frozen. A layer without state that is a
    submodule under several names, such as one ReLU for all, becomes one of its own under each.

    Integer buffers (position ids, counters) become constants, because only floats are averaged. Raises ModelError
    for tied parameters (two names would be trained apart), cumulative batch-norm averages, kinds of dropout
    other than ``nn.Dropout``, those of attention and ``nn.RNN`` included, and LSTMs with projections.
    """
    module = _Replacing(module.training).replaced("", copy.deepcopy(module))
    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            raise ModelError(
                f"parameters {seen[id(parameter)]!r} and {name!r} are one tensor; tied weights cannot be trained "
                "as separate named tensors, give each its own",
                names=(seen[id(parameter)], name),
            )
        seen[id(parameter)] = name
    for part in module.modules():
        integers = {
            name for name, buffer in part._buffers.items() if buffer is not None and _discrete(buffer)
        }
        part._non_persistent_buffers_set |= integers
    return module


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
        _check_noise(path, module)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return _batch_norm(path, module, frozen=self._training and not module.training)
        if type(module) is nn.Dropout:
            return Dropout(module.p).train(module.training)
        if isinstance(module, nn.LSTM | nn.GRU):
            return _recurrent(path, module)
        for name, child in list(module._modules.items()):
            if child is not None:
                replacement = self.replaced(f"{path}.{name}" if path else name, child)
                if replacement is not child:
                    setattr(module, name, replacement)
        return module


def _check_noise(path: str, module: nn.Module) -> None:
    """ModelError for a layer of torch's that draws random numbers inside and has no counterpart here."""
    problem = ""
    if isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
        problem = "drops attention weights by a hidden generator; give it dropout=0.0"
    elif isinstance(module, nn.RNN) and module.dropout > 0 and module.num_layers > 1:
        problem = (
            "drops between its layers by a hidden generator; give it dropout=0.0, use nn.GRU or nn.LSTM, or write "
            "one nn.RNN for each layer with nn.Dropout between them"
        )
    elif (
        isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout and module.p > 0
    ):
        problem = "draws from a hidden generator; use nn.Dropout, whose randomness can be made an input"
    if problem:
        raise ModelError(f"{type(module).__name__} {path!r} {problem}", module=path)


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
    from edgefl.models.layers.recurrent import TorchStack  # which has dropout layers of this file in it

    if old.proj_size:
        raise ModelError(
            f"{type(old).__name__} {path!r} has proj_size={old.proj_size}, which has no step-by-step form here; leave "
            "it out and put an nn.Linear behind",
            module=path,
        )
    return TorchStack(old)
