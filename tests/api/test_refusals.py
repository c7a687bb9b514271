"""What the API refuses, by the name of the argument; and what it takes although it could be said otherwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import edgefl
from edgefl.api.run import Run
from edgefl.api.serve import reached_at
from edgefl.config import parse
from edgefl.config.text import dump
from edgefl.models.zoo.catalog import build_model
from edgefl.wire import tensors
from edgefl.wire.mqtt.address import Address
from edgefl_server.events import Warned
from edgefl_server.storage import journal
from edgefl_server.storage.audit import HistoryWriter, rounds_of
from edgefl_server.storage.update_storage import journal_at, store_at
from tests.support.errors import ConfigError, DataError, EdgeflError, ModelError, refuses
from tests.support.events import round_closed


def own_method(objective: object, *, mu: float = 0.1) -> None:
    """Algorithm of which only the options are read."""


def own_model(hidden: int = 8, classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, hidden), nn.Linear(hidden, classes))


X, Y = np.zeros((2, 1, 4, 4), np.uint8), np.array([0, 1])
NUMBERS = np.zeros((2, 16), np.int32)
WHOLE = edgefl.data.Dataset.of(X, Y, X, Y, classes=2)
Model, Options, Training = edgefl.Model, edgefl.CompileOptions, edgefl.Training
WIDTH = Model(own_model, sample=(1, 2, 2), classes=4, options={"width": 3})
BUILT = Model(nn.Flatten(), sample=(1, 2, 2), classes=4, options={"hidden": 3})
UNTYPED: Any = edgefl
SMALL = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
CONFIG: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: edgefl.compile(SMALL), "argument 'sample' is missing"),
    (lambda: edgefl.compile(Model(SMALL, sample=(1, 2, 2))), "argument 'classes' is missing"),
    (
        lambda: edgefl.compile(Model("mlp", options={"in_channels": 3}), data="digits"),
        "takes samples of shape",
    ),
    (lambda: edgefl.check(Model(SMALL, classes=2)), "argument 'sample' is missing"),
    (lambda: Training(codec=edgefl.submodels.OutputSide()), "argument `codec` is OutputSide"),  # type: ignore[arg-type]
    (lambda: Training(algorithm=edgefl.codecs.Dense()), "argument `algorithm` is Dense"),  # type: ignore[arg-type]
    (
        lambda: Training(algorithm="fedprox:mu=0.1"),
        r"into an object, such as edgefl.algorithms.FedProx\(mu=0.1\)",
    ),
    (lambda: UNTYPED.compile("mlp", options=Options(memory_budget=0.6)), "argument `memory_budget` is 0.6"),  # type: ignore[arg-type]
    (
        lambda: UNTYPED.compile("mlp", options=Options(activations="bfloat16")),  # type: ignore[arg-type]
        "stored as 'bfloat16'; choose one of float32, float16",
    ),
    (lambda: edgefl.compile("mlp", data="digit"), "digit"),
    (lambda: UNTYPED.compile("mlp", data=3), "argument `data` is int; give a dataset's name"),
    (
        lambda: edgefl.compile(Model("mlp", sample=(1, 2, 2))),
        "`sample` has no effect here: model 'mlp' brings its own",
    ),
    (lambda: edgefl.compile(BUILT), "`options` has no effect here: they go to a factory"),
    (
        lambda: UNTYPED.compile("mlp", training="fedavg"),
        "argument `training` is 'fedavg'; give an edgefl.Training",
    ),
    (
        lambda: UNTYPED.compile("mlp", options={"target": "onnx"}),
        "argument `options` is .*edgefl.CompileOptions",
    ),
    (lambda: UNTYPED.plan("mlp", training=edgefl.algorithms.SGD()), "argument `training` is SGD"),
    (lambda: UNTYPED.federation("mlp", tables={"round": 3}), "argument `tables` has 3 for 'round'"),
    (
        lambda: UNTYPED.federation(nn.Flatten()),
        "a function at the top level of a file, found an object of Flatten",
    ),
    (
        lambda: UNTYPED.federation("mlp", tiers={"weak": edgefl.submodels.OutputSide(cut=1)}),
        r"argument `tiers` has OutputSide\(cut=1\) for 'weak'; give edgefl.Tier\(submodel=",
    ),
    (lambda: edgefl.algorithms.own(own_method, nu=1.0), "own_method has no option 'nu'; it takes mu"),
    (lambda: edgefl.algorithms.own(own_method, mu="a"), "option 'mu' of own_method is 'a'"),
)
DATA: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: replace(WHOLE, test_x=np.zeros((2, 3, 4, 4), np.uint8)), "training samples have shape"),
    (lambda: replace(WHOLE, train_y=np.array([0, 7])), "labels go from 0 to 7, and 2 classes are 0 to 1"),
    (lambda: replace(WHOLE, train_y=np.array([0, -1])), "labels go from -1"),
    (
        lambda: edgefl.data.Dataset.of(NUMBERS, Y, NUMBERS, Y),
        r"or token numbers, which have `below`, .*; found int32 \(2, 16\)",
    ),
    (
        lambda: edgefl.data.Dataset.of(NUMBERS + 7 * Y[:, None], Y, NUMBERS, Y, below=5),
        "token numbers go from 0 to 7, and 5 tokens are 0 to 4",
    ),
    (lambda: edgefl.data.Dataset.load("gone.npz"), r"there is no file gone.npz; `Dataset.save` writes one"),
)
MODEL: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: edgefl.compile(WIDTH), "has no option 'width'; it takes hidden, classes"),
    (
        lambda: build_model(f"{__file__}:own_model"),
        r"give the options 'classes' and 'sample_shape' \(that of one sample",
    ),
)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (error, *row)
        for error, rows in ((ConfigError, CONFIG), (DataError, DATA), (ModelError, MODEL))
        for row in rows
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(
    error: type[EdgeflError], call: Callable[[], object], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_names_and_entries_without_options_stand_for_choices() -> None:
    made = edgefl.federation(
        tiers={"half": edgefl.Tier(submodel="width")},
        training=edgefl.Training(algorithm="fedprox", codec=edgefl.codecs.FedPAQ, optimizer="fedadam"),
    )
    assert (made.algorithm.name, made.codec.name, made.optimizer.name) == ("fedprox", "fedpaq", "fedadam")
    assert made.tiers["half"].kind == "width"
    assert edgefl.federation(
        training=edgefl.Training(codec=edgefl.algorithms.FedBAT(rho=5.0))
    ).codec.options == {"rho": 5.0}


def test_what_a_federation_is_made_of_reads_back_from_its_file(tmp_path: Path) -> None:
    made = edgefl.federation(
        edgefl.Model("mlp", options={"hidden": (4, 3)}),
        training=edgefl.Training(codec=edgefl.algorithms.FedBAT(alpha_range=None)),
    )
    (tmp_path / "f.toml").write_text(dump(made))

    assert edgefl.load_federation(tmp_path / "f.toml") == made
    assert edgefl.config.checked(str(tmp_path / "f.toml")) == made


def test_a_model_in_a_file_is_valid_and_one_that_is_not_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def model(): ...\n")
    for name, problem in (("mine.py", ""), ("other.py", "there is no file")):
        text = dump(edgefl.federation(f"{tmp_path / name}:model"))
        (tmp_path / "f.toml").write_text(text)
        if problem:
            with pytest.raises(ConfigError, match=problem):
                edgefl.config.checked(tmp_path / "f.toml")
        else:
            assert edgefl.config.checked(tmp_path / "f.toml").model.name.endswith("mine.py:model")


def test_a_script_that_would_start_itself_again_says_how_not_to(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import edgefl\nfrom torch import nn\n\n"
        "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n\n"
        f"edgefl.run(edgefl.federation(make, data='digits'), {str(tmp_path / 'out')!r})\n"
    )
    with refuses(ConfigError, path=str(script)):
        edgefl.run(edgefl.federation(f"{script}:make", data="digits"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_trained_leaves_the_run_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "model.safetensors").write_bytes(b"trained")
    wrong = edgefl.federation(
        "mlp", data="digits", tiers={"a": edgefl.Tier(submodel=edgefl.submodels.OutputSide(cut=99))}
    )
    with pytest.raises(ModelError, match="a cut of mlp lies in"):
        edgefl.run(wrong, tmp_path, fresh=True)
    assert (tmp_path / "model.safetensors").read_bytes() == b"trained"


def test_the_broker_s_authority_is_not_lost_on_the_way() -> None:
    federation = edgefl.federation(
        tables={"broker": edgefl.config.BrokerTable(host="broker.lan", port=8883, ca_file="ca.pem")}
    )

    assert reached_at(federation, "", "").ca_file == "ca.pem"
    assert reached_at(federation, "other:1884", "own.pem") == Address("other", 1884, ca_file="own.pem")
    assert reached_at(federation, Address("x"), "own.pem").ca_file == "own.pem"


def test_an_addresss_user_has_the_files_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    secret = {"password_file": str(tmp_path / "password")}
    line = "mqtts://server@broker.lan?ca-file=ca.pem"
    expected = Address("broker.lan", 8883, "server", "s3cret", "ca.pem", tls=True)
    monkeypatch.setenv("EDGEFL_BROKER_PASSWORD", "another")

    for table in (secret, {"username": "server", **secret}, {"password": "s3cret"}):
        federation = edgefl.federation(tables={"broker": edgefl.config.BrokerTable(**table)})
        assert reached_at(federation, line) == expected
    other = edgefl.federation(tables={"broker": edgefl.config.BrokerTable(username="other", **secret)})
    assert reached_at(other, line) == replace(expected, password="another")


def test_a_running_runs_model_is_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    (tmp_path / "checkpoints").mkdir()
    for number in (9999, 10000):
        arrays = {"head.bias": np.full(2, number, np.float32), "c/head.bias": np.zeros(2, np.float32)}
        (tmp_path / "checkpoints" / f"round-{number}.safetensors").write_bytes(tensors.dump(arrays))

    run = Run(tmp_path)
    assert {name: float(array[0]) for name, array in run.model.items()} == {"head.bias": 10000.0}


def test_a_history_survives_damage_and_a_full_disk(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path)
    assert history.take(round_closed()) is None
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"event": "roundclosed", "text": "\xff')
    history.take(round_closed(2))
    assert [row.round for row in rounds_of(tmp_path)] == [1, 2]

    problem = HistoryWriter(tmp_path / "gone").take(round_closed())
    assert isinstance(problem, Warned) and "history.jsonl" in problem.text


def test_a_folder_in_place_of_a_file_of_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read: .*directory"):
        edgefl.train_round(edgefl.compile("mlp"), tmp_path, np.zeros((2, 1), np.uint8), np.zeros(2, np.int64))


def test_data_that_do_not_belong_together_are_refused_before_the_round() -> None:
    bundle = edgefl.compile("mlp", data="digits")
    weights, x, y = bundle.initial_weights(), np.zeros((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
    for wrong, message in (
        ((x, y[:3]), "4 samples and 3 labels"),
        ((x + np.nan, y), "are NaN, first at row 0"),
    ):
        with pytest.raises(DataError, match=message):
            edgefl.train_round(bundle, weights, *wrong)


def test_a_device_takes_sizes_and_rates_as_people_write_them() -> None:
    device = edgefl.Device(memory="64MiB", downlink="1MB/s", uplink=5e5)
    assert (device.memory, device.downlink, device.uplink) == (64 << 20, 1e6, 5e5)
    assert replace(device, samples=3) == edgefl.Device(64 << 20, 1e6, 5e5, samples=3)
    for wrong in ({"memory": "64"}, {"uplink": "fast"}):
        with pytest.raises(ConfigError, match=f"argument `{next(iter(wrong))}`"):
            edgefl.Device(**wrong)


@pytest.mark.parametrize("device", ["gpu", "cuda:99x"])
def test_a_wrong_device_is_named_early(tmp_path: Path, device: str) -> None:
    federation = edgefl.federation("mlp", data="digits")

    with refuses(ConfigError, device=device):
        edgefl.Server(federation, tmp_path / "out", device=device)
    with refuses(ConfigError, device=device):
        edgefl.simulate(federation, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["mlp", "own.py:make"])
def test_a_folder_of_another_run_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("raise SystemExit('this must not run')\n")
    out = Path("out")
    out.mkdir()
    with closing(journal.Journal(journal_at(out / "journal.sqlite"), "demo", store_at("updates"))) as made:
        made.begin_run(journal.RunRecord("r1", "e" * 64, 1))
    federation = parse({"model": {"name": model}, "data": {"name": "digits"}}, source="the test")

    with pytest.raises(ConfigError, match=r"holds run r1 .* under another configuration"):
        edgefl.Server(federation, out)
    assert not (out / "bundles").exists()
