"""A whole device between rounds: what it takes up, what it drops aloud, and the task that it declines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.errors import RoundDeclined
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Manifest, PhaseSpec
from edgefl.wire.mqtt.messages import Decline
from edgefl_device.round.carry import NO_CARRY, RestoredCarry, StoredCarry, drop_abandoned, restore_carry
from edgefl_device.round.job import Job, encode_job
from edgefl_device.store.database import DECLINED, Outgoing, PastRound, Store
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent, store_of
from tests.device_runtime.agent.scripted import RunningAgent, ScriptedServer, weights_of
from tests.device_runtime.store.stores import open_store
from tests.device_runtime.tiny import World
from tests.support.device_logs import RecordedLog


def world_with(*, without_carry: bool = False, **changes: object) -> World:
    """The tiny round, its manifest changed; ``without_carry``: its start begins from the weights alone."""
    bundle = tiny.make_bundle()
    blobs, graphs = dict(bundle.blobs), bundle.manifest.graphs
    if without_carry:
        old = bundle.manifest.graph("start")
        inputs = tuple(port for port in old.inputs if port.role != "carry")
        nodes = [
            tiny.node("Identity", "weights.head.w", f"out.{tiny.W.name}"),
            tiny.node("Sub", "weights.head.w weights.head.w", f"out.{tiny.V.name}"),
            tiny.node("Identity", "zero", f"out.{tiny.COUNT.name}"),
        ]
        data = tiny.onnx_bytes(nodes, inputs, old.outputs, ["zero"])
        start = tiny.graph_of("start", data, inputs, old.outputs)
        blobs[start.blob.sha256] = data
        graphs = tuple(start if graph.name == "start" else graph for graph in graphs)
    return World(BundleArchive(msgspec.structs.replace(bundle.manifest, graphs=graphs, **changes), blobs))


def needing(**changes: object) -> World:
    return world_with(carry_needed=True, **changes)


def play(server: ScriptedServer, agent: RunningAgent, world: World, number: int, base: int) -> tiny.Array:
    """One round from its announcement to its acknowledgement; the trained weights."""
    server.open(world, number=number, base=base)
    update = server.update(number)
    server.ack(update)
    agent.event("accepted")
    return weights_of(update)["head.w"]


def trained(world: World, carry: tiny.Array | None = None) -> tuple[tiny.Array, tiny.Array]:
    weights, left, _ = tiny.expected_round(world, world.job(), tiny.ROWS, carry)
    return weights, left


# -- taken up, or dropped aloud --------------------------------------------------------------------------------


def test_after_an_abandoned_round_the_last_goes_on(
    server: ScriptedServer, start: StartAgent, world: World
) -> None:
    agent = start()
    play(server, agent, world, 1, base=0)
    play(server, agent, world, 2, base=1)

    server.open(world, number=3, base=1)
    told = agent.event("carry")
    again = weights_of(server.update(3))["head.w"]

    assert (told.details["round"], told.details["run"]) == (2, "run")
    assert "round 2 was abandoned" in told.text

    _, left = trained(world)
    np.testing.assert_allclose(again, trained(world, left)[0], rtol=1e-5)


def test_a_job_of_a_killed_process_takes_up_the_carry_that_it_began_with(
    server: ScriptedServer, start: StartAgent, world: World, tmp_path: Path
) -> None:
    agent = start()
    play(server, agent, world, 1, base=0)
    agent.stop()
    store = store_of(tmp_path)
    job = msgspec.structs.replace(world.job(), round=2, nonce="n2", base=1)
    store.open_job(encode_job(job))
    store.close()

    start()
    server.open(world, number=2, base=1)

    _, left = trained(world)
    np.testing.assert_allclose(weights_of(server.update(2))["head.w"], trained(world, left)[0], rtol=1e-5)


# -- declined --------------------------------------------------------------------------------------------------


def test_a_device_without_needed_carry_declines(
    server: ScriptedServer, start: StartAgent, tmp_path: Path
) -> None:
    agent = start()
    server.open(needing(), number=4, base=3)

    decline = server.decline()

    assert (decline.round, decline.nonce, decline.reason) == (4, "n4", "no-carry")
    said = agent.event("round", "declined")
    assert said.event == "declined" and "noisy-sgd" in said.text
    agent.stop()
    store = store_of(tmp_path)
    assert store.job() is None
    assert [(past.outcome, past.reason) for past in store.history()] == [(DECLINED, "no-carry")]


def test_the_same_task_is_declined_again_unread(server: ScriptedServer, start: StartAgent) -> None:
    agent, world = start(), needing()
    server.open(world, number=4, base=3)
    first = server.decline()

    server.assign(world.task(number=4))

    assert server.decline() == first
    assert agent.event("round", "declined").event == "declined"
    server.open(world_with(), number=5, base=3)
    assert agent.event("round", "declined").event == "round"


def test_restarted_servers_and_devices_hear_the_decline(server: ScriptedServer, start: StartAgent) -> None:
    agent, world = start(), needing()
    server.open(world, number=4, base=3)
    first = server.decline()
    server.announce(world.announcement(number=4, base=3))
    assert server.decline() == first

    agent.stop()
    again = start()

    assert server.decline() == first
    again.stop()
    seen = [again.events.get_nowait().event for _ in range(again.events.qsize())]
    assert "online" in seen and not {"round", "declined"} & set(seen)


def test_a_killed_device_declines_later(server: ScriptedServer, start: StartAgent, tmp_path: Path) -> None:
    world = needing()
    store = store_of(tmp_path)
    store.open_job(encode_job(msgspec.structs.replace(world.job(), round=4, nonce="n4", base=3)))
    store.close()

    start()
    server.hello()
    server.publish_blobs(world)
    server.announce(world.announcement(number=4, base=3))

    assert server.decline().nonce == "n4"


def test_an_exchange_without_carry_prepares_the_next(server: ScriptedServer, start: StartAgent) -> None:
    """A method's opening exchange makes what the others need."""
    agent = start()
    opening, later = needing(without_carry=True, carry_exchanges=1), needing(carry_exchanges=1)
    _, left = trained(opening)

    play(server, agent, opening, 1, base=0)
    second = play(server, agent, later, 2, base=1)

    np.testing.assert_allclose(second, trained(later, left)[0], rtol=1e-5)
    server.open(later, number=4, base=3)
    assert server.decline() == Decline(round=4, nonce="n4", reason="no-carry")
    assert agent.event("declined").text.endswith(
        "algorithm 'noisy-sgd' continues from an earlier round, and this device has nothing that "
        "round 4 can continue from: it was good for 1 completed round after it, and round 3 is completed"
    )


