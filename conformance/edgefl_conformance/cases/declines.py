"""Cases of tasks that an agent declines, and of bundles that it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from edgefl.wire.mqtt.messages import NO_FORMAT, NO_MEMORY, WRONG_DATA, Round
from edgefl_conformance.case import Group
from edgefl_conformance.play.stage import Play, Stage
from edgefl_conformance.verdict import expect_equal

DECLINES = Group("declines")
_OTHER = {"onnx": "executorch", "executorch": "onnx"}


@DECLINES.case("Declines (no-format) a tier that is offered in formats only that its engine does not run.")
def no_format(stage: Stage) -> None:
    def elsewhere(announced: Round) -> Round:
        (offer,) = announced.offers.values()
        return msgspec.structs.replace(announced, offers={_OTHER[stage.setup.engine]: offer})

    _declined(stage, stage.open(change=elsewhere), NO_FORMAT)


@DECLINES.case("Declines (no-format) a bundle that needs a newer release of its engine's runtime.")
def old_runtime(stage: Stage) -> None:
    what = stage.material()
    graphs = tuple(msgspec.structs.replace(graph, least_runtime="999.1") for graph in what.manifest.graphs)
    _declined(stage, stage.open(what.changed(graphs=graphs)), NO_FORMAT)


@DECLINES.case("Declines (no-memory) a bundle that is known to need more memory than it offers.")
def no_memory(stage: Stage) -> None:
    what = stage.material()
    graphs = tuple(msgspec.structs.replace(graph, planned_bytes=1 << 50) for graph in what.manifest.graphs)
    _declined(stage, stage.open(what.changed(graphs=graphs)), NO_MEMORY)


@DECLINES.case("Declines (wrong-data) a bundle whose samples have another shape than its own.")
def wrong_shape(stage: Stage) -> None:
    what = stage.material()
    data = msgspec.structs.replace(what.manifest.data, shape=(7,))
    _declined(stage, stage.open(what.changed(data=data)), WRONG_DATA)


@DECLINES.case("Declines (wrong-data) a bundle of fewer classes than its labels have.")
def wrong_labels(stage: Stage) -> None:
    what = stage.material()
    data = msgspec.structs.replace(what.manifest.data, classes=2)
    _declined(stage, stage.open(what.changed(data=data)), WRONG_DATA)


@DECLINES.case(
    "Says a decline again for a Task, after a new connection and after a restart, and does not work on it."
)
def declines_again(stage: Stage) -> None:
    stage.ensure()
    what = stage.material()
    graphs = tuple(msgspec.structs.replace(graph, planned_bytes=1 << 50) for graph in what.manifest.graphs)
    play = stage.open(what.changed(graphs=graphs))
    reason = stage.decline(play).reason
    mark = stage.server.log.mark()
    stage.server.say(play.task)
    expect_equal("decline.reason", reason, stage.decline(play, since=mark).reason)
    mark = stage.server.log.mark()
    stage.relay.cut()
    stage.hello(mark)
    stage.decline(play, since=mark)
    mark = stage.server.log.mark()
    stage.restart()
    stage.decline(play, since=mark)
    stage.server.say(play.task)
    stage.quiet(mark, "no update for a task that was declined", seconds=0.5)


@DECLINES.case("Refuses a manifest of a version that it does not know.")
def manifest_of_another_version(stage: Stage) -> None:
    _refused(stage, v=2)


@DECLINES.case("Refuses a manifest with a role that it does not know.")
def unknown_role(stage: Stage) -> None:
    _refused(stage, _in_step(_with_scalar("weather.rain", "weather")))


@DECLINES.case("Refuses a graph that asks for a fact about the data that it does not know.")
def unknown_fact(stage: Stage) -> None:
    _refused(stage, _in_step(_with_scalar("data.moon", "data")))


@DECLINES.case("Refuses a manifest that names a graph that it does not list.")
def unlisted_graph(stage: Stage) -> None:
    _refused(stage, finish="nowhere")


@DECLINES.case("Refuses a manifest with a port whose name does not begin with its role.")
def port_of_another_role(stage: Stage) -> None:
    def misnamed(graph: dict[str, Any]) -> None:
        for port in graph["inputs"]:
            port["name"] = port["name"].replace("hyper.", "hyperbole.")

    _refused(stage, _in_step(misnamed))


@DECLINES.case("Refuses a graph whose ports are not those that the manifest lists.")
def other_ports(stage: Stage) -> None:
    def longer(graph: dict[str, Any]) -> None:
        for port in graph["outputs"]:
            if port["role"] == "update":
                port["shape"] = [*port["shape"], 2]

    def finish(fields: dict[str, Any]) -> None:
        for graph in fields["graphs"]:
            if graph["name"] == fields["finish"]:
                longer(graph)

    _refused(stage, finish)


@DECLINES.case(
    "Refuses a graph that reads a scalar for which neither the announcement nor the manifest has a value."
)
def missing_scalar(stage: Stage) -> None:
    _refused(stage, hyper={})


@DECLINES.case("Refuses a bundle that is said to be in its format, and is in another.")
def another_format_inside(stage: Stage) -> None:
    def elsewhere(fields: dict[str, Any]) -> None:
        for graph in fields["graphs"]:
            graph["format"] = _OTHER[stage.setup.engine]

    _refused(stage, elsewhere)


@DECLINES.case("Refuses a manifest with a negative size of a blob.")
def negative_size(stage: Stage) -> None:
    _refused(stage, _in_step(lambda graph: graph["blob"].update(size=-1)))


@DECLINES.case("Refuses a manifest with a negative number of bytes that a graph is known to need.")
def negative_memory(stage: Stage) -> None:
    _refused(stage, _in_step(lambda graph: graph.update(planned_bytes=-5)))


@DECLINES.case("Refuses segments of which one reads what neither the graph has nor an earlier one leaves.")
def segments_that_do_not_fit(stage: Stage) -> None:
    page = {"name": "page.nowhere", "role": "page", "dtype": "float32", "shape": [1]}

    _refused(stage, _in_step(lambda graph: _in_one_segment(graph, page)), v=3)


@DECLINES.case("Refuses a manifest of version 1 with a graph in segments.")
def segments_of_version_1(stage: Stage) -> None:
    _refused(stage, _in_step(_in_one_segment))


@DECLINES.case("Refuses a graph that writes in place what is no state that it reads and returns.")
def wrong_place_of_state(stage: Stage) -> None:
    _refused(stage, _in_step(lambda graph: graph.update(in_place=["state.nowhere"])))


def _with_scalar(name: str, role: str) -> Callable[[dict[str, Any]], None]:
    port = {"name": name, "role": role, "dtype": "float32", "shape": []}
    return lambda graph: graph["inputs"].append(port)


def _in_one_segment(graph: dict[str, Any], *more: dict[str, Any]) -> None:
    graph["segments"] = [{"inputs": [*graph["inputs"], *more], "outputs": graph["outputs"]}]


def _in_step(change: Any) -> Any:
    """``change`` for the graph of the first phase."""

    def changed(fields: dict[str, Any]) -> None:
        for graph in fields["graphs"]:
            if graph["name"] == fields["phases"][0]["graph"]:
                change(graph)

    return changed


def _declined(stage: Stage, play: Play, reason: str) -> None:
    expect_equal("decline.reason", reason, stage.decline(play).reason)
    stage.quiet(play.mark, "no update for a task that was declined", play.task, seconds=0.2)
    stage.good_round()


def _refused(stage: Stage, change: Any = None, **fields: Any) -> None:
    """No update comes by such a manifest; the agent is there for the next round."""
    stage.ensure()
    what = stage.material()
    _, units = stage.offer(what)
    manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(stage.published[-1]))
    if change is not None:
        change(manifest)
    manifest |= fields
    announced = stage.announcement(stage.offered(what.manifest.tier, manifest), units)
    play = stage.give(announced, stage.task(announced, what), what)
    stage.quiet(play.mark, "no update by a bundle that has to be refused")
    time.sleep(stage.patient(0.1))
    stage.good_round()
