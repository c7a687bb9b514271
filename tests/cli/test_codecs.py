"""Codecs on the command line: reading them, listing them, and what is said of an update before and after a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgefl.cli import app
from edgefl.codecs.catalog import CODECS, build
from edgefl.errors import ConfigError
from edgefl.setup.federation_options import parse_named
from tests.cli.runner import edgefl, runner
from tests.e2e.runs import TINY

SMALL = TINY.replace('"e2e"', '"small"\nrounds = 2').replace("[8]", "[64]") + "[tiers.strong]\ncount = 1\n"
SPARSE = '[tiers.sparse]\nkind = "importance"\ngamma = 0.25\ncount = 1\n'
ENTRIES, TENSORS = 64 * 64 + 64 + 64 * 10 + 10, 4


def as_json(*arguments: str | Path) -> Any:
    return json.loads(edgefl(*arguments, "--json"))


def written(folder: Path, text: str) -> Path:
    file = folder / "federation.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("fedbat", {}),
        (" fedpaq : bits = 3 ", {"bits": 3}),
        ("fedbat:rho=6,phi=0.5", {"rho": 6, "phi": 0.5}),
        (
            "fedbat:alpha_range=[0.001, 1],granularity=module",
            {"alpha_range": [0.001, 1], "granularity": "module"},
        ),
        ("zerofl:activations=false,sparse_upload=true", {"activations": False, "sparse_upload": True}),
        ('signsgd:sign0="plus"', {"sign0": "plus"}),
    ],
)
def test_a_codec_is_read_with_options_that_are_json_or_else_text(text: str, options: dict[str, Any]) -> None:
    table = parse_named(text, "codec")
    assert table["options"] == options
    assert build(table["name"], **table["options"]).name == table["name"]


@pytest.mark.parametrize(
    "text", ["", ":bits=3", "fedpaq:", "fedpaq:bits", "fedpaq:bits=", "a b", "f:x=1,x=2"]
)
def test_a_codec_that_cannot_be_read_is_told_with_the_grammar(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("a codec is NAME[:KEY=VALUE,...]")):
        parse_named(text, "codec")


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("fedbot", "no codec 'fedbot'; there are: dense, .*fedbat"),
        ("fedpaq:bit=3", "codec 'fedpaq' has no option 'bit'; it takes bits"),
        ("fedpaq:bits=three", r"codec\.options\.bits: Expected `int`, got `str` \(found 'three'\)"),
    ],
)
def test_a_run_with_an_unknown_codec_starts_nothing(codec: str, words: str, tmp_path: Path) -> None:
    file = written(tmp_path, SMALL)
    with pytest.raises(ConfigError, match=words):
        edgefl("run", file, "--out", tmp_path / "run", "--codec", codec)
    assert not (tmp_path / "run").exists()


def test_a_downlink_that_does_not_exist_is_refused_with_those_that_do() -> None:
    ran = runner().invoke(app, ["run", "--downlink-encoding", "int4"])
    assert ran.exit_code == 2
    assert all(word in ran.stderr for word in ("int4", "float32", "float16", "int8"))


def test_the_list_of_codecs_has_them_all_with_bits_and_defaults() -> None:
    rows = {row["name"]: row for row in as_json("ls", "codecs")}

    assert list(rows) == list(CODECS)
    assert all(row["what"].endswith(".") or row["what"].endswith(")") for row in rows.values())
    bits = {
        name: rows[name]["bits"]
        for name in ("dense", "bfloat16", "int8", "fedpaq", "ef_signsgd", "fedbat", "bifl")
    }
    assert bits == {
        "dense": 32,
        "bfloat16": 16,
        "int8": 8,
        "fedpaq": 4,
        "ef_signsgd": 1,
        "fedbat": 1,
        "bifl": 1,
    }
    assert rows["fedpaq"]["options"] == {"bits": 4, "statistics": 6, "binarize_1d": True}
    assert "bits=4" in edgefl("ls", "codecs").replace("\n", "")


def test_validate_tells_what_an_update_of_each_tier_takes(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL + SPARSE + '[codec]\nname = "scaled_sign"\n')

    rows = as_json("validate", file, "--build")["updates"]

    assert {row["tier"] for row in rows} == {"strong", "sparse"}
    trained, whole = (row for row in rows if row["tier"] == "strong")
    assert (trained["tensors"], trained["entries"], trained["scales"], trained["bits"]) == (
        TENSORS,
        ENTRIES,
        TENSORS,
        1,
    )
    assert trained["bytes"] == 64 * 64 // 8 + 8 + 80 + 2 + 4 * TENSORS
    assert whole["bytes"] - trained["bytes"] < 200
    shown = rf"strong.*trained.*{TENSORS}.*{ENTRIES:,}.* 1 .*0.6 KiB.*{trained['ratio']:.1f}x"
    assert re.search(shown, edgefl("validate", file, "--build"))


@pytest.mark.parametrize(
    ("algorithm", "models"), [("fafed", 3), ("scaffold", 2), ("local", 0), ("fedavg", 1)]
)
def test_validate_counts_all_that_is_sent(tmp_path: Path, algorithm: str, models: int) -> None:
    file = written(tmp_path, SMALL.replace("[algorithm]", f'[algorithm]\nname = "{algorithm}"'))
    [*_, whole] = as_json("validate", file, "--build")["updates"]
    assert (whole["entries"], whole["tensors"]) == (models * ENTRIES, models * TENSORS)


def test_validate_names_the_tier_whose_kind_a_codec_cannot_serve(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL + SPARSE + '[codec]\nname = "ef_signsgd"\n')
    with pytest.raises(ConfigError, match=r"^tier 'sparse': codec 'ef_signsgd' keeps .* kind 'importance'"):
        edgefl("validate", file, "--build")
    with pytest.raises(ConfigError, match=r"^tier 'sparse'"):
        edgefl("run", file, "--out", tmp_path / "run")


@pytest.mark.slow
def test_a_bundle_tells_how_its_updates_are_coded(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL + '[codec]\nname = "scaled_sign"\n')
    edgefl("export", file, "--out", tmp_path)

    said = edgefl("inspect", tmp_path / "strong.efl").replace("\n", "")

    assert "codec scaled_sign, version 1" in said and f"scales {TENSORS} x float32" in said
    assert as_json("inspect", tmp_path / "strong.efl")["manifest"]["codec"] == "scaled_sign"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_tells_its_uplink_and_how_much_smaller_than_float32_it_was(tmp_path: Path) -> None:
    said = edgefl(
        "run",
        written(tmp_path, SMALL),
        "--out",
        tmp_path / "run",
        "--codec",
        "scaled_sign",
        "--downlink-encoding",
        "float16",
    )

    assert len(re.findall(r"up \d+\.\d KiB \(\d+\.\dx smaller than float32\)", said)) == 2
    last = re.search(r"uplink +(\d+\.\d) KiB per round \((\d+\.\d)x smaller than float32\)", said)
    assert last is not None
    dense = 4 * ENTRIES + 8 + 64 * TENSORS  # and an envelope on either side
    assert float(last[2]) == pytest.approx((dense + 600) / (float(last[1]) * 1024), rel=0.1)
    assert "final accuracy" in said


def test_validate_checks_a_codec_on_the_models_tiers(tmp_path: Path) -> None:
    file = written(tmp_path, '[data]\nname = "digits"\n[codec]\nname = "fedbat"\n')

    rows = as_json("validate", file, "--build")["updates"]

    wholes = {row["tier"]: row for row in rows if row["part"] == "whole"}
    assert list(wholes) == ["strong", "moderate", "weak"]
    assert all(row["ratio"] > 30 for row in wholes.values())
    assert {row["bits"] for row in rows if row["part"] == "statistics"} == {6}
    with pytest.raises(ConfigError, match="no codec 'fedbot'"):
        edgefl("validate", written(tmp_path, file.read_text().replace("fedbat", "fedbot")))
