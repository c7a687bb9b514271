"""The pictures of docs/fleets/dashboard.md, taken anew in headless Chromium: python tools/dashboard_pictures.py [FOLDER]

The run is made up, as for `python -m benchmarks dashboard`; the bundles of a run in FOLDER, such as that of `make demo`,
give the tiers their planned memory.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from benchmarks.browser import Browser
from benchmarks.dashboard import SyntheticRun, served
from edgefl_server.events import DeviceLost

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_COLOURS = 96
_SIZES = {"light": (1200, 1000), "dark": (1200, 1000), "phone": (390, 844)}


def main(bundles: Path | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if bundles is not None:
            shutil.copytree(bundles / "bundles", folder / "bundles")
        made = SyntheticRun(folder, devices=120, rounds=30)
        made.write_past()
        made.open_round(31)
        for event in made.progress(31, 412):
            made.feed.take(event)
        for device in made.names[::17]:
            made.feed.take(DeviceLost(device=device, tier=device.partition("-")[0], round=31))
        made.close()
        with served(folder) as (url, _), Browser() as browser:
            for kind, (width, height) in _SIZES.items():
                browser.screen(width, height, dark=kind == "dark", phone=kind == "phone")
                browser.open(url)
                browser.until("document.querySelectorAll('.chart canvas').length > 5")
                if kind == "dark":
                    browser.value("document.getElementById('fleet').scrollIntoView()")
                time.sleep(0.5)  # for the charts to be drawn
                _save(PICTURES / f"dashboard-{kind}.png", browser.picture())


def _save(path: Path, data: bytes) -> None:
    image = Image.open(io.BytesIO(data)).convert("RGB").quantize(_COLOURS)
    image.save(path, optimize=True)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
