"""Algorithms of every shape: codes and noise, phases over the data, inner batches, frozen chunks, masks, carries."""

from __future__ import annotations

import time

import msgspec

from edgefl.wire.mqtt.messages import NO_CARRY, Round
from edgefl.wire.tensors import Arrays
from edgefl_conformance.case import Group
from edgefl_conformance.material.compare import read_tensors
from edgefl_conformance.play.stage import Stage
from edgefl_conformance.verdict import expect, expect_equal

ALGORITHMS = Group("algorithms")


@ALGORITHMS.case(
    "Sends codes of four bits, rounded by noise of (seed, step, port): `finish` draws with the steps of the round plus one."
)
def coded_update(stage: Stage) -> None:
    stage.good_round(stage.material("coded"), seed=2**40 + 3)


@ALGORITHMS.case(
    "Trains two phases one after the other, the second with noise in each step, and sends codes of one bit."
)
def one_bit_update(stage: Stage) -> None:
    stage.good_round(stage.material("onebit"), seed=5)


@ALGORITHMS.case(
    "Passes over its rows in their order before it trains, the last batch filled from the first rows and masked."
)
def pass_over_the_data(stage: Stage) -> None:
    stage.good_round(stage.material("passes"), seed=6)


@ALGORITHMS.case("Draws each batch anew, of several streams and sizes, as the manifest says (`draw`).")
def inner_steps(stage: Stage) -> None:
    stage.good_round(stage.material("inner"), seed=9)


@ALGORITHMS.case(
    "Runs the frozen chunks of a tier once over all its rows, and trains the rest from their record."
)
def frozen_prefix(stage: Stage) -> None:
    stage.good_round(stage.material("tier"), seed=8)


@ALGORITHMS.case(
    "Fetches the weights of a frozen chunk before those that it trains, which it asks for when it is done with it."
)
def prefix_before_suffix(stage: Stage) -> None:
    stage.ensure()
    what = stage.material("tier")
    fresh = what.with_units({name: {k: a + 1 for k, a in part.items()} for name, part in what.units.items()})
    begun = time.monotonic()
    play = stage.open(fresh)
    stage.settle(play)
    if not stage.relay.reads:
        return
    asked = [each.topic for each in stage.relay.subscriptions(begun)]
    manifest = what.manifest
    order = [unit for chunk in manifest.prefix for unit in chunk.units] + list(manifest.suffix)
    places = [_first(asked, play.announced.units[unit][0].sha256) for unit in order]
    expect(
        -1 not in places, "a subscription to the blobs of each unit", dict(zip(order, places, strict=True))
    )
    expect(places == sorted(places), f"subscriptions in the order {', '.join(order)}", places)


@ALGORITHMS.case(
    "Sends a sparse update: a packed mask, or its gaps where they are smaller, and the values of its bits."
)
def sparse_update(stage: Stage) -> None:
    stage.good_round(stage.material("sparse"), seed=10)


@ALGORITHMS.case("Reads weights that hold a packed mask which travels as gaps.")
def masked_weights(stage: Stage) -> None:
    stage.good_round(stage.material("masked"), seed=12)


@ALGORITHMS.case(
    "Uses no record of a frozen chunk for other weights, though they have the name of the same model version."
)
def record_of_other_weights(stage: Stage) -> None:
    stage.ensure()
    what = stage.material("tier")
    other = what.with_units({name: {k: a * 2 for k, a in part.items()} for name, part in what.units.items()})
    for each in (what, other):
        stage.settle(
            stage.open(each, change=lambda announced: msgspec.structs.replace(announced, model_version="one"))
        )


@ALGORITHMS.case("Feeds zeros as carry at first, and then what `finish` left, also after a restart.")
def carry(stage: Stage) -> None:
    left = _carried(stage, None, seed=1)
    left = _carried(stage, left, seed=2)
    stage.restart()
    _carried(stage, left, seed=3)


@ALGORITHMS.case(
    "Drops the carry of a round that was abandoned (Round.base), and goes on from the one before it."
)
def carry_of_an_abandoned_round(stage: Stage) -> None:
    stage.run += "-abandoned"
    first = _carried(stage, None, seed=1)
    good = stage.number
    _carried(stage, first, seed=2)
    _carried(stage, first, seed=3, base=good)


@ALGORITHMS.case("Drops the carry of an update that was rejected, and goes on from the one before it.")
def carry_of_a_rejected_update(stage: Stage) -> None:
    stage.run += "-rejected"
    first = _carried(stage, None, seed=1)
    _carried(stage, first, seed=2, rejected=True)
    _carried(stage, first, seed=3)


@ALGORITHMS.case("Keeps no carry over to another run.")
def carry_of_another_run(stage: Stage) -> None:
    stage.run += "-one"
    _carried(stage, None, seed=1)
    stage.run += "-two"
    _carried(stage, None, seed=2)


@ALGORITHMS.case(
    "Follows a method of several exchanges, the second of which goes on from what the first left."
)
def exchanges(stage: Stage) -> None:
    stage.run += "-exchanges"
    play = stage.open(stage.material("opening"), seed=21)
    received = stage.update(play)
    left = stage.judge(received, play)
    stage.answer(received)
    stage.settle(stage.open(stage.material("exchange"), seed=22), left)


@ALGORITHMS.case(
    "Declines (no-carry) where an algorithm needs what it kept, and it has nothing, or something too old."
)
def no_carry(stage: Stage) -> None:
    stage.run += "-none"
    stage.ensure()
    play = stage.open(stage.material("exchange"), seed=1)
    expect_equal("decline.reason", NO_CARRY, stage.decline(play).reason)
    play = stage.open(stage.material("opening"), seed=2)
    stage.settle(play)
    stage.number += 1  # a round that others completed
    play = stage.open(stage.material("exchange"), seed=3)
    expect_equal("decline.reason", NO_CARRY, stage.decline(play).reason)


def _carried(
    stage: Stage, left: Arrays | None, *, seed: int, base: int | None = None, rejected: bool = False
) -> Arrays:
    """A round of the algorithm that carries, begun with ``left``; gives what it leaves."""

    def based(announced: Round) -> Round:
        return announced if base is None else msgspec.structs.replace(announced, base=base)

    play = stage.open(stage.material("carried"), seed=seed, change=based)
    received = stage.update(play)
    found = stage.judge(received, play, left)
    if rejected:
        stage.answer(received, "rejected", reason="closed-round", text="the kit says so")
    else:
        stage.answer(received)
    read_tensors(received.update)
    time.sleep(stage.patient(0.2))
    return found


def _first(topics: list[str], sha256: str) -> int:
    return next((at for at, topic in enumerate(topics) if sha256 in topic), -1)
