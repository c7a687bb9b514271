"""A torch process's functions give the bits of those of this process, also after it was killed; none outlives its server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.contract import server_state
from edgefl.contract.server import MEAN
from edgefl.errors import ConfigError, ServerStepError, TorchProcessError
from edgefl.setup.data import open_data
from edgefl.wire.regions import EntryRegion, Placement
from edgefl_server.compose import compose
from edgefl_server.events import Compiled, Event, Exporting, Warned
from edgefl_server.hyperparameters import round_hyperparameters
from edgefl_server.run_spec import FixedPlacement, RunSpec
from edgefl_server.torch_process import process
from edgefl_server.torch_process.client import TorchProcess
from edgefl_server.torch_process.messages import ComposeRequest, EvaluateRequest
from tests.server.torch_process.processes import gone, wait_until_gone
from tests.server.torch_process.runs import TABLES, alike, federation, moved
from tests.support.listeners import CallingListener

PATIENCE_S = 120.0


@dataclass
class Pair:
    """The same run, with functions of this process and with those of a torch process."""

    here: RunSpec
    there: RunSpec
    torch_process: TorchProcess
    processor: str
    told: list[Event]
    folder: Path

    def kill(self) -> None:
        """And forget what was told."""
        self.told.clear()
        os.kill(self.torch_process.pid, signal.SIGKILL)

    def lost(self) -> list[str]:
        """What was told of ends of processes."""
        return [event.text for event in self.told if isinstance(event, Warned)]


def pair(folder: Path, torch_process: TorchProcess, **changes: Any) -> Pair:
    made, told = federation(**changes), list[Event]()
    there, processor = torch_process.composed(
        made, folder, device="cpu", listener=CallingListener(told.append)
    )
    here = compose(made, open_data(made), folder / "again", device="cpu")
    return Pair(here, there, torch_process, processor, told, folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with TorchProcess(idle_s=PATIENCE_S) as torch_process:
        yield pair(tmp_path_factory.mktemp("run"), torch_process)


def test_a_spec_is_the_same_but_for_where_its_functions_are(run: Pair) -> None:
    here, there = run.here, run.there
    functions = ("tiers", "initial", "schedule", "server", "evaluate")
    for name in set(vars(here)) - set(functions):
        assert getattr(there, name) == getattr(here, name), name
    assert alike(there.initial, here.initial) and run.processor == "cpu"
    for name, tier in here.tiers.items():
        assert there.tiers[name].bundles == tier.bundles and there.tiers[name].form == tier.form
        assert (there.tiers[name].reads, there.tiers[name].sends) == (tier.reads, tier.sends)
    [compiled] = [event for event in run.told if isinstance(event, Compiled)]
    told = [event.tier for event in run.told if isinstance(event, Exporting)]  # of those that no cache had
    assert compiled.compiled + compiled.reused == len(here.tiers) and set(told) <= set(here.tiers)
    assert isinstance(there.tiers["whole"].place, FixedPlacement), "what is placed once is placed here"


def same(left: Placement, right: Placement) -> None:
    assert alike(dict(left.payload), dict(right.payload)) and left.masks == right.masks
    assert list(left.regions) == list(right.regions)
    for name, region in left.regions.items():
        other = right.regions[name]
        if isinstance(region, EntryRegion):
            assert isinstance(other, EntryRegion) and region.names == other.names
            assert np.array_equal(region.positions, other.positions)
        else:
            assert region == other


@pytest.mark.parametrize("number", [1, 2])
def test_a_share_that_is_chosen_anew_each_round_is_the_same(run: Pair, number: int) -> None:
    weights = moved(run.here.initial, number)
    for name, tier in run.here.tiers.items():
        same(run.there.tiers[name].place(weights, number), tier.place(weights, number))


def step(spec: RunSpec, seed: int) -> dict[str, Any]:
    before, mean = moved(spec.initial, seed), moved(spec.initial, seed + 1)
    return server_state.apply_server_step(spec.server, before, mean, {**spec.hyper, "share": 1.0})


def test_a_step_with_a_state_and_an_evaluation_are_the_same(run: Pair) -> None:
    here, there = run.here, run.there
    assert alike(step(there, 5), step(here, 5)) and there.server_state
    assert not alike(step(there, 5), step(there, 6))
    weights = here.model_of(moved(here.initial, 7))
    assert here.evaluate is not None and there.evaluate is not None
    assert there.evaluate(weights) == here.evaluate(weights)
    assert not there.server.unfolds and there.server.name == here.server.name


@pytest.mark.slow
def test_a_killed_torch_process_costs_a_new_one_and_is_told_of_once(run: Pair) -> None:
    weights = moved(run.here.initial, 8)
    run.kill()
    killed = run.torch_process.pid
    same(run.there.tiers["third"].place(weights, 2), run.here.tiers["third"].place(weights, 2))
    assert alike(step(run.there, 9), step(run.here, 9))
    assert run.torch_process.pid not in (0, killed)
    assert run.lost() == [
        "the process that computes with models ended (killed by SIGKILL) while it was needed, and is started again"
    ]


def test_what_does_not_exist_is_an_error_of_the_same_words(run: Pair, tmp_path: Path) -> None:
    odd = federation(algorithm={**TABLES["algorithm"], "upload_mode": "nowhere"})
    with pytest.raises(ConfigError) as here:
        compose(odd, open_data(odd), tmp_path)
    with pytest.raises(ConfigError) as there:
        run.torch_process.call(ComposeRequest(odd, tmp_path, "cpu"))
    assert (there.value.message, there.value.details) == (here.value.message, here.value.details)
    broken = {name: np.full_like(array, np.nan) for name, array in run.there.initial.items()}
    with pytest.raises(ServerStepError, match="NaN, infinite or larger than"):
        run.there.server.moved(broken, broken, {**run.there.hyper, "share": 1.0})


@pytest.mark.slow
def test_exchanges_and_schedules_give_the_same_bits(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "algorithm": {"name": "fafed", "batch": 4, "steps": 2},
        "optimizer": {"name": "none"},
    }
    own["tiers"] = {"strong": {"devices": ["strong-*"]}}
    with TorchProcess(idle_s=PATIENCE_S) as torch_process:
        made = pair(tmp_path, torch_process, **own)
        here, there = made.here, made.there
        assert len(here.exchanges) > 1 and any(each.server.unfolds for each in here.exchanges)
        assert [round_hyperparameters(there, n + 1, n) for n in range(3)] == [
            round_hyperparameters(here, n + 1, n) for n in range(3)
        ]
        made.kill()
        for ours, theirs in zip(here.exchanges, there.exchanges, strict=True):
            assert (theirs.server is MEAN) == (ours.server is MEAN)
            assert theirs.tiers["strong"].bundle == ours.tiers["strong"].bundle
            placement = ours.tiers["strong"].place(here.initial, 1)
            averaged = [
                each.update_layout("strong", placement, here.trained).averaged.keys()
                for each in (ours, theirs)
            ]
            assert averaged[0] == averaged[1]
            update = moved(here.initial, 3)
            assert alike(theirs.server.unfolded(update), ours.server.unfolded(update))
        assert len(made.lost()) == 1


@pytest.mark.slow
def test_a_candidate_has_bundles_of_its_own(tmp_path: Path) -> None:
    own: dict[str, Any] = {"algorithm": {"batch": 4, "steps": 2}, "optimizer": {"name": "none"}}
    own |= {"tiers": {"strong": {"devices": ["strong-*"]}}, "rollout": {"algorithm": {"batch": 8}}}
    with TorchProcess(idle_s=PATIENCE_S) as torch_process:
        made = pair(tmp_path, torch_process, **own)
        assert made.there.tiers.keys() == made.here.tiers.keys() == {"strong", "strong@candidate"}
        for name, tier in made.here.tiers.items():
            assert made.there.tiers[name].bundle == tier.bundle
        assert made.there.rules == made.here.rules and made.there.rules.rollout is not None
        made.kill()
        assert made.there.evaluate is not None and made.here.evaluate is not None
        assert made.there.evaluate(made.here.initial) == made.here.evaluate(made.here.initial)


@pytest.mark.slow
def test_a_torch_process_that_nobody_needs_ends() -> None:
    with TorchProcess(idle_s=0.05) as torch_process:
        pid = torch_process.pid
        deadline = time.monotonic() + PATIENCE_S
        while torch_process.pid:
            assert time.monotonic() < deadline, "it goes on"
            time.sleep(0.02)
        wait_until_gone(pid)


@pytest.mark.slow
def test_a_torch_process_ends_with_a_server_that_is_killed() -> None:
    code = (
        "from edgefl_server.torch_process.process import Process\n"
        "print(Process().pid, flush=True)\nimport time\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert not gone(pid)
        server.kill()
        wait_until_gone(pid)


@pytest.mark.slow
def test_one_that_ends_whenever_it_is_asked_is_given_up(run: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is lost where a step is, and nothing else."""
    ends = [sys.executable, "-S", "-c", "import sys; sys.exit(3)"]
    run.kill()
    monkeypatch.setattr(process, "_command", lambda *_: ends)
    with pytest.raises(TorchProcessError, match=r"ended 3 times \(exit code 3\) when .* asked to evaluate"):
        run.torch_process.call(EvaluateRequest(run.here.initial), beside=True)
    assert len(run.lost()) == 3
    with pytest.raises(ServerStepError, match=r"'fedadam' could not be taken: .* asked to optimize"):
        step(run.there, 1)
