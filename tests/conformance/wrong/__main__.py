"""Run `edgefl device` with a fault: the first argument is a module of this package, whose ``plant`` does one thing wrong."""

from __future__ import annotations

import importlib
import sys

from edgefl.cli import main

importlib.import_module(f"tests.conformance.wrong.{sys.argv[1]}").plant()
del sys.argv[1]
main()
