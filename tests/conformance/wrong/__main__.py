"""Run `edgefl device` with a fault: the first argument names a module of this package and a function, which plants it."""

from __future__ import annotations

import importlib
import sys

from edgefl.cli import main

module, _, fault = sys.argv.pop(1).partition(".")
getattr(importlib.import_module(f"tests.conformance.wrong.{module}"), fault)()
main()
