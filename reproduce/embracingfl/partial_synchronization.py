"""Clients that average a part of their models every few steps: which part keeps them alike? (embracingfl.md 2.10)

A scheme is no more than regions of the model's tensors, so width slices and layers are the same to the loop::

    regions = synchronised(spec, "second_half")
    for found in partial_sync(spec, clients, held_out, regions, rounds=100, layers=("block1.conv2", "block9.conv2")):
        print(found.step, found.layers["block9.conv2"].largest)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, role_of
from edgefl.errors import ModelError
from edgefl.models.exits import channel_dim
from edgefl.models.spec import ModelSpec, skeleton
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.width.submodel import Width
from edgefl.wire.regions import Region, extract
from tests.support.reference import Feed, partial_average, run_round

# SVCCA: how similar two models' layers are, from what they give for the same inputs (embracingfl.md 2.10).

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
    probe = _LayerProbe(spec, probed)
    for x in batches:
        by_model = [probe.directions(weights, x) for weights in models]
        for layer in probed:
            values = [similarity(by_model[i][layer], by_model[j][layer]) for i, j in pairs]
            sums[layer] += torch.tensor(values, dtype=torch.float64)
    means = {layer: total / len(batches) for layer, total in sums.items()}
    return {layer: Similarity(float(mean.mean()), float(mean.max())) for layer, mean in means.items()}


class _LayerProbe:
    """Model without values that records the outputs of some submodules."""

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
    def directions(self, weights: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        torch.func.functional_call(self._module, dict(weights), (x,))
        return {layer: directions(_by_channel(out)) for layer, out in self._outputs.items()}

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


Scheme = Literal["none", "second_half", "first_half", "channel"]
Samples = tuple[Tensor, Tensor]
"""A client's rows and labels."""


def synchronised(spec: ModelSpec, scheme: Scheme, *, cut: int | None = None) -> dict[str, Region]:
    """The part of each global tensor that clients average; a tensor that is not named stays local.

    ``second_half``: the units behind ``cut`` (EmbracingFL). ``first_half``: those before it (InclusiveFL-like).
    ``channel``: the leading half of the channels of every layer (HeteroFL- and FjORD-like). ``none``: nothing. Moving
    statistics go with their unit or channel. ``cut`` is a number of units, by default :func:`half_cut`.
    """
    if scheme not in get_args(Scheme):
        raise ModelError(f"a scheme is one of {', '.join(get_args(Scheme))}; found {scheme!r}", scheme=scheme)
    if scheme == "channel":
        return dict(Width(spec, 0.5, "floor").regions())
    if scheme == "none":
        return {}
    place = half_cut(spec) if cut is None else cut
    if not 0 < place < len(spec.units):
        raise ModelError(
            f"a cut into halves lies in 1..{len(spec.units) - 1} units of {spec.name}, found {place}",
            cut=place,
        )
    units = spec.units[:place] if scheme == "first_half" else spec.units[place:]
    return {name: None for name in spec.weights if name.partition(".")[0] in units}


def half_cut(spec: ModelSpec) -> int:
    """Units before the cut that halves the kernels best, the earlier of two (embracingfl.md 2.10).

    It lies behind block 4 in ResNet-20.
    """
    kernels = [
        sum(parameter.dim() >= 2 for parameter in unit.parameters())
        for _, unit in spec.module.named_children()
    ]
    return min(range(1, len(kernels)), key=lambda cut: abs(2 * sum(kernels[:cut]) - sum(kernels)), default=0)


@dataclass(frozen=True)
class Measurement:
    """Similarity of the clients' models after ``step`` local steps, right after an average."""

    step: int
    layers: Mapping[str, Similarity]


def partial_sync(
    spec: ModelSpec,
    clients: Sequence[Samples],
    held_out: Sequence[Tensor],
    regions: Mapping[str, Region],
    *,
    rounds: int = 100,
    every: int = 10,
    batch: int = 32,
    lr: float = 0.1,
    layers: Sequence[str] = (),
    seed: int = 0,
) -> Iterator[Measurement]:
    """PARTIAL_SYNC_STUDY: all clients begin with ``spec``'s weights; in each round every one takes ``every`` local steps
    on its own samples, then ``regions`` of all models become their uniform mean and the rest stays local.

    After each round SVCCA of every pair of clients at ``layers`` is measured on the batches ``held_out``
    (:func:`similarities`). Momentum starts anew in each round; a client with fewer samples
    than a batch draws with replacement. Equal seeds give equal results.
    """
    algorithm = sgd(Objective.of(OutputSide(spec, 0)), batch=batch, steps=every, lr=lr)
    models = [dict(spec.weights) for _ in clients]
    for number in range(1, rounds + 1):
        models = [
            _trained(algorithm, model, samples, batch, _generator(seed, number, client))
            for client, (model, samples) in enumerate(zip(models, clients, strict=True))
        ]
        models = averaged(models, regions)
        yield Measurement(number * every, similarities(spec, models, held_out, layers))


def averaged(models: Sequence[Mapping[str, Tensor]], regions: Mapping[str, Region]) -> list[Tensors]:
    """Every model with the uniform mean over all in ``regions``, and its own values elsewhere."""
    if not regions:
        return [dict(model) for model in models]
    mean = partial_average(models[0], [(regions, _held(model, regions)) for model in models])
    shared = _held(mean, regions)
    return [partial_average(model, [(regions, shared)]) for model in models]


def _held(model: Mapping[str, Tensor], regions: Mapping[str, Region]) -> Tensors:
    local = extract({name: tensor.numpy() for name, tensor in model.items()}, regions)
    return {name: torch.from_numpy(array) for name, array in local.items()}


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.default_rng(key).integers(1 << 63)))


def _trained(
    algorithm: Algorithm, model: Tensors, samples: Samples, batch: int, generator: torch.Generator
) -> Tensors:
    update = run_round(algorithm, model, _walk(samples, batch, generator)).update
    return {name: tensor.detach() for name, tensor in update.items()}


def _walk(samples: Samples, batch: int, generator: torch.Generator) -> Feed:
    """Batches in shuffled order, wrapping around; with replacement where a batch is more than there is."""
    x, y = samples
    order = torch.randperm(len(x), generator=generator)

    def feed(function: Function, step: int) -> Tensors:
        rows = (
            torch.randint(len(x), (batch,), generator=generator)
            if len(x) < batch
            else order[torch.arange(step * batch, (step + 1) * batch).remainder(len(x))]
        )
        noise = {
            name: torch.rand(spec.shape, generator=generator)
            for name, spec in function.inputs.items()
            if role_of(name) == "noise"
        }
        return {"batch.0.x": x[rows], "batch.0.y": y[rows], **noise}

    return feed
