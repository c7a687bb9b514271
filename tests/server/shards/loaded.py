"""Imported by the process that workers are forked from: what a worker loads when it takes its first update."""

from __future__ import annotations

import numpy as np

from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.shards import worker
from edgefl_server.workers import process

assert process and worker  # all that a worker imports
_WEIGHTS = {"any": np.zeros(1, np.float32)}
_aggregator = Aggregator(layout_of(_WEIGHTS), weight_limit=1, device="cpu", threads=1)
_aggregator.add(_aggregator.check(_WEIGHTS, {"any": None}), 1)
_aggregator.partial()
