"""Cases of tasks that an agent declines, and of bundles that it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from edgefl.wire.mqtt.messages import NO_FORMAT, NO_MEMORY, WRONG_DATA, Round
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.play.harness import Play, RoundHarness
from edgefl_conformance.results import expect_equal

DECLINES = CaseGroup("declines")
_OTHER = {"onnx": "executorch", "executorch": "onnx"}


@DECLINES.case("Declines (no-format) a tier that is offered in formats only that its engine does not run.")
def no_format(harness: RoundHarness) -> None:
    def elsewhere(announced: Round) -> Round:
        (offer,) = announced.offers.values()
        return msgspec.structs.replace(announced, offers={_OTHER[harness.setup.engine]: offer})

    _declined(harness, harness.open(change=elsewhere), NO_FORMAT)


@DECLINES.case("Declines (no-format) a bundle that needs a newer release of its engine's runtime.")
def old_runtime(harness: RoundHarness) -> None:
    what = harness.material()
    graphs = tuple(msgspec.structs.replace(graph, least_runtime="999.1") for graph in what.manifest.graphs)
    _declined(harness, harness.open(what.changed(graphs=graphs)), NO_FORMAT)


@DECLINES.case("Declines (no-memory) a bundle that is known to need more memory than it offers.")
def no_memory(harness: RoundHarness) -> None:
    what = harness.material()
    graphs = tuple(msgspec.structs.replace(graph, planned_bytes=1 << 50) for graph in what.manifest.graphs)
    _declined(harness, harness.open(what.changed(graphs=graphs)), NO_MEMORY)


@DECLINES.case("Declines (wrong-data) a bundle whose samples have another shape than its own.")
def wrong_shape(harness: RoundHarness) -> None:
    what = harness.material()
    data = msgspec.structs.replace(what.manifest.data, shape=(7,))
    _declined(harness, harness.open(what.changed(data=data)), WRONG_DATA)


@DECLINES.case("Declines (wrong-data) a bundle of fewer classes than its labels have.")
def wrong_labels(harness: RoundHarness) -> None:
    what = harness.material()
    data = msgspec.structs.replace(what.manifest.data, classes=2)
    _declined(harness, harness.open(what.changed(data=data)), WRONG_DATA)


@DECLINES.case(
    "Says a decline again for a Task, after a new connection and after a restart, and does not work on it."
)
def declines_again(harness: RoundHarness) -> None:
    harness.ensure()
    what = harness.material()
    graphs = tuple(msgspec.structs.replace(graph, planned_bytes=1 << 50) for graph in what.manifest.graphs)
    play = harness.open(what.changed(graphs=graphs))
    reason = harness.decline(play).reason
    mark = harness.server.log.mark()
    harness.server.say(play.task)
    expect_equal("decline.reason", reason, harness.decline(play, since=mark).reason)
    mark = harness.server.log.mark()
    harness.relay.cut()
    harness.hello(mark)
    harness.decline(play, since=mark)
    mark = harness.server.log.mark()
    harness.restart()
    harness.decline(play, since=mark)
    harness.server.say(play.task)
    harness.quiet(mark, "no update for a task that was declined", seconds=0.5)


@DECLINES.case("Refuses a manifest of a version that it does not know.")
def manifest_of_another_version(harness: RoundHarness) -> None:
    _refused(harness, v=2)


@DECLINES.case("Refuses a manifest with a role that it does not know.")
def unknown_role(harness: RoundHarness) -> None:
    _refused(harness, _in_step(_with_scalar("weather.rain", "weather")))


@DECLINES.case("Refuses a graph that asks for a fact about the data that it does not know.")
def unknown_fact(harness: RoundHarness) -> None:
    _refused(harness, _in_step(_with_scalar("data.moon", "data")))


@DECLINES.case("Refuses a manifest that names a graph that it does not list.")
def unlisted_graph(harness: RoundHarness) -> None:
    _refused(harness, finish="nowhere")


@DECLINES.case("Refuses a manifest with a port whose name does not begin with its role.")
def port_of_another_role(harness: RoundHarness) -> None:
    def misnamed(graph: dict[str, Any]) -> None:
        for port in graph["inputs"]:
            port["name"] = port["name"].replace("hyper.", "hyperbole.")

    _refused(harness, _in_step(misnamed))


@DECLINES.case("Refuses a graph whose ports are not those that the manifest lists.")
def other_ports(harness: RoundHarness) -> None:
    def longer(graph: dict[str, Any]) -> None:
        for port in graph["outputs"]:
            if port["role"] == "update":
                port["shape"] = [*port["shape"], 2]

    def finish(fields: dict[str, Any]) -> None:
        for graph in fields["graphs"]:
            if graph["name"] == fields["finish"]:
                longer(graph)

    _refused(harness, finish)


@DECLINES.case(
    "Refuses a graph that reads a scalar for which neither the announcement nor the manifest has a value."
)
def missing_scalar(harness: RoundHarness) -> None:
    _refused(harness, hyper={})


@DECLINES.case("Refuses a bundle that is said to be in its format, and is in another.")
def another_format_inside(harness: RoundHarness) -> None:
    def elsewhere(fields: dict[str, Any]) -> None:
        for graph in fields["graphs"]:
            graph["format"] = _OTHER[harness.setup.engine]

    _refused(harness, elsewhere)


@DECLINES.case("Refuses a manifest with a negative size of a blob.")
def negative_size(harness: RoundHarness) -> None:
    _refused(harness, _in_step(lambda graph: graph["blob"].update(size=-1)))


@DECLINES.case("Refuses a manifest with a negative number of bytes that a graph is known to need.")
def negative_memory(harness: RoundHarness) -> None:
    _refused(harness, _in_step(lambda graph: graph.update(planned_bytes=-5)))


@DECLINES.case("Refuses segments of which one reads what neither the graph has nor an earlier one leaves.")
def segments_that_do_not_fit(harness: RoundHarness) -> None:
    page = {"name": "page.nowhere", "role": "page", "dtype": "float32", "shape": [1]}

    _refused(harness, _in_step(lambda graph: _in_one_segment(graph, page)), v=3)


@DECLINES.case("Refuses a manifest of version 1 with a graph in segments.")
def segments_of_version_1(harness: RoundHarness) -> None:
    _refused(harness, _in_step(_in_one_segment))


@DECLINES.case("Refuses a graph that writes in place what is no state that it reads and returns.")
def wrong_place_of_state(harness: RoundHarness) -> None:
    _refused(harness, _in_step(lambda graph: graph.update(in_place=["state.nowhere"])))


def _with_scalar(name: str, role: str) -> Callable[[dict[str, Any]], None]:
    port = {"name": name, "role": role, "dtype": "float32", "shape": []}
    return lambda graph: graph["inputs"].append(port)


def _in_one_segment(graph: dict[str, Any], *more: dict[str, Any]) -> None:
    graph["segments"] = [{"inputs": [*graph["inputs"], *more], "outputs": graph["outputs"]}]


def _in_step(change: Any) -> Any:
    """Return a change of the manifest that applies ``change`` to the graph of the first phase."""

    def changed(fields: dict[str, Any]) -> None:
        for graph in fields["graphs"]:
            if graph["name"] == fields["phases"][0]["graph"]:
                change(graph)

    return changed


def _declined(harness: RoundHarness, play: Play, reason: str) -> None:
    expect_equal("decline.reason", reason, harness.decline(play).reason)
    harness.quiet(play.mark, "no update for a task that was declined", play.task, seconds=0.2)
    harness.good_round()


def _refused(harness: RoundHarness, change: Any = None, **fields: Any) -> None:
    """Expect no update by a changed manifest, and a correct next round."""
    harness.ensure()
    what = harness.material()
    _, units = harness.offer(what)
    manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(harness.published[-1]))
    if change is not None:
        change(manifest)
    manifest |= fields
    announced = harness.announcement(harness.offered(what.manifest.tier, manifest), units)
    play = harness.give(announced, harness.task(announced, what), what)
    harness.quiet(play.mark, "no update by a bundle that has to be refused")
    time.sleep(harness.patient(0.1))
    harness.good_round()
