"""`edgefl plan` and `edgefl export --fit`: which submodels fit a device, and which one is taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from edgefl.cli import app
from edgefl.cli.models.plan import PlanOptions, read_device, read_hello
from edgefl.cli.options import in_flags
from edgefl.errors import ConfigError, EdgeflError, ModelError
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.mqtt.messages import Hello, encode
from edgefl_export import fit
from edgefl_export.device import Device
from tests.cli.runner import edgefl

SMALL = ["--model", "mlp", "--option", "size=8", "--option", "hidden=[64]", "--batch", "8"]


@pytest.fixture(scope="module", autouse=True)
def graphs_are_traced_once() -> Iterator[None]:
    """Plans for models of equal tensors share the peaks that one plan remembers by itself."""
    known: dict[object, dict[object, int]] = {}
    begin = fit._SizePlanner.__init__

    def shared(planner: Any, spec: Any, *others: Any, **options: Any) -> None:
        begin(planner, spec, *others, **options)
        tensors = tuple((name, tensor.shape) for name, tensor in spec.weights.items())
        planner._known = known.setdefault(tensors, {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit._SizePlanner, "__init__", shared)
        yield


def planned(*arguments: str | Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(edgefl("plan", *SMALL, *arguments, "--json"))
    return told


def test_the_largest_size_that_fits_is_recommended() -> None:
    told = planned("--memory", "64MiB", "--kind", "output_side,width,importance", "--gamma", "1/4")

    rows = told["submodels"]
    found = {(row["kind"], row["size"]) for row in rows}
    assert {("output_side", "cut 0"), ("width", "gamma 0.25"), ("importance", "gamma 0.25")} <= found
    assert all(0 < row["memory_bytes"] <= 64 << 20 for row in rows)
    assert all(row["download_bytes"] > 0 and row["upload_bytes"] > 0 and row["macs"] > 0 for row in rows)
    assert (told["recommended"]["kind"], told["recommended"]["size"]) == ("output_side", "cut 0")
    assert "100.0% of the parameters" in told["reason"]


@pytest.mark.slow
def test_importance_is_listed_with_the_work_it_really_does() -> None:
    told = planned("--kind", "importance,width", "--gamma", "0.25")

    importance, width = told["submodels"]
    if importance["kind"] == "width":
        importance, width = width, importance
    assert importance["macs"] > 2 * importance["kept_macs"] and "with zeros" in importance["note"]
    assert width["macs"] == width["kept_macs"] and width["note"] == ""


def test_dead_importance_is_not_recommended() -> None:
    told = planned("--kind", "importance", "--gamma", "1/64,1/16")

    alive, dead = told["submodels"]
    assert told["recommended"]["size"] == alive["size"] == "gamma 0.0625"
    assert alive["dead"] == "" and "dead at the initial weights" not in alive["note"]
    assert (
        "dense1.dense.weight" in dead["dead"]
        and f"dead at the initial weights: {dead['dead']}" in dead["note"]
    )


@pytest.mark.slow
def test_a_table_says_which_submodels_are_dead() -> None:
    told = edgefl("plan", *SMALL, "--kind", "importance", "--gamma", "1/64,1/16")

    assert told.count("(dead)") == 1
    assert told.index("0.0625") < told.index("0.01562") < told.index("(dead)")
    assert "dead: at the initial weights" in " ".join(told.split())


@pytest.mark.slow
def test_slow_links_and_short_rounds_leave_out_what_takes_too_long() -> None:
    links = ["--downlink", "10kB/s", "--uplink", "8kbit/s"]
    every = planned(*links, "--kind", "width", "--gamma", "1,1/4")["submodels"]
    times = {row["size"]: row["transfer_s"] for row in every}

    told = planned(
        *links, "--kind", "width", "--gamma", "1,1/4", "--round-seconds", str(times["gamma 0.25"] + 1)
    )

    row = every[0]
    expected = row["download_bytes"] / 10e3 + row["upload_bytes"] / 1e3
    assert row["transfer_s"] == pytest.approx(expected, abs=2e-3)
    assert told["recommended"]["size"] == "gamma 0.25"
    [large] = told["too_large"]
    assert large["size"] == "whole model" and "a round takes" in large["problem"]


def test_computing_counts_where_the_device_says_how_fast_it_is() -> None:
    [row] = planned("--compute", "0.001", "--kind", "output_side", "--steps", "3")["submodels"][:1]

    assert row["compute_s"] == pytest.approx(3 * row["macs"] * 8 * 3 / 1e6, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            "--kind importance --gamma 1/64",
            ModelError,
            r"importance with gamma 0\.01562 is dead at the initial weights",
        ),
        (
            "--kind width --gamma 1,0.25 --uplink 1B/s --round-seconds 1",
            ModelError,
            r"the quickest, width with gamma 0\.25, a round takes",
        ),
        ("--kind width --gamma 1e-9", ModelError, "the smallest ratio is"),
        ("--kind depth", ConfigError, r"no submodel kind 'depth'; there are: .*width"),
    ],
)
def test_an_error_says_why_nothing_fits(arguments: str, error: type[EdgeflError], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(*arguments.split())


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("--kind output_side --memory 64MiB", ["cut 0 *", "recommended: output_side, cut 0: trains 100.0%"]),
        ("--kind width --gamma 0.25,1e-9", ["left out: width, gamma 1e-09: no slice of mlp is as narrow"]),
        (
            "--kind early_exit,output_side --gamma 0.25,0.0625",
            ["left out: early_exit, 2 sizes: mlp has no early exits"],
        ),
    ],
)
def test_a_table_marks_the_recommended_one(arguments: str, lines: list[str]) -> None:
    told = edgefl("plan", *SMALL, *arguments.split())

    assert [told.count(line) for line in lines] == [1] * len(lines)


def test_nothing_fits_names_the_smallest_and_what_it_needs() -> None:
    with pytest.raises(
        ModelError, match=r"the smallest, .*, needs \d\.\d MiB of memory, the device has 2\.0"
    ) as told:
        planned("--memory", "2MiB", "--kind", "output_side,width", "--gamma", "0.25")
    assert 2 << 20 < told.value.details["memory_bytes"] < 20 << 20  # type: ignore[operator]


def test_sizes_that_do_not_exist_are_left_out_with_their_reason() -> None:
    told = planned("--kind", "width", "--gamma", "0.25,1e-9")

    assert [row["size"] for row in told["submodels"]] == ["gamma 0.25"]
    assert "its widest layer has 64" in told["left_out"][0]["reason"]


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("1MB/s", 1e6), ("200 kB/s", 2e5), ("1MiB/s", 2**20), ("8Mbit/s", 1e6), ("500B/s", 500.0)],
)
def test_rates_are_read_as_people_write_them(text: str, bytes_per_second: float) -> None:
    assert Device(downlink=text).downlink == bytes_per_second


@pytest.mark.parametrize("text", ["1MB", "fast", "-1MB/s", "0kB/s"])
def test_a_rate_that_is_none_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="a link is a rate such as"):
        Device(uplink=text)


def test_a_device_file_has_the_keys_of_the_command_and_options_go_first(tmp_path: Path) -> None:
    file = tmp_path / "phone.toml"
    file.write_text('memory = "64MiB"\nkinds = ["width"]\ngamma = ["1/4", 0.5]\nround_seconds = 60\n')

    told = planned("--device-file", file, "--gamma", "0.25")

    assert [row["size"] for row in told["submodels"]] == ["gamma 0.25"]
    assert read_device(file).device.memory == 64 << 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('memroy = "1MiB"', "memroy.*it has the keys memory, downlink"),
        ('memory = "much"', "phone.toml: memory: 'much' is not a size"),
        ('memory = "50%"', "memory: '50%' is not a size"),
        ('uplink = "fast"', "phone.toml: uplink: a link is a rate"),
        ("compute = -1.0", "compute is a number from 0 on"),
        ("compute = nan", "compute is a number from 0 on"),
        ("memory = ", "is no device file"),
    ],
)
def test_a_wrong_device_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "phone.toml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=message):
        _ = read_device(file).device


def test_a_wrong_option_is_named_by_its_flag() -> None:
    with pytest.raises(ConfigError, match="`memory`: '64' has no unit; write 64MiB") as refusal:
        _ = PlanOptions(memory="64").device
    command = typer.main.get_command(app)
    assert in_flags(refusal.value.message, command, ["plan"]).startswith(
        "argument --memory: '64' has no unit"
    )


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_a_hello_tells_memory_and_samples(tmp_path: Path, form: str) -> None:
    hello = Hello(agent="edgefl", memory_bytes=1 << 26, cores=4, samples=120, engines={})
    file = tmp_path / "hello"
    file.write_bytes(encode(hello) if form == "msgpack" else msgspec.json.encode(hello))

    assert read_hello(file) == PlanOptions(memory=f"{1 << 26}B", samples=120)


def test_a_file_that_is_no_hello_is_told(tmp_path: Path) -> None:
    file = tmp_path / "hello"
    file.write_bytes(b"hello")

    with pytest.raises(ConfigError, match="is no hello message"):
        read_hello(file)


@pytest.mark.slow
def test_export_fit_writes_the_recommended_bundle_under_the_files_name(tmp_path: Path) -> None:
    config, device = tmp_path / "federation.toml", tmp_path / "phone.toml"
    config.write_text('[model]\nname = "mlp"\noptions = { hidden = [16] }\n[data]\nname = "digits"\n')
    device.write_text('memory = "64MiB"\nkinds = ["importance"]\ngamma = [0.25]\nbatch = 8\nsteps = 3\n')

    told = json.loads(edgefl("export", config, "--fit", device, "--out", tmp_path, "--json"))

    assert [(row["tier"], row["kind"], row["options"]) for row in told] == [
        ("phone", "importance", {"gamma": 0.25})
    ]
    manifest = read_bundle(tmp_path / "phone.efl").manifest
    assert (manifest.tier, manifest.program, manifest.batch, manifest.steps) == ("phone", "tcbgd", 8, 3)
    assert "nothing else fits" in told[0]["reason"]


def test_export_fit_refuses_what_cannot_fit(tmp_path: Path) -> None:
    config, device = tmp_path / "federation.toml", tmp_path / "phone.toml"
    config.write_text('[model]\nname = "mlp"\noptions = { hidden = [64] }\n[data]\nname = "digits"\n')
    device.write_text('memory = "1MiB"\nkinds = ["output_side"]\nbatch = 8\n')

    with pytest.raises(ModelError, match="no submodel fits the device: the smallest"):
        edgefl("export", config, "--fit", device, "--out", tmp_path)
    assert not (tmp_path / "phone.efl").exists()


@pytest.mark.slow
def test_options_of_the_model_go_before_those_of_a_federation_file(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text('[model]\nname = "mlp"\noptions = { hidden = [64] }\n[data]\nname = "digits"\n')
    rows = [
        json.loads(edgefl("plan", file, *options, "--kind", "width", "--gamma", "1", "--json"))["submodels"][
            0
        ]
        for options in ([], ["--option", "hidden=[8]"])
    ]
    assert rows[1]["parameters"] == 64 * 8 + 8 + 80 + 10 < rows[0]["parameters"]
