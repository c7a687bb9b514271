"""Depthwise convolutions of large kernels on small planes as one matrix per channel.

Runtimes run a depthwise convolution group by group, and a group of 8 x 8 values is over before it has begun. With P
input and Q output positions, y_c = x_c M_c, where M_c [P, Q] = sum_k w[c, k] B_k. B_k [P, Q] is 1 where kernel
position k leads from an input to an output position. So

* dL/dx_c = dL/dy_c M_c^T.
* dL/dw[c, k] = <B_k, x_c^T dL/dy_c>.

That is P * Q / K times the multiplications, in a few large products instead of many tiny ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Positions of input times output up to which products win, and the groups from which they do.
SMALL_PLANES = 64 * 64
MANY_GROUPS = 32
# Smaller kernels are faster on the blocked layout: with 3 x 3 as matrices MobileNet's step takes an eighth longer. Without
# them for 7 x 7 ConvNeXt's takes a seventh longer (AMD EPYC, one thread; docs/compiler-inside.md).
SMALL_KERNEL = 9


@dataclass(frozen=True)
class DepthwiseGeometry:
    """Geometry of a depthwise convolution: spatial sizes of input, output and kernel, and stride, padding and dilation."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def leads(self, dtype: torch.dtype) -> Tensor:
        """Return [K, P * Q]: 1 if kernel position k reads input p for output q, else 0; positions are flat over all
        axes.

        It is the outer product of the matrices of the axes, which the runtime folds.
        """
        rank = len(self.inputs)
        leads = torch.ones((1,) * (3 * rank), dtype=torch.bool)
        for axis in range(rank):
            shape = [1] * (3 * rank)
            shape[axis::rank] = self.kernel[axis], self.inputs[axis], self.outputs[axis]
            leads = leads & self._leads(axis).reshape(shape)
        return leads.reshape(math.prod(self.kernel), -1).to(dtype)

    def _leads(self, axis: int) -> Tensor:
        """Return [K, P, Q] for one axis: 1 if kernel position k reads input p for output q, else 0."""
        offsets = torch.arange(self.kernel[axis]).view(-1, 1, 1) * self.dilation[axis]
        starts = torch.arange(self.outputs[axis]) * self.stride[axis] - self.padding[axis]
        return offsets + starts == torch.arange(self.inputs[axis]).unsqueeze(1)


def fits(x: Tensor, w: Tensor, outputs: Sequence[int], groups: int) -> bool:
    """Return True for a depthwise convolution of a large kernel, one output per channel, on small planes."""
    depthwise = w.shape[1] == 1 and w.shape[0] == groups == x.shape[1] and groups >= MANY_GROUPS
    large = math.prod(w.shape[2:]) > SMALL_KERNEL
    return depthwise and large and math.prod(x.shape[2:]) * math.prod(outputs) <= SMALL_PLANES


def forward(x: Tensor, w: Tensor, planes: DepthwiseGeometry) -> Tensor:
    """Compute the depthwise convolution y [N, C, *outputs] of x [N, C, *inputs] and w [C, 1, *kernel]."""
    y = torch.bmm(_by_channel(x), _matrices(w, planes))
    return y.transpose(0, 1).reshape(*x.shape[:2], *planes.outputs)


def input_gradient(grad: Tensor, w: Tensor, planes: DepthwiseGeometry) -> Tensor:
    """Compute dL/dx [N, C, *inputs] for dL/dy [N, C, *outputs]."""
    dx = torch.bmm(_by_channel(grad), _matrices(w, planes).transpose(1, 2))
    return dx.transpose(0, 1).reshape(*grad.shape[:2], *planes.inputs)


def weight_gradient(grad: Tensor, x: Tensor, planes: DepthwiseGeometry) -> Tensor:
    """Compute dL/dw [C, 1, *kernel] for dL/dy [N, C, *outputs] and x [N, C, *inputs]."""
    products = torch.bmm(_by_channel(x).transpose(1, 2), _by_channel(grad))
    dw = products.flatten(1) @ planes.leads(grad.dtype).t()
    return dw.view(x.shape[1], 1, *planes.kernel)


def _by_channel(x: Tensor) -> Tensor:
    """Return [N, C, *S] as [C, N, S]."""
    return x.flatten(2).transpose(0, 1)


def _matrices(w: Tensor, planes: DepthwiseGeometry) -> Tensor:
    """Return the matrices [C, P, Q] that map the P inputs of each channel to its Q outputs."""
    sizes = math.prod(planes.inputs), math.prod(planes.outputs)
    return (w.flatten(1) @ planes.leads(w.dtype)).view(w.shape[0], *sizes)
