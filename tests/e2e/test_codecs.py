"""Coded updates as a user trains with them: mixed fleets over a real broker, killed and started again in mid-round."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import Calm, rows
from tests.e2e.shared import made_once

pytestmark = pytest.mark.e2e
ROUNDS = 4
ARGUMENTS = ["--rounds", str(ROUNDS), "--seed", "7"]

_BASE = """
[federation]
name = "e2e"
[model]
name = "fedbat_cnn"
options = { widths = [8, 16] }
[algorithm]
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
    "weak": 'cut = 1\nchunks = 1\nengine = "executorch"',
    "half": 'kind = "width"\ngamma = 0.25\nengine = "executorch"',
    "sparse": 'kind = "importance"\ngamma = 0.25',
}


def config(codec: str, tiers: tuple[str, ...], options: str = "") -> str:
    """A fleet of one strong device and one of each of ``tiers``."""
    parts = [f"[tiers.{name}]\n{_TIERS[name]}\ncount = 1\n" for name in tiers]
    return "".join([_BASE, *parts, f'[codec]\nname = "{codec}"\noptions = {{ {options} }}\n'])


# The fleet of tests/e2e/conftest.py trains by ef_signsgd; each of these meets two of the kinds and both engines.
CODED = {
    "fedbat": config("fedbat", ("weak", "sparse")),
    "topk": config("topk", ("half", "sparse"), "share = 0.1"),
}


@pytest.fixture(params=CODED)
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The undisturbed run of a codec, made once."""
    with made_once(tmp_path_factory, request.param) as folder:
        return Calm.of(folder / "run", ARGUMENTS, CODED[request.param])


@pytest.mark.slow
def test_mixed_fleet_trains_one_model_by_coded_updates(coded: Calm) -> None:
    assert [(row["reports"], row["rejected"]) for row in coded.rounds] == [(3, 0)] * ROUNDS
    assert float(coded.rounds[-1]["train_loss"]) < 0.98 * float(coded.rounds[0]["train_loss"])
    assert len({row["weights_sha256"] for row in coded.rounds}) == ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("coded", ["topk"], indirect=True)
def test_a_killed_server_and_device_end_with_the_same_bits(tmp_path: Path, coded: Calm) -> None:
    run = coded.beside(tmp_path / "run")
    run.wait_until(lambda: len(run.rounds) >= 1, "first round")
    # In mid-round: somebody trains, and what others have sent is in the journal or on its way.
    run.wait_until(lambda: rows(run, "half-0", "checkpoint") == 1, "checkpoint of half-0")
    run.kill("server", "half-0")

    again = run.finish()

    assert [row["round"] for row in again] == list(range(1, ROUNDS + 1))
    assert again[-1]["weights_sha256"] == coded.weights_sha256
