"""Coded updates as a user trains with them: mixed fleets over a real broker, killed and started again in mid-round."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from edgefl.wire import tensors
from tests.e2e.runs import Calm, Run, on_both_engines

pytestmark = pytest.mark.e2e
ROUNDS = 4
ARGUMENTS = ["--rounds", str(ROUNDS), "--seed", "7"]

_BASE = """
[federation]
name = "e2e"
[model]
name = "fedbat_cnn"
options = { widths = [8, 16] }
[program]
batch = 8
steps = 6
lr = 0.05
[data]
name = "digits"
train_samples = 320
test_samples = 200
[limits]
checkpoint_steps = 1
ack_timeout_s = 3
[tiers.strong]
count = 1
"""
_TIERS = {
    "weak": "cut = 1\nchunks = 1",
    "half": 'kind = "width"\ngamma = 0.25',
    "sparse": 'kind = "importance"\ngamma = 0.25',
}


def config(codec: str, tiers: tuple[str, ...], options: str = "") -> str:
    """A fleet of one strong device and one of each of ``tiers``."""
    parts = [f"[tiers.{name}]\n{_TIERS[name]}\ncount = 1\n" for name in tiers]
    return "".join([_BASE, *parts, f'[codec]\nname = "{codec}"\noptions = {{ {options} }}\n'])


# Every export takes seconds: each codec meets two of the kinds, and each kind two of the codecs.
CODED = {
    "ef_signsgd": config("ef_signsgd", ("weak", "half")),
    "fedbat": config("fedbat", ("weak", "sparse")),
    "topk": config("topk", ("half", "sparse"), "share = 0.1"),
}


_runs: dict[tuple[str, str], Calm] = {}


@pytest.fixture
def calm(codec: str, engine: str, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The undisturbed run of a codec on an engine, made once."""
    if (codec, engine) not in _runs:
        folder = tmp_path_factory.mktemp(codec) / "run"
        _runs[codec, engine] = Calm.of(engine, folder, ARGUMENTS, CODED[codec])
    return _runs[codec, engine]


def of(*codecs: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", codecs)


@on_both_engines
@of(*CODED)
def test_mixed_fleet_trains_one_model_by_coded_updates(calm: Calm) -> None:
    assert [(row["reports"], row["rejected"]) for row in calm.rounds] == [(3, 0)] * ROUNDS
    assert float(calm.rounds[-1]["train_loss"]) < 0.98 * float(calm.rounds[0]["train_loss"])
    assert len({row["weights_sha256"] for row in calm.rounds}) == ROUNDS


@on_both_engines
@of("ef_signsgd")
def test_a_bit_per_entry_is_a_small_part_of_a_dense_update(calm: Calm) -> None:
    # An update that is sent again is counted again: on a busy machine some are.
    names = calm.rounds[-1]["devices"]
    up = {name: min(row["devices"][name]["up_bytes"] for row in calm.rounds) for name in names}
    model = tensors.load((calm.folder / "model.safetensors").read_bytes())
    dense = sum(array.nbytes for array in model.values())
    # A thousand parameters only: names and numbers of the message weigh as much as the bits.
    assert up["strong-0"] < dense / 3
    assert up["half-0"] < up["strong-0"]


def rows(run: Run, device: str, table: str) -> int:
    """How many rows the store of a running device has in a table."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{_store(run.folder, device)}?mode=ro", uri=True, timeout=0.1)) as db,
    ):
        return int(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])
    return 0


def carried(folder: Path, device: str) -> dict[str, np.ndarray]:
    """What a device keeps for its next round."""
    with closing(sqlite3.connect(f"file:{_store(folder, device)}?mode=ro", uri=True)) as db:
        ((data,),) = db.execute("SELECT data FROM carries ORDER BY id DESC LIMIT 1").fetchall()
    return dict(tensors.load(data))


def _store(folder: Path, device: str) -> Path:
    return folder / "devices" / device / "store" / "store.sqlite3"


@on_both_engines
@of("ef_signsgd", "topk")
def test_a_server_killed_in_mid_round_ends_with_the_same_bits(tmp_path: Path, calm: Calm) -> None:
    run = calm.beside(tmp_path / "run")
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    # In mid-round: somebody trains, and what others have sent is in the journal or on its way.
    run.wait_until(lambda: rows(run, "strong-0", "checkpoint") == 1, "checkpoint of strong-0")
    run.kill("server")

    again = run.finish()

    assert [row["round"] for row in again] == list(range(1, ROUNDS + 1))
    assert again[-1]["weights_sha256"] == calm.weights_sha256


@on_both_engines
@of("ef_signsgd")
def test_residual_survives_a_device_that_is_killed_and_started_again(tmp_path: Path, calm: Calm) -> None:
    run = calm.beside(tmp_path / "run")
    run.wait_until(lambda: len(run.rounds) >= 2, "second round")
    for device in ("half-0", "strong-0"):
        run.kill(device)

    again = run.finish()

    # Every bit sent in rounds 3 and 4 depends on the residual of the rounds before.
    assert again[-1]["weights_sha256"] == calm.weights_sha256
    for device in ("half-0", "strong-0", "weak-0"):
        kept, expected = carried(run.folder, device), carried(calm.folder, device)
        assert kept.keys() == expected.keys() and all(name.startswith("residual.") for name in kept)
        assert all(np.array_equal(kept[name], expected[name]) for name in kept)
        assert any(array.any() for array in kept.values())


def test_a_kind_that_a_codec_cannot_code_ends_the_run_with_what_to_choose(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", ARGUMENTS, config("ef_signsgd", ("sparse",)))

    assert run.process.wait(600) == 2
    said = run.errors()
    assert "'ef_signsgd'" in said and "choose a codec without feedback" in said and "Traceback" not in said
