"""`python -m benchmarks aggregate`: rows that can be trusted, with Flower and without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.aggregate import (
    AggregateSettings,
    AggregatorRun,
    CpuCopy,
    build,
    measure,
    on_device_row,
    too_large,
)
from benchmarks.coded_model import CODECS, CodedModel, sized
from benchmarks.peers import make, peers
from benchmarks.sign_kernel import measure_signs
from edgefl.models.zoo.catalog import build_model
from edgefl.wire.update.decode import split
from tests.benchmarks.commands import invoke
from tests.rings.rows import mostly_slow
from tests.support.errors import ConfigError, refuses

FIELDS = [
    *("codec", "device", "parameters", "clients", "updates_per_s", "flower_updates_per_s", "ratio"),
    "copy_fraction",
]
SMALL = build_model("mlp", size=4, hidden=[9])


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has no packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def results(*arguments: str) -> tuple[int, dict[str, object], str]:
    ran = invoke("aggregate", *arguments, "--json")
    return ran.exit_code, json.loads(ran.stdout), " ".join(ran.stderr.split())


@pytest.mark.slow
def test_without_flower_its_columns_are_null_with_a_remedy(bare: Path) -> None:
    arguments = ["--model", "mlp", "--option", "size=4", "--codec", "fedbat", "--clients", "3"]
    code, told, problem = results(*arguments, "--repeat", "1", "--threads", "1", "--flower", str(bare))

    assert code == 0 and "`python -m benchmarks peer flower` makes an environment" in problem
    assert told["bench"] == "aggregate" and "packages" in told["machine"]  # type: ignore[operator]
    [row] = told["results"]  # type: ignore[misc]
    assert list(row)[: len(FIELDS)] == FIELDS
    assert (row["codec"], row["device"], row["clients"], row["threads"]) == ("fedbat", "cpu", 3, 1)
    assert row["flower_updates_per_s"] is row["ratio"] is row["round_ratio"] is row["difference"] is None
    assert (
        "No module named 'flwr'" in row["flower_error"] and "python -m benchmarks peer" in row["flower_error"]
    )
    assert row["round_updates_per_s"] == pytest.approx(3 / row["round_s"], rel=1e-2)
    assert 0 < row["round_s_min"] <= row["round_s"] and 0 < row["seconds_min"] <= row["seconds"]
    assert row["seconds"] < row["round_s"] and row["copy_fraction"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["dense", "fedbat"])
def test_beside_flower_both_make_the_same_weights(codec: str) -> None:
    flower = make(peers()["flower"])
    row = measure(SMALL, codec, AggregateSettings(clients=9, threads=2, repeat=2, flower=flower))

    assert row.flower_error is None and row.flower_s_min is not None and row.flower_s is not None
    assert row.flower_updates_per_s == pytest.approx(9 / row.flower_s, rel=1e-2)
    assert row.ratio == pytest.approx(row.flower_s / row.seconds, rel=1e-2, abs=1e-3) and row.ratio > 0
    assert row.round_ratio == pytest.approx(row.flower_s / row.round_s, rel=1e-2, abs=1e-3)
    assert row.difference is not None and row.difference < 1e-6


def test_bytes_are_those_of_the_updates_and_of_the_sums_once_per_batch() -> None:
    ours = AggregatorRun(CodedModel.of(SMALL, "dense"), clients=70, threads=1, device="cpu")

    entries, update = ours.layout.size, 4 * ours.layout.size
    assert ours.batches > 1
    assert ours.update_bytes == update and ours.counted_bytes == 70 * update + 16 * entries * ours.batches

    one_bit = AggregatorRun(CodedModel.of(SMALL, "fedbat"), clients=32, threads=1, device="cpu")
    assert one_bit.batches == 1 and one_bit.update_bytes < update / 20


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "codec",
    mostly_slow(
        [*CODECS, "bfloat16", "signsgd", "zerofl", "bifl", "topk:share=0.2"],
        ("fedbat", "signsgd", "topk:share=0.2"),
    ),
)
def test_random_updates_are_valid_and_not_alike(codec: str) -> None:
    model = CodedModel.of(build_model("resnet8", size=8, widths=[3, 4, 5]), codec)
    ours = AggregatorRun(model, clients=2, threads=1, device="cpu")

    first, second = (ours.decoded(update) for update in ours.updates)
    if model.form.sections:
        shapes = ours.layout.shapes
        sent = [part.name for part in split(model.form, ours.updates[0], model.regions, shapes)]
        assert sorted(sent) == sorted(shapes)
    assert np.isfinite(first).all() and not np.array_equal(first, second)
    moved = [not np.array_equal(new, model.weights[name]) for name, new in ours.aggregated().items()]
    assert all(moved)


@pytest.mark.parametrize("parameters", [3_000, 100_000, 1_000_000])
def test_a_synthetic_model_has_about_the_parameters_that_were_asked_for(parameters: int) -> None:
    found = sum(tensor.numel() for tensor in sized(parameters).weights.values())

    assert found == pytest.approx(parameters, rel=0.25 if parameters < 10_000 else 0.02)


def test_a_copy_copies_everything_whatever_the_threads() -> None:
    copy = CpuCopy(3, size=10_001)

    assert copy.bytes_per_s() > 0
    assert np.array_equal(copy.source, copy.target)


def test_flower_is_left_out_where_its_arrays_would_not_fit_in_memory() -> None:
    assert too_large(1000, 4, free=32_000) is None
    assert too_large(10**9, 64, free=2**34) == (
        "it needs 476.8 GiB for the decoded updates and their weighted copies, and 16.0 GiB are free; "
        "choose fewer --clients"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_updates_on_the_device_are_refused() -> None:
    ran = invoke("aggregate", "--processor", "cuda", "--on-device")

    assert isinstance(ran.exception, ConfigError) and ran.exception.details["device"] == "cuda"


def test_measuring_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "edgefl_server.aggregate.triton_kernels", None)
    with refuses(ConfigError, missing="triton"):
        measure_signs(1000, 2, device="cpu")


def test_updates_on_the_device_are_asked_for_with_the_device() -> None:
    ran = invoke("aggregate", "--on-device")

    assert isinstance(ran.exception, ConfigError) and "add --processor cuda" in str(ran.exception)


def test_a_row_of_updates_on_the_device_counts_their_bytes() -> None:
    found = {"device": "GPU", "parameters": 100, "clients": 4, "updates_per_s": 8.0, "seconds": 0.5}
    row = on_device_row(
        {**found, "bytes": 1652, "copy_bytes_per_s": 6608.0, "copy_fraction": 0.5, "tunings": {}}, 3
    )

    assert (row.gpu, row.device, row.update_bytes, row.counted_bytes) == ("GPU", "cuda", 13, 1652)
    assert row.copy_fraction == row.counted_bytes / row.seconds / row.copy_bytes_per_s


def test_the_model_is_chosen_by_name_or_by_size() -> None:
    assert build("resnet8", 0, {}).name == "resnet8"
    assert build("resnet8", 3_000, {}).name == "mlp"