# -- which carry a round goes on from --------------------------------------------------------------------------


WORLD = World(tiny.make_bundle())
NAME = "run/noisy-sgd/weak"


class Home:
    """A device's store, and what people were told."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = open_store(folder)
        self.log = RecordedLog()
        self.told = self.log.texts

    def leave(self, number: int, outcome: str = "accepted", *, name: str = NAME, v: object = None) -> None:
        """Round ``number`` was trained; its carry holds the number unless ``v`` says otherwise."""
        value = np.full(tiny.V.shape, number, np.float32) if v is None else np.asarray(v)
        self.leave_bytes(number, tensors.dump({"v": value}), outcome, name=name)

    def leave_bytes(self, number: int, data: bytes, outcome: str = "accepted", *, name: str = NAME) -> None:
        run = name.partition("/")[0]
        nonce = f"{run}{number}"
        self.store.finish_job(Outgoing(run, number, nonce, b"update"), data, name)
        self.hear(number, outcome, run=run)

    def hear(self, number: int, outcome: str, *, run: str = "run") -> None:
        if outcome:
            past = PastRound(run=run, round=number, tier="weak", nonce=f"{run}{number}", outcome=outcome)
            self.store.settle(past)

    def begin(self, number: int, base: int, manifest: Manifest = WORLD.bundle.manifest) -> RestoredCarry:
        return restore_carry(self.store, job(number, base), manifest, self.log)

    def value(self, number: int, base: int, manifest: Manifest = WORLD.bundle.manifest) -> float | None:
        """What round ``number`` goes on from, as its one value; None: from zeros."""
        taken = self.begin(number, base, manifest)
        return float(taken.arrays["v"][0, 0]) if taken.arrays else None

    @property
    def rounds(self) -> list[int]:
        return [kept.round for kept in self.store.carries()]


def job(number: int, base: int) -> Job:
    return msgspec.structs.replace(WORLD.job(), round=number, base=base, nonce=f"run{number}")


def listed(**changes: object) -> Manifest:
    return msgspec.structs.replace(WORLD.bundle.manifest, **changes)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.store.close()


# -- rounds that are completed, abandoned or not known ---------------------------------------------------------


def test_a_round_goes_on_from_the_newest_carry_of_a_completed_one(home: Home) -> None:
    home.leave(1)
    home.leave(2)

    assert home.value(3, base=2) == 2
    assert home.rounds == [2]
    assert home.told == []


@pytest.mark.parametrize("outcome", ["accepted", ""])
def test_the_accepted_carry_of_an_abandoned_round_is_void(home: Home, outcome: str) -> None:
    home.leave(1)
    home.leave(2, outcome)

    assert home.value(3, base=1) == 1
    assert home.rounds == [1]
    assert home.told == [
        "what this device kept of round 2 of run run is dropped: round 2 was abandoned; round 3 continues from what was "
        "kept of round 1 of run run (task run1)"
    ]


def test_the_first_round_abandoned_leaves_nothing(home: Home) -> None:
    home.leave(1)

    assert home.value(2, base=0) is None
    assert home.rounds == []
    assert home.told[0].endswith("round 1 was abandoned; round 2 begins from zeros")


def test_the_carry_before_a_waiting_update_stays(home: Home) -> None:
    home.leave(1)
    home.leave(2, "")
    assert home.value(3, base=2) == 2
    assert home.rounds == [1, 2]

    home.hear(2, "rejected")

    assert home.value(3, base=2) == 1


def test_a_round_that_is_begun_again_takes_up_the_same(home: Home) -> None:
    home.leave(1)
    home.leave(2)

    first = home.begin(3, base=2)

    assert home.begin(3, base=2).origin == first.origin


def test_no_more_than_two_carries_are_kept_over_rounds(home: Home) -> None:
    for number in range(1, 8):
        home.value(number, base=number - 1)
        home.leave(number)
        assert len(home.rounds) <= 2


def test_who_sits_rounds_out_still_learns_which_one_was_abandoned(home: Home) -> None:
    """Round 2 was abandoned; this device had no task in 3, which was completed."""
    home.leave(1)
    home.leave(2)
    drop_abandoned(home.store, WORLD.announcement(number=3, base=1), home.log)

    assert home.value(4, base=3) == 1
    assert "round 2 was abandoned" in home.told[0]


@pytest.mark.parametrize("announced", [{"base": 2}, {"base": 1, "state": "closed"}, {"base": 1, "run": "x"}])
def test_other_announcements_drop_nothing(home: Home, announced: dict[str, object]) -> None:
    home.leave(1)
    home.leave(2)

    drop_abandoned(home.store, WORLD.announcement(number=3, **announced), home.log)  # type: ignore[arg-type]

    assert (home.rounds, home.told) == ([1, 2], [])


# -- how long a carry is good ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchanges", "base", "good"), [(1, 2, True), (1, 3, False), (2, 3, True), (2, 4, False), (0, 99, True)]
)
def test_a_carry_is_good_for_completed_rounds(home: Home, exchanges: int, base: int, good: bool) -> None:
    home.leave(2)

    value = home.value(base + 1, base, listed(carry_exchanges=exchanges))

    assert value == (2 if good else None)
    assert home.rounds == ([2] if good else [])


def test_abandoned_rounds_do_not_count_against_a_carry(home: Home) -> None:
    home.leave(2)

    assert home.value(9, base=2, manifest=listed(carry_exchanges=1)) == 2


@pytest.mark.parametrize(("exchanges", "rounds"), [(1, "1 completed round"), (2, "2 completed rounds")])
def test_a_carry_that_is_too_old_is_dropped_and_told_once(home: Home, exchanges: int, rounds: str) -> None:
    home.leave(1)
    home.leave(2)

    for _ in range(2):
        assert home.value(6, base=5, manifest=listed(carry_exchanges=exchanges)) is None

    assert home.rounds == []
    assert home.told == [
        f"what this device kept of round 2 of run run is dropped: it was good for {rounds} after it, and round 5 "
        "is completed; round 6 begins from zeros"
    ]


# -- other runs, algorithms and graphs -------------------------------------------------------------------------


def test_what_other_runs_left_is_dropped_and_told(home: Home) -> None:
    home.leave(7, name="former/noisy-sgd/weak")
    home.leave(8, name="former/noisy-sgd/weak")
    home.leave(1)

    assert home.value(2, base=1) == 1

    assert home.rounds == [1]
    assert len(home.told) == 1
    assert "of run former is dropped: it belongs to another run, run goes on now" in home.told[0]


def test_a_run_whose_name_begins_like_another_is_another(home: Home) -> None:
    home.leave(1, name="run2/noisy-sgd/weak")

    assert home.value(2, base=1) is None
    assert home.rounds == []


def test_what_other_tiers_and_algorithms_of_the_run_left_stays(home: Home) -> None:
    home.leave(1, name="run/noisy-sgd/strong")
    home.leave(2, name="run/other/weak")

    assert home.value(3, base=2) is None
    assert (home.rounds, home.told) == ([1, 2], [])


# -- a device that changed its tier ----------------------------------------------------------------------------

ANY_TIER = listed(carry_any_tier=True)
STRONG, HUGE = "run/noisy-sgd/strong", "run/noisy-sgd/huge"


def test_a_carry_of_another_tier_is_used_only_if_the_manifest_permits_it(home: Home) -> None:
    home.leave(1, name=STRONG)

    assert home.value(2, base=1) is None
    assert home.value(2, base=1, manifest=ANY_TIER) == 1
    assert (home.rounds, home.told) == ([1], [])


def test_the_newest_carry_of_any_tier_that_fits_is_used(home: Home) -> None:
    home.leave(1)
    home.leave(2, name=STRONG)
    home.leave(3, name=HUGE, v=np.zeros((5, 1)))

    assert home.value(4, base=3, manifest=ANY_TIER) == 2
    assert (home.rounds, home.told) == ([1, 2, 3], [])

    home.leave(4)
    assert home.value(5, base=4, manifest=ANY_TIER) == 4


def test_an_abandoned_carry_of_another_tier_is_not_used(home: Home) -> None:
    home.leave(1, name=STRONG)
    home.leave(2, "", name=STRONG)

    assert home.value(3, base=1, manifest=ANY_TIER) == 1


@pytest.mark.parametrize("name", ["run/other/strong", "former/noisy-sgd/strong", "run/noisy-sgd/a/strong"])
def test_carries_of_other_runs_and_algorithms_are_not_used(home: Home, name: str) -> None:
    home.leave(1, name=name)

    assert home.value(2, base=1, manifest=ANY_TIER) is None


def test_an_expired_carry_of_another_tier_is_not_used(home: Home) -> None:
    home.leave(1, name=STRONG)

    assert home.value(3, base=2, manifest=listed(carry_any_tier=True, carry_exchanges=1)) is None


WRONG = {
    "shape": (
        tensors.dump({"v": np.zeros((5, 1), np.float32)}),
        r"carry.v should be float32 (3, 1), found float32 (5, 1)",
    ),
    "dtype": (tensors.dump({"v": np.zeros((3, 1), np.float64)}), r"found float64 (3, 1)"),
    "name": (tensors.dump({"w": np.zeros((3, 1), np.float32)}), r"now reads ['v'], which it does not hold"),
    "bytes": (b"\xc1 damaged", "not valid safetensors"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_carry_that_does_not_fit_is_dropped(home: Home, case: str) -> None:
    data, why = WRONG[case]
    home.leave(1)
    home.leave_bytes(2, data, "")

    assert home.value(3, base=2) is None

    assert home.rounds == []
    [told] = home.told
    assert why in told and told.endswith("round 3 begins from zeros")


def test_a_carry_may_hold_more_than_this_exchange_reads(home: Home) -> None:
    more = tensors.dump({"v": np.ones(tiny.V.shape, np.float32), "later": np.zeros(2, np.float32)})
    home.leave_bytes(1, more)

    assert home.value(2, base=1) == 1


class RejectedMeanwhile(Store):
    """The outbox thread hears the server's word on round 2 just before its carry is read."""

    def carry(self, carry: StoredCarry) -> bytes | None:
        if carry.round == 2:
            self.settle(PastRound(run="run", round=2, tier="weak", nonce="run2", outcome="rejected"))
        return super().carry(carry)


