"""Worker that trains with JAX: one ``jax.jit`` of loss, gradients, statistics and update, the usual code in JAX.

``PYTHON -m benchmarks.train_step.jax_training FOLDER THREADS``, where PYTHON belongs to an environment that has JAX; the
folder is written by :mod:`benchmarks.train_step.jax_graph`. Images and kernels lie as JAX's users have them, channels
innermost (B, H, W, C), which is the faster layout of XLA on processors.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.repetition import serve

Array = Any
"""Array of JAX, which is not installed in our environment."""
Arrays = dict[str, Array]
_NHWC = (0, 3, 1, 2)
"""Positions of the axes (B, C, H, W) in (B, H, W, C)."""


def conv2d(input: Array, weight: Array, bias: Array | None, **how: Any) -> Array:
    from jax import lax

    out = lax.conv_general_dilated(
        input,
        weight,
        how["stride"],
        [(each, each) for each in how["padding"]],
        rhs_dilation=how["dilation"],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=how["groups"],
    )
    return out if bias is None else out + bias


def max_pool2d(self: Array, kernel_size: list[int], **how: Any) -> Array:
    from jax import lax

    if how["ceil_mode"] or set(how["dilation"]) != {1}:
        raise NotImplementedError("max_pool2d with ceil_mode or dilation")
    padding = [(each, each) for each in how["padding"] * (2 // len(how["padding"]))]
    sides, strides = ((1, *each, 1) for each in (kernel_size, how["stride"] or kernel_size))
    return lax.reduce_window(self, -np.inf, lax.max, sides, strides, [(0, 0), *padding, (0, 0)])


def linear(input: Array, weight: Array, bias: Array | None) -> Array:
    out = input @ weight.T
    return out if bias is None else out + bias


def mean(self: Array, dim: list[int], keepdim: bool, dtype: None) -> Array:
    axes = tuple(_NHWC[axis] for axis in dim) if self.ndim == 4 else tuple(dim)
    return self.mean(axes, keepdims=keepdim)


def flatten(self: Array, start_dim: int, end_dim: int) -> Array:
    """Flatten in the order (B, C, H, W), which the next weights expect."""
    ordered = self.transpose(0, 3, 1, 2) if self.ndim == 4 else self
    start, end = (each % self.ndim for each in (start_dim, end_dim))
    return ordered.reshape(*ordered.shape[:start], -1, *ordered.shape[end + 1 :])


def add(self: Array, other: Array, alpha: float) -> Array:
    return self + alpha * other


def relu(self: Array) -> Array:
    from jax import nn

    return nn.relu(self)


def relu6(self: Array) -> Array:
    from jax import nn

    return nn.relu6(self)


def batch_norm(call: Mapping[str, Any], values: Arrays) -> tuple[Array, Arrays]:
    """Return the output and the new statistics by name. The running variance is the unbiased one, as in torch."""
    from jax import lax

    arguments, read = call["arguments"], _resolved(call["arguments"], values)
    x, weight, bias, eps = (read[name] for name in ("input", "weight", "bias", "eps"))
    if not read["training"]:
        raise NotImplementedError("batch norm that does not train")
    axes = tuple(range(x.ndim - 1)) if x.ndim == 4 else (0,)
    average, variance = x.mean(axes), x.var(axes)
    out = (x - average) * (lax.rsqrt(variance + eps) * (1 if weight is None else weight))
    out = out if bias is None else out + bias
    if read["running_mean"] is None:
        return out, {}
    count, share = x.size // x.shape[-1], read["momentum"]
    kept = {"running_mean": average, "running_var": variance * (count / (count - 1))}
    return out, {arguments[k]["tensor"]: (1 - share) * read[k] + share * new for k, new in kept.items()}


OPS: Mapping[str, Callable[..., Array]] = {
    "conv2d.default": conv2d,
    "linear.default": linear,
    "max_pool2d.default": max_pool2d,
    "mean.dim": mean,
    "add.Tensor": add,
    "relu.default": relu,
    "relu6.default": relu6,
    "flatten.using_ints": flatten,
}


def _resolved(arguments: Mapping[str, Any], values: Mapping[str, Array]) -> dict[str, Any]:
    return {
        name: values[value["tensor"]] if isinstance(value, dict) else value
        for name, value in arguments.items()
    }


def forward(graph: Mapping[str, Any], weights: Mapping[str, Array], x: Array) -> tuple[Array, Arrays]:
    """Return the model's output, and the statistics of its batch norms after it."""
    values: Arrays = {**weights, "x": x}
    statistics: Arrays = {}
    for call in graph["calls"]:
        if call["op"] == "batch_norm.default":
            values[call["name"]], new = batch_norm(call, values)
            statistics |= new
        else:
            values[call["name"]] = OPS[call["op"]](**_resolved(call["arguments"], values))
    return values[graph["output"]], statistics


def load(folder: Path) -> Callable[[], object]:
    """Return a step that trains on the next batch; the first one compiles."""
    import jax
    import jax.numpy as jnp

    graph = json.loads((folder / "forward.json").read_text())
    sgd = json.loads((folder / "job.json").read_text())["sgd"]
    with np.load(folder / "forward.npz") as file:
        values = {name: jnp.asarray(placed(file[name], (2, 3, 1, 0))) for name in file.files}
    trained = {name: values.pop(name) for name in graph["trained"]}
    files = [np.load(path) for path in sorted(folder.glob("batch*.npz"))]
    data = cycle(
        [
            (jnp.asarray(placed(file["batch.0.x"], (0, 2, 3, 1))), jnp.asarray(file["batch.0.y"]))
            for file in files
        ]
    )

    def loss(trained: Arrays, others: Arrays, x: Array, y: Array) -> tuple[Array, Arrays]:
        out, statistics = forward(graph, {**others, **trained}, x)
        return -jnp.take_along_axis(jax.nn.log_softmax(out), y[:, None], axis=1).mean(), statistics

    def update(trained: Arrays, momentum: Arrays, others: Arrays, x: Array, y: Array) -> tuple[Array, ...]:
        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(trained, others, x, y)
        decay = {name: sgd["weight_decay"] if each.ndim >= 2 else 0.0 for name, each in trained.items()}
        momentum = {
            name: sgd["momentum"] * momentum[name] + gradients[name] + decay[name] * each
            for name, each in trained.items()
        }
        trained = {name: each - sgd["lr"] * momentum[name] for name, each in trained.items()}
        return value, trained, momentum, {**others, **statistics}

    jitted = jax.jit(update, donate_argnums=(0, 1, 2))
    state = (trained, {name: jnp.zeros_like(each) for name, each in trained.items()}, values)

    def step() -> float:
        nonlocal state
        value, *new = jax.block_until_ready(jitted(*state, *next(data)))
        state = (new[0], new[1], new[2])
        return float(value)

    return step


def placed(array: np.ndarray[Any, Any], axes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return images or kernels with their axes in the order ``axes``, and other arrays unchanged."""
    return np.ascontiguousarray(array.transpose(axes)) if array.ndim == 4 else array


def environment(threads: int) -> dict[str, str]:
    """Return XLA's variables: its thread pool has NPROC threads, or none for one thread."""
    alone = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if threads == 1 else {}
    return {"JAX_PLATFORMS": "cpu", "NPROC": str(threads), **alone}


if __name__ == "__main__":
    os.environ |= environment(int(sys.argv[2]))
    import jax  # noqa: F401 - idle is measured with the libraries imported

    serve(lambda: load(Path(sys.argv[1])))
