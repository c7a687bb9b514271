"""Benchmarks: speed, memory and size, each measured on real processes and printed with the machine it ran on."""

import os

from edgefl.system.python import child_path

os.environ["PYTHONPATH"] = child_path()  # processes that a benchmark starts find it too