def test_a_carry_that_is_rejected_while_it_is_read_is_not_used(home: Home, tmp_path: Path) -> None:
    home.leave(1)
    home.leave(2, "")
    home.store.close()
    home.store = RejectedMeanwhile(tmp_path, limit_bytes=1000, history_rounds=5)

    assert home.value(3, base=2) == 1


# -- algorithms that need their carry --------------------------------------------------------------------------


def test_an_algorithm_that_needs_its_carry_declines_without_one(home: Home) -> None:
    with pytest.raises(
        RoundDeclined,
        match=r"algorithm 'noisy-sgd' continues from .* nothing that round 3 can continue from$",
    ) as caught:
        home.begin(3, base=2, manifest=listed(carry_needed=True))

    assert caught.value.reason == NO_CARRY


def test_an_algorithm_that_needs_its_carry_declines_an_old_one(home: Home) -> None:
    home.leave(1)

    with pytest.raises(
        RoundDeclined, match=r"good for 1 completed round after it, and round 2 is completed$"
    ):
        home.begin(3, base=2, manifest=listed(carry_needed=True, carry_exchanges=1))

    assert home.told[0].endswith("this device declines round 3")


def test_an_algorithm_that_needs_its_carry_takes_part_with_one(home: Home) -> None:
    home.leave(2)

    assert home.value(3, base=2, manifest=listed(carry_needed=True, carry_exchanges=1)) == 2


