"""Worker that trains with ExecuTorch's own, experimental training export of the same model.

``python -m benchmarks.train_step.et_training FOLDER THREADS``. :func:`prepare` writes ``training.pte`` there: loss and
gradients, by ``_export_forward_backward``. A step is those alone, without an optimizer and without the moving statistics
of batch norm, which flatters it a little.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from benchmarks.repetition import serve
from benchmarks.torch_layers import to_torch_layers
from benchmarks.train_step.eager import read_batches
from edgefl.models.losses.as_torch import loss_as_torch

if TYPE_CHECKING:
    from executorch.extension.training import TrainingModule

    from edgefl.submodels.output_side.submodel import OutputSide

_PROGRAM = "training.pte"


class PlainBatchNorm(nn.Module):
    """Batch norm in training, in elementary ops: ExecuTorch has no kernel for torch's functional one."""

    def __init__(self, old: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = old.weight, old.bias, old.eps

    def forward(self, x: Tensor) -> Tensor:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = x - x.mean(axes, keepdim=True)
        out = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + self.eps)
        if self.weight is None:
            return out
        return out * self.weight.view(shape) + self.bias.view(shape)


class WithLoss(nn.Module):
    """Module from (x, y) to the mean loss, the form that the export expects."""

    def __init__(self, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.module(x), y)


def prepare(folder: Path, submodel: OutputSide) -> None:
    """Write the joint forward and backward pass with torch's own layers, for the first batch of ``folder``."""
    from executorch.exir import to_edge
    from torch.export import export
    from torch.export.experimental import _export_forward_backward

    module = WithLoss(elementary(to_torch_layers(submodel.suffix)), loss_as_torch(submodel.spec.loss))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joint = _export_forward_backward(export(module, read_batches(folder)[0], strict=False))
        program = to_edge(joint).to_executorch()
    (folder / _PROGRAM).write_bytes(program.buffer)


def elementary(module: nn.Module) -> nn.Module:
    """Return ``module`` with its batch norms replaced, except those in inference mode, which have kernels."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
        return PlainBatchNorm(module)
    for name, child in list(module.named_children()):
        setattr(module, name, elementary(child))
    return module


def opened(folder: Path) -> TrainingModule:
    """Load the program of ``folder`` into ExecuTorch's runtime."""
    from executorch.extension.training import _load_for_executorch_for_training

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _load_for_executorch_for_training(str(folder / _PROGRAM))


def load(folder: Path, threads: int) -> Callable[[], float]:
    """Return a step that computes loss and gradients of the next batch."""
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool

    _unsafe_reset_threadpool(threads)
    algorithm = opened(folder)
    data = cycle(read_batches(folder))

    def step() -> float:
        (loss,) = algorithm.forward_backward("forward", next(data))
        return float(cast(Tensor, loss))

    return step


if __name__ == "__main__":
    import executorch.extension.training  # noqa: F401 - idle is measured with the libraries imported

    torch.set_num_threads(int(sys.argv[2]))
    serve(lambda: load(Path(sys.argv[1]), int(sys.argv[2])))
