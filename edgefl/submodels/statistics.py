"""Statistics of norm layers, estimated in one pass after training (HeteroFL; fiarse.md 2.9, A11).

Every submodel size needs its own statistics, because the input of a layer depends on the channels in front of it. A static
batch norm has none in training. Moving statistics describe the sizes that were trained: a cut needs new ones. So does the
whole model if narrow or masked submodels moved them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from edgefl.contract.tensors import Tensors
from edgefl.errors import DataError
from edgefl.models.copies import copy_module
from edgefl.models.inputs import call_with_inputs
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.modes import is_inference, set_mode
from edgefl.models.torch_functions.rules import NormCall

Norm = BatchNorm | nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class NormStatistics:
    """Sums of batch statistics, by the name of the buffer (float64), over ``passes`` batches each.

    Variances are unbiased. The sum of several clients' statistics is the statistics of all their batches, so no data
    leave a device::

        freeze(module, sum(collect(module, batches) for batches in clients))

    Attributes:
        passes: Number of batches, by the name of the buffer.
        sums: Sum of the statistic over these batches, by the name of the buffer.
    """

    passes: Mapping[str, int]
    sums: Mapping[str, Tensor]

    def __add__(self, other: NormStatistics) -> NormStatistics:
        passes, sums = dict(self.passes), dict(self.sums)
        for name, total in other.sums.items():
            passes[name] = passes.get(name, 0) + other.passes[name]
            sums[name] = sums[name] + total if name in sums else total
        return NormStatistics(passes, sums)

    def __radd__(self, zero: int) -> NormStatistics:
        """Return self, so that ``sum`` can begin with 0."""
        return self

    @property
    def averages(self) -> Tensors:
        """Mean of each statistic over its batches, float32, by buffer name: torch's batch norm with ``momentum=None``."""
        return {name: (total / self.passes[name]).to(torch.float32) for name, total in self.sums.items()}


