"""SVCCA: how similar two models' layers are, from what they give for the same inputs (embracingfl.md 2.10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from edgefl.models.exits import channel_dim
from edgefl.models.spec import ModelSpec, skeleton
from edgefl.wire.errors import ModelError

KEEP = 4
"""Directions that are compared; more take longer and do not change the picture (the paper)."""


def svcca(a: Tensor, b: Tensor, keep: int = KEEP) -> float:
    """Mean canonical correlation of the ``keep`` strongest directions of two layers, in [0, 1].

    ``a`` and ``b`` are matrices (channels, columns), or activations (N, ...) of more dimensions as :func:`matrix` reads
    them, of the same inputs in the same order; they may differ in channels. Rows are centred, ``A = U S V^T``; with
    the first ``keep`` rows of V^T, ``rho`` = singular values of ``V_A^T V_B`` and the result is their mean.
    Directions without variance are left out; two layers without any are equal (1), one alone is like nothing (0).
    ModelError for inputs that do not match.
    """
    return similarity(directions(matrix(a), keep), directions(matrix(b), keep))


def matrix(activations: Tensor) -> Tensor:
    """(channels, columns) of a layer's output: (N, C, H, W) -> (C, N*H*W), tokens (N, T, C) -> (C, N*T).

    A matrix is taken for what it should be; transpose (N, C) yourself, as :func:`similarities` does.
    """
    if activations.dim() < 2:
        raise ModelError(
            f"svcca compares matrices (channels, columns) or activations (N, ...), found {tuple(activations.shape)}",
            found=tuple(activations.shape),
        )
    if activations.dim() == 2:
        return activations
    channels = 1 + channel_dim(activations.shape[1:])
    return activations.movedim(channels, 0).flatten(1)


def directions(rows: Tensor, keep: int = KEEP) -> Tensor:
    """(k, columns) float64, k <= ``keep``: the strongest right singular vectors of the centred matrix, orthonormal."""
    if keep < 1:
        raise ModelError(f"svcca keeps 1 direction or more, found {keep}", keep=keep)
    if not bool(torch.isfinite(rows).all()):
        raise ModelError("svcca met activations that are NaN or infinite: the model has diverged")
    exact = rows.to(torch.float64)
    centred = exact - exact.mean(dim=1, keepdim=True)
    _, values, vectors = torch.linalg.svd(centred, full_matrices=False)
    # What centring leaves of a constant is rounding; float32 activations have about seven digits.
    floor = max(rows.shape) * torch.finfo(rows.dtype).eps * float(exact.abs().amax())
    strongest: Tensor = vectors[: min(keep, int((values > floor).sum()))]
    return strongest


def similarity(a: Tensor, b: Tensor) -> float:
    """Mean correlation of two layers' :func:`directions`."""
    if a.shape[1] != b.shape[1]:
        raise ModelError(
            f"svcca compares layers on the same inputs, found {a.shape[1]} and {b.shape[1]} columns",
            columns=(a.shape[1], b.shape[1]),
        )
    if not len(a) or not len(b):
        return float(len(a) == len(b))
    return float(torch.linalg.svdvals(a @ b.T).clamp(0.0, 1.0).mean())


@dataclass(frozen=True)
class Similarity:
    """SVCCA over all pairs of models at one layer; ``largest`` is what the paper plots."""

    mean: float
    largest: float


def similarities(
    spec: ModelSpec,
    models: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Tensor],
    layers: Sequence[str] = (),
    keep: int = KEEP,
) -> dict[str, Similarity]:
    """Per layer, SVCCA between every two of ``models`` (weights by global name, at least two), mean over ``batches``.

    ``layers`` are paths of submodules, by default the model's units. Everything runs in inference mode: batch norm
    uses each model's own moving statistics. A layer is what it gives: (N, C) is C channels.
    """
    if len(models) < 2 or not batches:
        raise ModelError(
            f"similarity takes two models and a batch or more, found {len(models)} and {len(batches)}",
            models=len(models),
            batches=len(batches),
        )
    probed = tuple(layers) or spec.units
    pairs = list(combinations(range(len(models)), 2))
    sums = {layer: torch.zeros(len(pairs), dtype=torch.float64) for layer in probed}
    probe = _Probe(spec, probed)
    for x in batches:
        by_model = [probe.directions(weights, x, keep) for weights in models]
        for layer in probed:
            values = [similarity(by_model[i][layer], by_model[j][layer]) for i, j in pairs]
            sums[layer] += torch.tensor(values, dtype=torch.float64)
    means = {layer: total / len(batches) for layer, total in sums.items()}
    return {layer: Similarity(float(mean.mean()), float(mean.max())) for layer, mean in means.items()}


class _Probe:
    """A model without values that notes what some of its submodules give."""

    def __init__(self, spec: ModelSpec, layers: tuple[str, ...]) -> None:
        self._module = skeleton(spec.module, training=False)
        self._outputs: dict[str, Tensor] = {}
        known = dict(self._module.named_modules())
        for layer in layers:
            if not layer or layer not in known:
                raise ModelError(
                    f"{spec.name} has no submodule {layer!r} to look at; its units are {', '.join(spec.units)}",
                    layer=layer,
                )
            known[layer].register_forward_hook(self._noting(layer))

    @torch.no_grad()
    def directions(self, weights: Mapping[str, Tensor], x: Tensor, keep: int) -> dict[str, Tensor]:
        torch.func.functional_call(self._module, dict(weights), (x,))
        return {layer: directions(_by_channel(out), keep) for layer, out in self._outputs.items()}

    def _noting(self, layer: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _args: object, out: object) -> None:
            if not isinstance(out, Tensor):
                raise ModelError(
                    f"{layer!r} gives {type(out).__name__}, no tensor; look at a submodule of it, or at its unit",
                    layer=layer,
                )
            self._outputs[layer] = out

        return hook


def _by_channel(out: Tensor) -> Tensor:
    return out.T if out.dim() == 2 else matrix(out)
