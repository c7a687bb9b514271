"""The pictures of docs/agents/web.md, taken anew in headless Chromium while a run trains: python tools/web_pictures.py"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.browser import Browser
from edgefl.lab.broker import free_port

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_COLOURS = 96
_POINTS = "document.querySelector('#chart polyline')?.getAttribute('points').split(' ').length > {}"
FEDERATION = """
[federation]
name = "garden"
rounds = 30
[model]
name = "resnet8"
[algorithm]
batch = 16
steps = 12
lr = 0.05
[data]
name = "digits"
[tiers.strong]
count = 1
[tiers.weak]
cut = 3
count = 0
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "garden.toml").write_text(FEDERATION)
        command = [
            sys.executable,
            "-m",
            "edgefl",
            "run",
            str(folder / "garden.toml"),
            "--out",
            str(folder / "out"),
        ]
        command += ["--web", f"127.0.0.1:{free_port()}"]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            with Browser() as browser:
                _take(browser, _address(run))
        finally:
            run.terminate()
            run.communicate()


def _address(run: subprocess.Popen[str]) -> str:
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith("phones join at "):
            return line.split()[-1]
    raise SystemExit("the run ended before its page was there")


def _take(browser: Browser, address: str) -> None:
    browser.screen(390, 844, phone=True)
    while browser.value("document.body?.dataset.state") != "asking":
        browser.open("about:blank")
        browser.open(address)
        browser.value("new Promise(done => setTimeout(done, 500))")
    _save("web-join.png", browser.picture())
    browser.value("document.querySelector('#join button').click()")
    browser.until(_POINTS.format(20))
    _save("web-light.png", browser.picture())
    browser.screen(390, 844, dark=True, phone=True)
    browser.until(_POINTS.format(30))
    _save("web-dark.png", browser.picture())


def _save(name: str, data: bytes) -> None:
    path = PICTURES / name
    Image.open(io.BytesIO(data)).convert("RGB").quantize(_COLOURS).save(path, optimize=True)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