class StatisticsMode(TorchFunctionMode):
    """Torch function mode in which norm layers normalize by their batch.

    :attr:`total` adds up the statistics of each batch. A norm layer is recognized by its call of one of torch's
    functions for norms, whatever module makes the call.

    Args:
        moving: Buffers that the layers pass to these functions, by name. They must be the same tensors, not
            copies.
    """

    def __init__(self, moving: Tensors) -> None:
        super().__init__()
        self._moving = moving  # holds the tensors, so that no other one gets the id of any
        self._names = {id(tensor): name for name, tensor in moving.items()}
        self.total = NormStatistics({}, {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = NormCall.of(func, args, kwargs or {})
        if call is None or call.training or not self._covers(call):
            return func(*args, **kwargs or {})
        names = (self._names[id(call.running_mean)], self._names[id(call.running_var)])
        found = dict(zip(names, call.statistics(torch.float64), strict=True))
        self.total += NormStatistics(dict.fromkeys(found, 1), found)
        return call.result(call.normalize())

    def _covers(self, call: NormCall) -> bool:
        return id(call.running_mean) in self._names and id(call.running_var) in self._names


class MomentsMode(TorchFunctionMode):
    """Torch function mode in which norm layers normalize by the rows of a batch that count, and sum up their moments.

    A graph can be traced from it, in contrast to :class:`StatisticsMode`. Rows that only fill up a batch are left out.

    Args:
        moving: Statistics that the layers pass to torch's functions for norms, by name. They must be the same tensors,
            not copies; their values are not read.
        mask: Above 0 for each row that counts, (B,).

    Attributes:
        variances: Name of the mean that belongs to each variance, by name of the variance.
    """

    def __init__(self, moving: Tensors, mask: Tensor) -> None:
        super().__init__()
        self._moving = moving  # holds the tensors, so that no other one gets the id of any
        self._names = {id(tensor): name for name, tensor in moving.items()}
        counts = (mask > 0).to(mask.dtype)
        self._share = (counts / counts.sum().clamp(min=1.0)).reshape(-1, 1)
        self._rows = counts.sum().double()
        self.variances: dict[str, str] = {}
        self._sums: dict[str, list[Tensor]] = {}

    @property
    def sums(self) -> Tensors:
        """Sums over the rows that count, per channel, float64, by name of the statistic.

        For a mean: the sum of the rows' means. For a variance: the sum of the rows' mean squares. A layer that ran several
        times has the means over its calls.
        """
        return {name: torch.stack(found).mean(0) for name, found in self._sums.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = NormCall.of(func, args, kwargs or {})
        if (
            call is None
            or call.training
            or not {id(call.running_mean), id(call.running_var)} <= self._names.keys()
        ):
            return func(*args, **kwargs or {})
        mean, var = self._moments(call)
        square = var.double() + mean.double().square()
        mean_name, variance_name = self._names[id(call.running_mean)], self._names[id(call.running_var)]
        self.variances[variance_name] = mean_name
        self._sums.setdefault(mean_name, []).append(mean.double() * self._rows)
        self._sums.setdefault(variance_name, []).append(square * self._rows)
        if call.kind == "instance":  # normalizes each row by itself
            return call.result(call.normalize())
        out = F.batch_norm(call.input, mean, var, call.weight, call.bias, False, 0.0, call.eps)
        return out if call.kind == "batch" else (out, mean, (var + call.eps).rsqrt())

    def _moments(self, call: NormCall) -> tuple[Tensor, Tensor]:
        """Return (mean, biased variance) per channel over the rows that count.

        For an instance norm they are the means over these rows of each row's mean and variance.
        """
        rows = call.input.reshape(len(call.input), call.input.shape[1], -1)
        means = rows.mean(2)
        mean = (self._share * means).sum(0)
        around = means.unsqueeze(2) if call.kind == "instance" else mean.reshape(1, -1, 1)
        return mean, (self._share * (rows - around).square().mean(2)).sum(0)


def is_norm(part: nn.Module) -> TypeGuard[Norm]:
    """Return True if ``part`` is a batch norm, torch's or this package's. Other norms return False."""
    return isinstance(part, BatchNorm | nn.modules.batchnorm._BatchNorm)


def norms(module: nn.Module, *, moving: bool = False) -> dict[str, Norm]:
    """Return the batch norms of ``module`` that have no statistics of their own ("static"), by path.

    Args:
        module: Model.
        moving: True: also return those with moving statistics, except norms that stay in inference mode. Training
            does not change the latter.
    """
    return {
        path: part
        for path, part in module.named_modules()
        if is_norm(part) and (_is_static(part) or (moving and not is_inference(part)))
    }


def moving_buffers(module: nn.Module) -> Tensors:
    """Return the float buffers in the state of ``module``, by name, such as moving statistics.

    Layers that stay in inference mode are left out, because training does not change their buffers.
    """
    state = module.state_dict(keep_vars=True).keys()
    found: Tensors = {}
    for path, part in module.named_modules():
        own = {} if is_inference(part) else part._buffers
        named = {f"{path}.{name}" if path else name: buffer for name, buffer in own.items()}
        found |= {
            name: buffer
            for name, buffer in named.items()
            if buffer is not None and name in state and buffer.is_floating_point()
        }
    return found


def use_batch(module: nn.Sequential) -> nn.Sequential:
    """Return a copy of ``module`` whose batch norms normalize by the statistics of each batch.

    Moving statistics are removed, except those of norms that are in inference mode even during training: these use them.
    """
    made = copy_module(module)
    for norm in norms(made, moving=True).values():
        _set_statistics(norm, None, None)
    return made


def with_buffers(module: nn.Sequential, but: Collection[str] = ()) -> nn.Sequential:
    """Return a copy of ``module`` in which batch norms without moving statistics get buffers for them, with mean 0 and
    variance 1.

    Norms whose statistics would have names in ``but`` get none.
    """
    made = copy_module(module)
    for path, norm in norms(made).items():
        if f"{path}.running_mean" in but:
            continue
        channels = norm.channels if isinstance(norm, BatchNorm) else norm.num_features
        _set_statistics(norm, torch.zeros(channels), torch.ones(channels))
    return made


def estimable(module: nn.Sequential, *, moving: bool) -> tuple[str, ...]:
    """Return the names of the buffers that :func:`collect` estimates. They exist in ``with_buffers(module)``.

    Args:
        module: Model.
        moving: True: include moving statistics. False: only those that static batch norms lack.
    """
    own = moving_buffers(module)
    return tuple(name for name in moving_buffers(with_buffers(module)) if moving or name not in own)


@torch.no_grad()
def collect(module: nn.Sequential, batches: Iterable[Tensors], *, moving: bool = False) -> NormStatistics:
    """Run a copy of ``module`` once over ``batches`` and return the statistics of its norm layers.

    Each layer normalizes by its batch, as in training, and all batches have the same weight, as in torch's batch norm with
    ``momentum=None``. So make the batches of about equal size. Dropout is off, and ``module`` does not change.

    Args:
        module: Model.
        batches: Inputs by name, the first as ``x``.
        moving: True: estimate moving statistics, too (see :func:`estimable`).

    Raises:
        DataError: There is no batch.
    """
    made = with_buffers(module).eval()
    buffers = moving_buffers(made)
    recording, empty = (
        StatisticsMode({name: buffers[name] for name in estimable(module, moving=moving)}),
        True,
    )
    for batch in batches:
        with recording:
            call_with_inputs(made, batch)
        empty = False
    if empty:
        raise DataError(
            "expected at least one row of data to estimate the statistics of batch norm, found none; add test_x and test_y "
            "to the data (32 rows are enough, labels are not read), or keep the moving statistics of training by `bn_eval` "
            "moving (`bn_eval`), which costs accuracy: they describe the trained sizes, not this cut"
        )
    return recording.total


@torch.no_grad()
def unknown_statistics(module: nn.Sequential, batch: Tensors) -> tuple[str, ...]:
    """Return the names of the buffers that training on ``batch`` changes and :func:`collect` does not estimate.

    Buffers of torch's own layers are left out: besides batch norm, only spectral norm changes some, and they describe
    weights. ``batch`` needs at least two rows.
    """
    trained = copy_module(module)
    set_mode(trained, training=True)
    before = {name: buffer.clone() for name, buffer in moving_buffers(trained).items()}
    with torch.random.fork_rng(devices=[]):  # dropout draws
        call_with_inputs(trained, batch)
    after = moving_buffers(trained)
    covered = collect(module, [batch], moving=True).sums
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    owners = {name: type(module.get_submodule(name.rpartition(".")[0])).__module__ for name in moved}
    return tuple(name for name in moved if name not in covered and not owners[name].startswith("torch."))


def freeze(module: nn.Sequential, statistics: NormStatistics) -> nn.Sequential:
    """Return a copy of ``module`` whose batch norms use the averages of ``statistics``, whatever batch they read.

    Moving statistics without an entry keep their values.

    Raises:
        DataError: A static batch norm has no entry in ``statistics``.
    """
    averages = statistics.averages
    for path in norms(module):
        if f"{path}.running_mean" not in averages:
            raise DataError(
                f"there are no statistics for batch norm {path!r}; collect them with this very model",
                norm=path,
            )
    made = with_buffers(module)
    buffers = moving_buffers(made)
    for name in averages.keys() & buffers.keys():
        buffers[name].data.copy_(averages[name])
    return made


def _is_static(norm: Norm) -> bool:
    return getattr(norm, "running_mean", None) is None


def _set_statistics(norm: Norm, mean: Tensor | None, var: Tensor | None) -> None:
    norm.register_buffer("running_mean", mean)
    norm.register_buffer("running_var", var)
    if isinstance(norm, BatchNorm):
        norm.mode = "static" if mean is None else "global"
    else:
        norm.track_running_stats = mean is not None
