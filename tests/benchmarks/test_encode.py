"""`python -m benchmarks encode`: rows that can be trusted, from the graphs that devices run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.coded_model import CodedModel
from benchmarks.encode import EncodeSettings, measure, write_graph
from benchmarks.workers.graph import load
from edgefl.models.zoo.catalog import build_model
from edgefl.wire import tensors
from tests.benchmarks.commands import invoke
from tests.rings.rows import mostly_slow

FIELDS = ["codec", "encode_ms", "step_ms", "ratio"]
SMALL = build_model("mlp", size=4, hidden=[9])


@pytest.mark.slow
def test_a_row_has_what_the_machine_and_people_ask_for() -> None:
    arguments = ["--model", "mlp", "--option", "size=4", "--batch", "4", "--repeat", "1"]
    ran = invoke("encode", *arguments, "--codec", "fedbat", "--json")

    assert ran.exit_code == 0, ran.output
    [row] = json.loads(ran.stdout)["results"]
    assert list(row)[: len(FIELDS)] == FIELDS
    assert (row["codec"], row["algorithm"], row["model"], row["batch"]) == ("fedbat", "fedbat", "mlp", 4)
    assert 0 < row["encode_ms_min"] <= row["encode_ms"] and 0 < row["step_ms_min"] <= row["step_ms"]
    assert row["ratio"] == pytest.approx(row["encode_ms"] / row["step_ms"], rel=0.02)
    assert row["sgd_ratio"] == pytest.approx(row["encode_ms"] / row["sgd_step_ms"], rel=0.02)
    assert row["encode_first_ms"] > 0 and row["calls"] >= 2


@pytest.mark.slow
def test_a_codec_of_plain_sgd_has_plain_sgds_step() -> None:
    row = measure(SMALL, "topk:share=0.2", EncodeSettings(batch=2, repeat=1))

    assert row.algorithm == "sgd" and row.step_ms == row.sgd_step_ms and row.ratio == row.sgd_ratio


@pytest.mark.parametrize("codec", mostly_slow(["dense", "fedbat", "topk:share=0.2", "fedpaq"], ("fedbat",)))
def test_what_is_timed_is_the_whole_update_as_it_is_sent(codec: str, tmp_path: Path) -> None:
    model = CodedModel.of(SMALL, codec, batch=2)
    write_graph(tmp_path, "encode", model, model.algorithm.finish)

    encode = load(tmp_path, "encode", 1)
    first, second = encode(), encode()

    assert isinstance(first, bytes) and isinstance(second, bytes)
    sizes = {name: tensor.numel() for name, tensor in SMALL.weights.items()}
    wanted = model.form.arrays(sizes) or {name: ("float32", size) for name, size in sizes.items()}
    found = tensors.load(first)
    assert {name: (str(array.dtype), array.size) for name, array in found.items()} == wanted
    random = any(name.startswith("noise.") for name in model.algorithm.finish.inputs)
    assert (first != second) == random, "each call draws noise of its own"


def test_what_is_coded_has_been_trained(tmp_path: Path) -> None:
    model = CodedModel.of(SMALL, "topk:share=0.2", batch=2)
    write_graph(tmp_path, "encode", model, model.algorithm.finish)

    update = load(tmp_path, "encode", 1)()

    assert isinstance(update, bytes) and (tensors.load(update)["values"] != 0).mean() > 0.5


@pytest.mark.slow
def test_steps_go_on_from_each_other(tmp_path: Path) -> None:
    model = CodedModel.of(SMALL, "fedbat", batch=2)
    write_graph(tmp_path, "step", model, model.algorithm.phases[-1].function)

    step = load(tmp_path, "step", 1)

    assert step() is None and step() is None
