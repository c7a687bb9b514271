"""Table 4 of FedBAT: its models, and the bytes of their updates (fedbat.md 2.9 and 4.1)."""

from __future__ import annotations

from typing import Any

from edgefl.api.federation import load_federation
from edgefl.models.zoo.catalog import build_model
from edgefl.setup.model import submodel_of
from edgefl.setup.training import tier_sizes
from reproduce.entry import ONCE, ArmRun, Check, Computed, Entry, Measurements, Results, grid

MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "CNN, 1x28x28": ("fedbat_cnn", {}, 390_890, 48_918),
    "CNN, 3x32x32": ("fedbat_cnn", {"in_channels": 3, "size": 32}, 399_146, 49_950),
    "ResNet-10, 10 classes": ("resnet10", {}, 1_228_970, 153_774),
    "ResNet-10, 100 classes": ("resnet10", {"classes": 100}, 1_252_100, 156_665),
}
"""Models with their parameters, and the bytes of an update: a bit for each parameter, a float32 for each tensor."""
PAPER = {"parameters": None, "bytes": None, "bits": 1.0, "times smaller": 32.0}


def _count(_: ArmRun) -> Measurements:
    """Count parameters and bytes of FedBAT's updates, without headers and batch norm's statistics."""
    figures: dict[str, float] = {}
    tiers = {"all": {"count": 1, "devices": ["all-*"]}}
    for row, (model, options, _parameters, _bytes) in MODELS.items():
        spec = build_model(model, **options)
        federation = load_federation(None, {"model.name": model, "codec.name": "fedbat", "tiers": tiers})
        submodels = {"all": submodel_of(spec, "all", federation.tiers["all"])}
        parts = [each for each in tier_sizes(federation, spec, submodels)["all"].parts if not each.statistics]
        count, sent = sum(each.entries for each in parts), sum(each.nbytes for each in parts)
        numbers = (count, sent, 8 * sent / count, 4 * count / sent)
        figures |= {f"{row}: {name}": number for name, number in zip(PAPER, numbers, strict=True)}
    return Measurements(figures)


def _exact(results: Results) -> tuple[bool, str]:
    wrong = []
    for row, (*_, count, sent) in MODELS.items():
        parameters, size = (results.of("counts", f"{row}: {name}")[0] for name in ("parameters", "bytes"))
        wrong += [row] if (parameters, size) != (count, sent) else []
    return not wrong, f"differ: {', '.join(wrong) or 'none'}"


TABLE4 = Entry(
    "fedbat/table4", "Table 4: the models, and one bit for each parameter", lambda _: [Computed("counts", _count)],
    grids=[
        grid("model", [*PAPER], dict.fromkeys(MODELS, tuple(PAPER.values())), lambda row, name: ("counts", f"{row}: {name}"),
             unit=1.0, digits=(0, 0, 3, 3))
    ],
    checks=[Check("a bit a parameter, a float a tensor", _exact)],
    note="FedBAT's updates without headers and batch norm's statistics. The paper counts 1 bit, without the step sizes.",
    seeds=ONCE,
)  # fmt: skip
