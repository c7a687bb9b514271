"""Clients that average a part of their models every few steps, and SVCCA of their layers (embracingfl.md 2.10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import Tensors
from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.spec import ModelSpec
from edgefl.submodels.width.submodel import Width
from edgefl.wire.regions import BlockRegion, Region

KEEP = 4
"""Directions that are compared; more take longer and do not change the picture (the paper)."""
Scheme = Literal["none", "second_half", "first_half", "channel"]


def directions(activations: Tensor, keep: int = KEEP) -> Tensor:
    """Return the strongest right singular vectors of the centred matrix (channels, columns), float64 (k <= keep, columns).

    Activations of more than two dimensions are (N, C, ...), and become (C, N * ...).

    Raises:
        ModelError: an activation is NaN or infinite.
    """
    exact = (activations if activations.dim() == 2 else activations.movedim(1, 0).flatten(1)).double()
    if not bool(torch.isfinite(exact).all()):
        raise ModelError("expected finite activations, found NaN or infinity: the model has diverged")
    _, values, vectors = torch.linalg.svd(exact - exact.mean(dim=1, keepdim=True), full_matrices=False)
    # Centring leaves rounding of a constant; float32 activations have about seven digits.
    floor = max(exact.shape) * torch.finfo(activations.dtype).eps * float(exact.abs().amax())
    strongest: Tensor = vectors[: min(keep, int((values > floor).sum()))]
    return strongest


def similarity(a: Tensor, b: Tensor) -> float:
    """Return SVCCA, the mean canonical correlation in [0, 1] of two layers' :func:`directions` on the same inputs.

    Layers without variance are equal to each other, and one alone is like nothing.
    """
    if not len(a) or not len(b):
        return float(len(a) == len(b))
    return float(torch.linalg.svdvals(a @ b.T).clamp(0.0, 1.0).mean())


def similarities(
    spec: ModelSpec, models: Sequence[Mapping[str, Tensor]], x: Tensor, layers: Sequence[str]
) -> dict[str, list[float]]:
    """Return SVCCA of every pair of ``models`` (weights by global name) on the inputs ``x``, by path of a submodule."""
    module, outputs = copy_module(spec.module).eval(), dict[str, Tensor]()
    for layer in layers:
        hook = partial(lambda layer, _part, _args, out: outputs.update({layer: out}), layer)
        module.get_submodule(layer).register_forward_hook(hook)
    found = []
    for weights in models:
        with torch.no_grad():
            torch.func.functional_call(module, dict(weights), (x,))
        found.append({name: directions(out.T if out.dim() == 2 else out) for name, out in outputs.items()})
    return {name: [similarity(a[name], b[name]) for a, b in combinations(found, 2)] for name in layers}


def synchronised(spec: ModelSpec, scheme: Scheme) -> dict[str, Region]:
    """Return the part of each global tensor that clients average; other tensors stay local.

    ``second_half``: the units behind :func:`half_cut` (EmbracingFL). ``first_half``: those before it (as InclusiveFL).
    ``channel``: the leading half of the channels of every layer (as HeteroFL and FjORD). ``none``: nothing. Moving
    statistics go with their unit or channel.
    """
    if scheme == "channel":
        return dict(Width(spec, 0.5, "floor").regions())
    cut = half_cut(spec)
    units = {"none": (), "first_half": spec.units[:cut], "second_half": spec.units[cut:]}[scheme]
    return {name: None for name in spec.weights if name.partition(".")[0] in units}


def half_cut(spec: ModelSpec) -> int:
    """Return the number of units before the cut that halves the kernels best: in ResNet-20 it lies behind block 4."""
    kernels = [sum(each.dim() >= 2 for each in unit.parameters()) for unit in spec.module.children()]
    return min(range(1, len(kernels)), key=lambda cut: abs(2 * sum(kernels[:cut]) - sum(kernels)))


def partial_sync(
    spec: ModelSpec, clients: Sequence[tuple[Tensor, Tensor]], regions: Mapping[str, Region], *,
    rounds: int, every: int, batch: int, lr: float, seed: int = 0,
) -> Iterator[list[Tensors]]:  # fmt: skip
    """Yield all clients' models after each of ``rounds`` averages, ``every`` local steps apart (PARTIAL_SYNC_STUDY).

    ``clients`` are rows and labels. All begin with the weights of ``spec``. Momentum is 0.9 and starts anew in each round,
    weight decay 1e-4. Equal seeds give equal results.
    """
    module, models = copy_module(spec.module), [dict(spec.weights) for _ in clients]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        for at, (x, y) in enumerate(clients):
            module.load_state_dict(models[at])
            module.train()
            optimizer = torch.optim.SGD(module.parameters(), lr, momentum=0.9, weight_decay=1e-4)
            for _ in range(every):
                rows = torch.randint(len(x), (batch,), generator=generator)
                optimizer.zero_grad()
                F.cross_entropy(module(x[rows]), y[rows]).backward()
                optimizer.step()
            models[at] = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        models = averaged(models, regions)
        yield models


def averaged(models: Sequence[Mapping[str, Tensor]], regions: Mapping[str, Region]) -> list[Tensors]:
    """Return every model with the uniform mean over all in ``regions``, and its own values elsewhere."""
    result = [dict(model) for model in models]
    for name, region in regions.items():
        shape = tuple(models[0][name].shape)
        rows = torch.stack([model[name].flatten() for model in models])
        held = torch.from_numpy(region.positions(shape)) if isinstance(region, BlockRegion) else slice(None)
        rows[:, held] = rows[:, held].mean(dim=0)
        for model, row in zip(result, rows, strict=True):
            model[name] = row.reshape(shape)
    return result
