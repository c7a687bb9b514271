"""What the API refuses, by the name of the argument; and what it takes although it could be said otherwise."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import nn

import edgefl
from edgefl.api.run import Run
from edgefl.api.serve import reached_at
from edgefl.config import parse
from edgefl.config.text import dump
from edgefl.errors import ConfigError, DataError, ModelError
from edgefl.models.zoo.catalog import build_model
from edgefl.wire import tensors
from edgefl.wire.mqtt.address import Address
from edgefl_server.events import RoundClosed, Warned
from edgefl_server.storage import journal
from edgefl_server.storage.history import History, rounds_of
from edgefl_server.storage.places import journal_at, store_at

CLOSED = RoundClosed(
    **{"round": 1, "outcome": "closed", "accuracy": 0.5, "loss": 1.0, "train_loss": 1.0, "seconds": 2.0},
    **{"reports": 2, "rejected": 0, "weights_sha256": "0" * 64},
    **{"down_bytes": 1, "up_bytes": 2, "server_down_bytes": 3},
)


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


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"codec": edgefl.submodels.OutputSide()}, "argument `codec` is OutputSide"),
        ({"algorithm": edgefl.codecs.Dense()}, "argument `algorithm` is Dense"),
        (
            {"algorithm": "fedprox:mu=0.1"},
            r"options go into an object, such as edgefl.algorithms.FedProx\(mu=0.1\)",
        ),
    ],
)
def test_a_wrong_choice_is_named(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        edgefl.Training(**training)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": edgefl.CompileOptions(memory_budget=0.6)}, "argument `memory_budget` is 0.6"),  # type: ignore[arg-type]
        (
            {"options": edgefl.CompileOptions(activations="bfloat16")},  # type: ignore[arg-type]
            "stored as 'bfloat16'; choose one of float32, float16",
        ),
        ({"data": "digit"}, "digit"),
        ({"data": 3}, "argument `data` is int; give a dataset's name"),
        (
            {"model": edgefl.Model("mlp", sample=(1, 2, 2))},
            "argument `sample` has no effect here: model 'mlp' brings its own",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        edgefl.compile(**{"model": "mlp", **arguments})


def test_options_of_a_model_that_is_made_already_are_refused() -> None:
    with pytest.raises(ConfigError, match="`options` has no effect here: they go to a factory"):
        edgefl.compile(edgefl.Model(nn.Flatten(), sample=(1, 2, 2), classes=4, options={"hidden": 3}))


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
    with pytest.raises(ConfigError, match='below `if __name__ == "__main__":`'):
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


def test_the_address_s_user_comes_with_the_file_s_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_model_of_a_run_that_goes_on_is_its_newest_checkpoint_without_the_server_s_state(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.toml").touch()
    (tmp_path / "checkpoints").mkdir()
    for number in (9999, 10000):
        arrays = {"head.bias": np.full(2, number, np.float32), "c/head.bias": np.zeros(2, np.float32)}
        (tmp_path / "checkpoints" / f"round-{number}.safetensors").write_bytes(tensors.dump(arrays))

    run = Run(tmp_path)
    assert {name: float(array[0]) for name, array in run.model.items()} == {"head.bias": 10000.0}


def test_a_history_with_a_damaged_line_tells_the_others_and_a_full_disk_is_told(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert history.take(CLOSED) is None
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"event": "roundclosed", "text": "\xff')
    history.take(msgspec.structs.replace(CLOSED, round=2))
    assert [row.round for row in rounds_of(tmp_path)] == [1, 2]

    problem = History(tmp_path / "gone").take(CLOSED)
    assert isinstance(problem, Warned) and "history.jsonl" in problem.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_x": np.zeros((2, 3, 4, 4), np.uint8)}, "training samples have shape"),
        ({"train_y": np.array([0, 7])}, "labels go from 0 to 7, and 2 classes are 0 to 1"),
        ({"train_y": np.array([0, -1])}, "labels go from -1"),
    ],
)
def test_a_dataset_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    x, y = np.zeros((2, 1, 4, 4), np.uint8), np.array([0, 1])
    whole = edgefl.data.Dataset.of(x, y, x, y, classes=2)
    with pytest.raises(DataError, match=message):
        replace(whole, **changes)


def test_whole_numbers_that_are_neither_pixels_nor_tokens_are_told_what_there_is() -> None:
    x, y = np.zeros((2, 16), np.int32), np.array([0, 1])
    with pytest.raises(DataError, match=r"or token numbers, which have `below`, .*; found int32 \(2, 16\)"):
        edgefl.data.Dataset.of(x, y, x, y)
    with pytest.raises(DataError, match="token numbers go from 0 to 7, and 5 tokens are 0 to 4"):
        edgefl.data.Dataset.of(x + 7 * y[:, None], y, x, y, below=5)


def test_a_dataset_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*gone.npz; `Dataset.save` writes one"):
        edgefl.data.Dataset.load(tmp_path / "gone.npz")


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


def test_a_module_in_place_of_its_factory_is_told_by_its_type() -> None:
    with pytest.raises(
        ConfigError, match="a function at the top level of a file, found an object of Flatten"
    ):
        edgefl.federation(nn.Flatten())


def test_a_submodel_in_place_of_a_tier_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"OutputSide\(cut=1\) for 'weak'; give edgefl.Tier\(submodel="
    ) as told:
        edgefl.federation("mlp", tiers={"weak": edgefl.submodels.OutputSide(cut=1)})  # type: ignore[dict-item]
    assert told.value.details["argument"] == "tiers"


def own_method(objective: object, *, mu: float = 0.1) -> None:
    """An algorithm's options, which are all that is looked at here."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nu": 1.0}, "own_method has no option 'nu'; it takes mu"),
        ({"mu": "a"}, "option 'mu' of own_method is 'a'"),
    ],
)
def test_an_option_that_an_algorithm_of_ones_own_has_not_is_refused_at_once(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        edgefl.algorithms.own(own_method, **options)


def own_model(hidden: int = 8, classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, hidden), nn.Linear(hidden, classes))


