"""The page in a real browser: it joins a run with the sample and with photos, shows what happens, and finishes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.browser import Browser
from edgefl.lab.broker import free_port
from tests.agents.web.pages import STATE, TILE, open_page, require_page, until
from tests.conftest import Mosquitto

EDGEFL = [sys.executable, "-m", "edgefl"]
ROUNDS = 2
FEDERATION = f"""
[federation]
name = "garden"
rounds = {ROUNDS}
[model]
name = "mlp"
options = {{ hidden = [16] }}
[algorithm]
batch = 8
steps = 6
lr = 0.05
[data]
name = "digits"
train_samples = 240
test_samples = 100
[tiers.strong]
count = 1
[tiers.weak]
cut = 1
count = 0
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    require_page()
    with Browser() as opened:
        opened.screen(360, 740, phone=True)
        yield opened


class WebRun:
    """``edgefl run --web``, or with ``broker`` ``edgefl server --web``, under way; ``address`` is what a phone scans."""

    def __init__(self, folder: Path, *more: str, broker: str = "") -> None:
        config, out = str(folder / "garden.toml"), str(folder / "out")
        Path(config).write_text(FEDERATION)
        words = (
            ["server", "--config", config, "--broker", broker] if broker else ["run", config, "--seed", "1"]
        )
        self.process = subprocess.Popen(
            [*EDGEFL, *words, "--out", out, "--web", f"127.0.0.1:{free_port()}", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.said: list[str] = []
        while not (self.said and self.said[-1].startswith("phones join at ")):
            self.said.append(self.process.stderr.readline())
            assert self.said[-1], self.said
        self.address = self.said[-1].split()[-1]

    def finish(self) -> str:
        out, errors = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, errors
        return out

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


@contextmanager
def web_run(folder: Path, *more: str, broker: str = "") -> Iterator[WebRun]:
    run = WebRun(folder, *more, broker=broker)
    try:
        yield run
    finally:
        run.stop()


@pytest.mark.slow
def test_a_browser_joins_with_the_sample_and_finishes(tmp_path: Path, browser: Browser) -> None:
    with web_run(tmp_path) as run:
        assert sum("█" in line or "▀" in line for line in run.said) > 15, "the code for a camera"
        problems = open_page(browser, run.address)
        until(browser, f"{STATE} === 'asking'")
        assert browser.value("document.getElementById('federation').textContent") == "garden"
        until(browser, "document.getElementById('code').naturalWidth > 0")
        assert browser.value("self.crossOriginIsolated"), "on this machine http is secure enough"
        browser.value("document.querySelector('[name=tier][value=weak]').focus()")
        browser.press("Tab", 9)
        browser.value("document.querySelector('#join button').focus()")
        browser.press("Enter", 13)

        until(browser, f"{STATE} === 'training'")
        until(browser, f"parseFloat({TILE.format('loss')}) > 0")
        until(browser, f"{TILE.format('tier')} === 'weak'")
        until(browser, f"{TILE.format('step')}.includes('ms')")
        until(browser, f"{TILE.format('memory')}.includes('MB')")
        until(browser, f"{STATE} === 'done'")
        until(
            browser, f"{TILE.format('accepted')} === '{ROUNDS}'"
        )  # the last word may come after the run's end
        assert browser.value(STATE) == "done"
        assert browser.value(f"parseFloat({TILE.format('down')}) > 0 && parseFloat({TILE.format('up')}) > 0")
        assert browser.value("document.querySelector('#chart polyline').getAttribute('points').length") > 10
        assert problems == []
        text = run.finish()
        assert "weak-web-" in text
    assert browser.value("document.documentElement.scrollWidth") <= 360


def photos(folder: Path, names: dict[str, int]) -> list[str]:
    """PNGs in a folder for each class, as a person's phone may have them: larger than the model's, and in colour."""
    import numpy as np
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    for label, count in names.items():
        (folder / label).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 255, (48, 40, 3), dtype=np.uint8)
            out = io.BytesIO()
            Image.fromarray(pixels).save(out, "PNG")
            (folder / label / f"{number}.png").write_bytes(out.getvalue())
            files.append(str(folder / label / f"{number}.png"))
    return files


@pytest.mark.slow
def test_a_browser_trains_on_photos_also_when_reloaded(tmp_path: Path, browser: Browser) -> None:
    files = photos(tmp_path / "pictures", {"3": 12, "7": 12})
    with web_run(tmp_path) as run:
        open_page(browser, run.address)
        until(browser, f"{STATE} === 'asking'")
        browser.value("document.querySelector('[name=data][value=photos]').click()")
        browser.value("document.querySelector('#join button').click()")
        until(browser, "document.getElementById('problem').textContent.startsWith('Choose photos')")
        browser.choose("[name=folder]", str(tmp_path / "pictures"))
        until(browser, "document.getElementById('picked').textContent === '3 12, 7 12'")
        assert len(files) == 24
        name = browser.value("document.querySelector('[name=id]').value")
        browser.value("document.querySelector('#join button').click()")
        until(browser, f"{STATE} === 'training'")

        open_page(browser, run.address)
        until(browser, f"['waiting', 'training', 'done'].includes({STATE})")
        until(browser, f"{STATE} === 'done'")
        assert browser.value("JSON.parse(localStorage['edgefl/garden']).id") == name
        assert name in run.finish()


@pytest.mark.slow
def test_a_page_goes_on_with_the_next_run(tmp_path: Path, browser: Browser) -> None:
    with web_run(tmp_path, "--rounds", "400") as run:
        open_page(browser, run.address)
        until(browser, f"{STATE} === 'asking'")
        browser.value("document.querySelector('#join button').click()")
        until(browser, f"{TILE.format('accepted')} !== '0'")
        run.stop()
        until(browser, "document.getElementById('doing').textContent.startsWith('The run is over, or')")
    port = run.address.split(":")[2].partition("/")[0]
    accepted = int(browser.value(TILE.format("accepted")))
    with web_run(tmp_path, "--rounds", "400", "--web", f"127.0.0.1:{port}") as again:
        assert again.address == run.address, "the secret stays with the run"
        until(browser, f"parseInt({TILE.format('accepted')}) > {accepted}")


@pytest.mark.slow
def test_a_browser_trains_alone(tmp_path: Path, browser: Browser, own_mosquitto: Mosquitto) -> None:
    with web_run(tmp_path, broker=str(own_mosquitto.address)) as run:
        problems = open_page(browser, run.address)
        until(browser, f"{STATE} === 'asking'")
        browser.value("document.querySelector('#join button').click()")
        until(browser, f"{STATE} === 'done' && {TILE.format('accepted')} === '{ROUNDS}'")
        assert browser.value(STATE) == "done" and problems == []
        run.finish()
    rounds = [
        json.loads(line) for line in (tmp_path / "out" / "history.jsonl").read_text().splitlines() if line
    ]
    assert [(each["outcome"], each["reports"]) for each in rounds] == [("closed", 1)] * ROUNDS
    assert (tmp_path / "out" / "model.safetensors").is_file()
