"""EmbracingFL's Figures 1 and 3: similarity of clients' layers, by the part of the model that they average.

The paper has curves only; cells are means of the second half of the measurements, each the largest SVCCA of all 28 pairs of
clients right after an average, on 64 test images. At scale cpu: ResNet-20 on 8x8 means of the
images, 8 clients, 200 local steps at rate 0.1. The paper: whole images, 128 clients (8,128 pairs), 1,000 local steps at 0.4;
its Figure 1 has FEMNIST and IMDB as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from edgefl.data import datasets
from edgefl.data.partition import dirichlet
from reproduce import entry
from reproduce.embracingfl.federations import pooled
from reproduce.embracingfl.measures import Scheme, partial_sync, similarities, synchronised
from reproduce.entry import Arm, ArmRun, Claim, Entry, Lead, Measurements, Results, Scale

# fmt: off
SCHEMES: dict[str, Scheme] = {
    "nothing": "none", "output-side half (EmbracingFL)": "second_half", "input-side half (InclusiveFL)": "first_half",
    "half of the channels (HeteroFL)": "channel",
}
NOTHING, OUTPUT, INPUT, CHANNELS = SCHEMES
LAYERS = {f"Conv {number}": f"block{number // 2}.conv2" for number in (3, 7, 11, 15, 19)}
"""Layers of ResNet-20 that are measured. Halves are cut behind Conv 9."""
SETTINGS: dict[Scale, dict[str, Any]] = {
    "smoke": {"pool": 8, "clients": 3, "rounds": 2, "every": 1, "batch": 4, "lr": 0.1},
    "cpu": {"pool": 4, "clients": 8, "rounds": 20, "every": 10, "batch": 32, "lr": 0.1},
    "paper": {"pool": 1, "clients": 128, "rounds": 100, "every": 10, "batch": 32, "lr": 0.4},
}
# fmt: on


def arms(scale: Scale) -> list[Arm]:
    """Return an arm for each scheme."""
    own = {name: {"scheme": scheme, **SETTINGS[scale]} for name, scheme in SCHEMES.items()}
    return [entry.Computed(name, partial(study, SCHEMES[name]), settings) for name, settings in own.items()]


def study(scheme: Scheme, run: ArmRun) -> Measurements:
    """Return the largest SVCCA over all pairs of clients after each average, by layer, and its means as figures."""
    own, data = dict(SETTINGS[run.scale]), datasets.load("cifar10_jpeg")
    spec = pooled(model="resnet20", pool=own.pop("pool"), seed=run.seed)
    parts = dirichlet(data.train_y, own.pop("clients"), alpha=0.1, seed=run.seed)
    batches = [data.train_batch(part) for part in parts]
    clients = [(torch.from_numpy(each["x"]), torch.from_numpy(each["y"])) for each in batches]
    held_out = np.random.default_rng(run.seed).permutation(len(data.test_y))[:64]
    x = torch.from_numpy(data.test_batch(held_out)["x"])
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in LAYERS}
    averages = partial_sync(spec, clients, synchronised(spec, scheme), seed=run.seed, **own)
    for number, models in enumerate(averages, 1):
        run.progress(f"average {number}")
        found = similarities(spec, models, x, [*LAYERS.values()])
        for name, layer in LAYERS.items():
            lines[name].append((float(number * own["every"]), max(found[layer])))
    figures = {name: float(np.mean([y for _, y in line[len(line) // 2 :]])) for name, line in lines.items()}
    return Measurements(figures, lines)


def _are_equal(results: Results) -> tuple[bool, str]:
    off = max(float(abs(results.of(INPUT, name) - 1).max()) for name in ("Conv 3", "Conv 7"))
    return off < 1e-4, f"at most {off:.1g} from 1"


# fmt: off
ENTRY = Entry(
    "embracingfl/figures1and3", "Figures 1 and 3: SVCCA of clients' layers", arms,
    grids=[entry.grid("averaged", list(LAYERS), dict.fromkeys(SCHEMES, [None] * 5), lambda row, name: (row, name), unit=1,
                      title=entry.OURS_JPEG)],
    claims=[
        Claim("nothing: Conv 3 is above Conv 19", Lead(NOTHING, NOTHING, "Conv 3", other_figure="Conv 19"), unit=1),
        Claim("output-side half above channels, all", [Lead(OUTPUT, CHANNELS, name) for name in LAYERS], unit=1),
        Claim("output-side above input-side, 15 and 19",
              [Lead(OUTPUT, INPUT, name) for name in ("Conv 15", "Conv 19")], unit=1),
    ],
    checks=[entry.Check("input-side half: Conv 3 and 7 are 1", _are_equal)],
    charts=[entry.Chart(f"{name[5:]}.svg", f"{name}: SVCCA", name, "local step") for name in LAYERS],
    note=entry.note_of(__doc__), other_data=entry.JPEG,
)
