"""The device of the tutorial as an agent for the kit: it takes four of the options, and passes the rest over."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "small_device.py"


def main() -> None:
    parser = argparse.ArgumentParser()
    names = ("--id", "--broker", "--federation", "--data")
    for name in names:
        parser.add_argument(name)
    given, _ = parser.parse_known_args()
    sys.argv = [str(EXAMPLE), *(word for name in names for word in (name, getattr(given, name[2:])))]
    spec = importlib.util.spec_from_file_location("small_device", EXAMPLE)
    assert spec is not None and spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    device.main()


if __name__ == "__main__":
    main()
