"""Trying a bundle's steps ahead of the first round, their forms and threads, on inputs that are random but valid."""

from __future__ import annotations

from collections.abc import Callable

from edgefl_device.engine.base import Engine
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.graph import state_before
from edgefl_device.profile.measure.inputs import Inputs
from edgefl_device.round.tuning import Choice, Tuning, trial


def tuned(
    engine: Engine, folder: BundleFolder, tuning: Tuning, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Choice]:
    """What was found for each step that there is a choice for; kept in ``tuning``, in place of what was known."""
    manifest = folder.manifest
    found: dict[str, Choice] = {}
    steps = {phase.graph for phase in manifest.phases} | {
        bucket.graph for phase in manifest.phases for bucket in phase.shorter
    }
    for graph in manifest.graphs:
        if graph.variants or (graph.name in steps and len(engine.thread_counts) > 1):
            progress(graph.name)
            inputs = Inputs(manifest)
            feeds = inputs.feeds(graph)
            state = state_before(engine, folder, manifest, graph, inputs)
            choice = trial(engine, graph, folder, feeds, state, tuning)
            found |= {} if choice is None else {graph.name: choice}
    return found
