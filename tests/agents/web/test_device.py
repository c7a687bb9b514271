"""A device in Chromium beside one of Python: they train one model, and whatever happens to the browser changes no weight."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents.web import vectors
from tests.agents.web.fleet import ROUNDS, Browser, Trained, require_browser, train
from tests.conftest import BrokerProcess
from tests.e2e.shared import made_once

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory, mosquitto: BrokerProcess) -> Trained:
    """The run that nobody disturbs."""
    require_browser()
    with made_once(tmp_path_factory, "browser") as folder:
        return train(folder / str(time.time_ns()), mosquitto.address, f"calm-{time.time_ns()}")


def killed_launcher(browser: Browser) -> None:
    browser.under_way()
    browser.kill()
    browser.start()


def killed_tab(browser: Browser) -> None:
    browser.under_way()
    browser.kill_tab()
    browser.wait_until(lambda: len(browser.said("online")) > 1, "new tab")


def reload_while_sending(browser: Browser) -> None:
    browser.relay.hold_after(4)
    browser.wait_until(browser.relay.is_holding, "update under way")
    browser.reload()
    time.sleep(0.5)  # what the old page still sends is held, too
    browser.relay.release()


def cut_while_sending(browser: Browser) -> None:
    browser.relay.hold_after(4)
    browser.wait_until(browser.relay.is_holding, "update under way")
    browser.relay.cut()
    browser.relay.release()


def test_the_vectors_of_the_browser_agents_own_tests_are_the_references() -> None:
    assert vectors.FILE.read_text() == vectors.text()


def test_a_browser_and_a_python_device_train_one_model(calm: Trained) -> None:
    assert [(each.outcome, each.reports, each.rejected) for each in calm.rounds] == [
        ("closed", 2, 0)
    ] * ROUNDS
    assert calm.code == 0
    assert [event["details"]["steps"] for event in calm.events if event["event"] == "round"] == [40] * ROUNDS
    said = [event["event"] for event in calm.events]
    assert (said.count("accepted"), said.count("done"), said.count("rejected")) == (ROUNDS, 1, 0)


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(cut_while_sending, marks=pytest.mark.slow),
        pytest.param(killed_launcher, marks=pytest.mark.slow),
        pytest.param(killed_tab, marks=pytest.mark.slow),
        pytest.param(reload_while_sending, marks=pytest.mark.slow),
    ],
    ids=lambda disturb: disturb.__name__,
)
def test_a_disturbed_browser_changes_no_weights(
    calm: Trained,
    tmp_path: Path,
    mosquitto: BrokerProcess,
    federation: str,
    disturb: Callable[[Browser], None],
) -> None:
    run = train(tmp_path / "run", mosquitto.address, federation, disturb)

    assert [(each.outcome, each.reports, each.rejected) for each in run.rounds] == [("closed", 2, 0)] * ROUNDS
    assert run.weights == calm.weights


@pytest.mark.slow
def test_a_browser_runs_the_frozen_units_chunk_by_chunk(
    calm: Trained, tmp_path: Path, mosquitto: BrokerProcess, federation: str
) -> None:
    run = train(tmp_path / "run", mosquitto.address, federation, browsers="weak")

    assert [(each.outcome, each.reports, each.rejected) for each in run.rounds] == [("closed", 2, 0)] * ROUNDS
    assert run.rounds[-1].train_loss == pytest.approx(calm.rounds[-1].train_loss, rel=1e-2)
