"""`python -m benchmarks submodels`: matched sizes, and rows with prediction beside measurement."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.submodels import SubmodelSettings, kinds_of, matched, measure
from edgefl.errors import ConfigError, ModelError
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels import catalog
from edgefl.submodels.cost import cost, whole
from tests.benchmarks.commands import invoke
from tests.rings.rows import mostly_slow

FIELDS = [
    *("kind", "gamma", "parameters", "macs", "download_bytes", "upload_bytes", "artifact_bytes"),
    *("peak_over_idle_bytes", "step_ms"),
]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "submodels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_row_has_what_the_machine_and_people_ask_for() -> None:
    arguments = ["--model", "mlp", "--kind", "width", "--gamma", "1/4", "--batch", "4", "--steps", "1"]
    ran = bench(*arguments, "--option", "size=14", "--json")

    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    [row] = told["results"]
    assert told["bench"] == "submodels" and list(row)[: len(FIELDS)] == FIELDS
    assert (row["kind"], row["gamma"], row["model"], row["algorithm"]) == ("width", 0.25, "mlp", "sgd")
    assert all(row[name] > 0 for name in FIELDS[2:])
    assert row["prediction_error"] == pytest.approx(
        row["predicted_bytes"] / row["peak_over_idle_bytes"] - 1, abs=1e-3
    )
    assert "submodel width, gamma 0.25, " in ran.stderr


@pytest.mark.slow
def test_an_importance_row_tells_executed_and_kept_macs() -> None:
    settings = SubmodelSettings(batch=4, steps=1)

    row = measure(build_model("mlp", size=8), "importance", 1 / 16, settings)

    assert row.algorithm == "tcbgd"
    assert 0 < row.kept_macs < 0.2 * row.macs
    assert row.upload_bytes < row.download_bytes
    assert row.round_peak_bytes >= row.peak_over_idle_bytes


@pytest.mark.slow
def test_a_rounds_memory_counts_frozen_chunks_as_fine_as_the_plans() -> None:
    """With one sample per step the forward pass, of 32 rows at once, is what needs most: 100 MB of tensors."""
    settings = SubmodelSettings(batch=1, steps=1)

    row = measure(build_model("resnet8", size=112), "output_side", 0.7, settings)

    assert row.options == {"cut": 3, "chunks": 3}
    assert row.round_graph == "forward"
    assert row.round_predicted_bytes > row.predicted_bytes


@pytest.mark.slow
def test_chunks_that_need_less_than_training_stay_as_they_are() -> None:
    """Training needs 40 MB more than the frozen chunk, so that what a process takes beside tensors does not decide."""
    settings = SubmodelSettings(batch=64, steps=1)

    row = measure(build_model("resnet8", size=48), "output_side", 0.95, settings)

    assert row.options == {"cut": 2}
    assert row.round_graph != "forward"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("gamma", "cut"),
    mostly_slow(
        [(1.0, 0), (0.95, 2), (0.7, 3), (1 / 4, 4), (1 / 64, 4)], [(1.0, 0), (0.95, 2), (0.7, 3), (1 / 64, 4)]
    ),
)
def test_the_cut_with_the_nearest_parameter_count_stands_for_gamma(gamma: float, cut: int) -> None:
    spec = build_model("resnet8")

    assert matched(spec, "output_side", gamma).options == {"cut": cut}


def test_every_kind_that_fits_the_model_is_measured() -> None:
    assert (
        {"output_side", "width", "importance"} <= set(kinds_of(build_model("resnet8"))) <= set(catalog.KINDS)
    )


@pytest.mark.parametrize("gamma", [0.0, 1.5, -0.25])
def test_a_gamma_outside_its_range_is_told(gamma: float) -> None:
    with pytest.raises(ModelError, match=r"gamma lies in \(0, 1\], found"):
        matched(build_model("mlp", size=4), "output_side", gamma)


@pytest.mark.slow
def test_one_that_cannot_be_measured_does_not_lose_the_others() -> None:
    arguments = [
        "--model",
        "mlp",
        "--option",
        "size=4",
        "--kind",
        "depth",
        "--kind",
        "output_side",
        "--gamma",
        "1",
    ]
    ran = invoke("submodels", *arguments, "--batch", "2", "--steps", "1", "--json")

    assert ran.exit_code == ConfigError.exit_code
    assert "no submodel kind 'depth'" in " ".join(ran.stderr.split())
    assert [row["kind"] for row in json.loads(ran.stdout)["results"]] == ["output_side"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["width", "importance", "importance_structured", "output_side"])
def test_sizes_can_be_matched_by_their_multiplications(kind: str) -> None:
    spec = build_model("resnet8", size=8)
    macs = whole(spec)[1]
    by_macs, by_parameters = (
        cost(matched(spec, kind, 0.25, match).of(spec)) for match in ("macs", "parameters")
    )
    assert abs(by_macs.kept_macs / macs - 0.25) <= abs(by_parameters.kept_macs / macs - 0.25)
    assert by_macs.kept_macs / macs == pytest.approx(0.25, rel=0.35 if kind == "output_side" else 0.1)