def opening() -> Manifest:
    """An exchange whose graphs read nothing of earlier rounds."""
    manifest = listed(carry_needed=True, carry_exchanges=1)
    start = manifest.graph("start")
    reads = tuple(port for port in start.inputs if port.role != "carry")
    graphs = tuple(
        msgspec.structs.replace(graph, inputs=reads) if graph.name == "start" else graph
        for graph in manifest.graphs
    )
    return msgspec.structs.replace(manifest, graphs=graphs)


def test_an_exchange_that_reads_no_carry_does_not_decline(home: Home) -> None:
    assert home.begin(1, base=0, manifest=opening()) == RestoredCarry()


def test_an_exchange_without_carry_leaves_what_there_is(home: Home) -> None:
    home.leave(1)
    home.leave(5, name="former/noisy-sgd/weak")

    home.begin(4, base=3, manifest=opening())

    assert home.rounds == [1]
    [told] = home.told
    assert told.endswith("round 4 asks for nothing of earlier ones")


def test_a_step_that_reads_a_carry_counts_as_reading_one(home: Home) -> None:
    manifest = opening()
    train = manifest.graph("train")
    reading = msgspec.structs.replace(train, inputs=(*train.inputs, tiny.port("carry.v", tiny.V.shape)))
    graphs = tuple(reading if graph.name == "train" else graph for graph in manifest.graphs)
    phases = (PhaseSpec(name="p", graph="train", steps=1),)

    with pytest.raises(RoundDeclined):
        home.begin(1, base=0, manifest=msgspec.structs.replace(manifest, graphs=graphs, phases=phases))
