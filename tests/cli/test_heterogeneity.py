"""`edgefl heterogeneity`: numbers for programs, tables and one page for people, and what it refuses."""

from __future__ import annotations

import functools
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from edgefl.config import load
from edgefl.config.text import dump
from edgefl.models.zoo.catalog import build_model
from tests.cli.runner import edgefl as run_command
from tests.support.errors import ConfigError, DataError, EdgeflError, refuses

CONFIG = """
[model]
name = "elu_mlp"
options = { hidden = [6] }
[algorithm]
batch = 10
steps = 4
lr = 0.01
[data]
name = "digits"
partition = "groups"
group_samples = 4
[tiers.all]
count = 10
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "federation.toml"
    file.write_text(CONFIG)
    return file


edgefl = functools.partial(run_command, "heterogeneity")


def measured(*arguments: str | Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(edgefl(*arguments, "--json", "--users", "2"))
    return told


class Outside(HTMLParser):
    """Collects what a page would load from elsewhere, and counts its pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.pictures += tag == "svg"
        self.found += [tag] * (tag in {"script", "link", "img", "iframe"})
        self.found += [str(value) for name, value in attrs if name in {"src", "href"}]


@pytest.mark.slow
def test_the_report_has_every_diagnostic(config: Path, tmp_path: Path) -> None:
    told = measured(config, "--alpha", "0.02", "--html", tmp_path / "sub" / "page.html")

    assert told["users"] == 10 and told["setting"]["alpha"] == 0.02 and told["setting"]["tau"] == 4
    assert told["labels"]["mean_tv2"] == pytest.approx(0.4)
    assert told["labels"]["mean_pairwise_tv"] == pytest.approx(0.6)
    assert set(told["features"]["found"]) == {"per_feature", "sliced", "matched"}
    assert told["gradients"]["plug_in"] > told["gradients"]["noise_floor"] > 0
    assert told["meta_gradients"]["gamma_f2"] <= told["meta_gradients"]["gamma_f2_bound"]
    assert len(told["meta_gradients"]["kappas"]) == 10 and len(told["hessians"]["eigenvalues"]) == 2
    constants = told["theory"]
    assert constants["alpha_satisfies"] == (1 / constants["L"] >= 0.02)
    assert constants["beta_max"] == pytest.approx(1 / (10 * 4 * constants["L_F"]))
    page = Outside()
    page.feed((tmp_path / "sub" / "page.html").read_text())
    assert page.pictures == 2 and page.found == []


@pytest.mark.slow
def test_a_table_warns_where_first_order_is_unsafe(config: Path) -> None:
    told = " ".join(edgefl(config, "--alpha", "20", "--users", "1").split())
    for word in (
        "pairwise TV",
        "sliced W1",
        "noise floor",
        "kappa, mean",
        "beta_max",
        "users by their classes",
    ):
        assert word in told
    assert "FO unsafe" in told and "is above what the theory allows" in told


@pytest.mark.slow
def test_a_run_s_folder_gives_its_trained_model(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text(dump(load(config)))
    with pytest.raises(ConfigError, match="has no model yet"):
        edgefl(folder)
    weights = {
        name: 0 * tensor.numpy()
        for name, tensor in build_model("elu_mlp", size=8, hidden=[6]).weights.items()
    }
    save_file(weights, folder / "model.safetensors")
    told = measured(folder)
    assert str(folder / "model.safetensors") in told["title"]
    assert told["kappa"]["mean"] != measured(config)["kappa"]["mean"]


def test_what_cannot_be_measured_is_told(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        edgefl(tmp_path)
    with refuses(DataError, path=str(tmp_path / "none.safetensors")):
        edgefl(config, "--weights", tmp_path / "none.safetensors")
    save_file(
        {name: tensor.numpy() for name, tensor in build_model("elu_mlp", size=8, hidden=[7]).weights.items()},
        tmp_path / "other.safetensors",
    )
    with pytest.raises(ConfigError, match=r"another model.*dense1"):
        edgefl(config, "--weights", tmp_path / "other.safetensors")
    with refuses(EdgeflError, clients=25):
        edgefl(config, "--devices", "25")