def test_an_option_that_a_factory_has_not_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ModelError, match="has no option 'width'; it takes hidden, classes"):
        edgefl.compile(edgefl.Model(own_model, sample=(1, 2, 2), classes=4, options={"width": 3}))


def test_what_a_plain_model_needs_is_asked_for_at_once() -> None:
    with pytest.raises(
        ModelError, match=r"give the options 'classes' and 'sample_shape' \(that of one sample"
    ):
        build_model(f"{__file__}:own_model")


def test_a_device_takes_sizes_and_rates_as_people_write_them() -> None:
    device = edgefl.Device(memory="64MiB", downlink="1MB/s", uplink=5e5)
    assert (device.memory, device.downlink, device.uplink) == (64 << 20, 1e6, 5e5)
    assert replace(device, samples=3) == edgefl.Device(64 << 20, 1e6, 5e5, samples=3)
    for wrong in ({"memory": "64"}, {"uplink": "fast"}):
        with pytest.raises(ConfigError, match=f"argument `{next(iter(wrong))}`"):
            edgefl.Device(**wrong)


@pytest.mark.parametrize(
    ("device", "message"), [("gpu", "auto, cpu or cuda, found 'gpu'"), ("cuda:99x", "cuda:99x")]
)
def test_a_wrong_device_is_named_before_anything_is_compiled(
    tmp_path: Path, device: str, message: str
) -> None:
    federation = edgefl.federation("mlp", data="digits")

    with pytest.raises(ConfigError, match=message):
        edgefl.Server(federation, tmp_path / "out", device=device)
    with pytest.raises(ConfigError, match=message):
        edgefl.simulate(federation, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["mlp", "own.py:make"])
def test_a_folder_of_another_run_is_refused_before_anything_is_compiled(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("raise SystemExit('this must not run')\n")
    out = Path("out")
    out.mkdir()
    with closing(journal.Journal(journal_at(out / "journal.sqlite"), "demo", store_at("updates"))) as made:
        made.begin_run(journal.Run("r1", "e" * 64, 1))
    federation = parse({"model": {"name": model}, "data": {"name": "digits"}}, source="the test")

    with pytest.raises(ConfigError, match=r"holds run r1 .* under another configuration"):
        edgefl.Server(federation, out)
    assert not (out / "bundles").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: edgefl.compile("mlp", training="fedavg"),
            "argument `training` is 'fedavg'; give an edgefl.Training",
        ),  # type: ignore[arg-type]
        (
            lambda: edgefl.compile("mlp", options={"target": "onnx"}),
            "argument `options` is .*edgefl.CompileOptions",
        ),  # type: ignore[arg-type]
        (lambda: edgefl.plan("mlp", training=edgefl.algorithms.SGD()), "argument `training` is SGD"),  # type: ignore[arg-type]
        (lambda: edgefl.federation("mlp", tables={"round": 3}), "argument `tables` has 3 for 'round'"),  # type: ignore[dict-item]
    ],
)
def test_another_object_than_the_one_that_is_meant_is_named(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
