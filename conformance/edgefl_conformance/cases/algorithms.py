"""Algorithms of every shape: codes and noise, phases over the data, inner batches, frozen chunks, masks, carries."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from edgefl.wire.mqtt.messages import NO_CARRY, Round
from edgefl.wire.tensors import Arrays
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.material.compare import read_tensors
from edgefl_conformance.play.harness import RoundHarness
from edgefl_conformance.results import expect, expect_equal

ALGORITHMS = CaseGroup("algorithms")


@ALGORITHMS.case(
    "Sends codes of four bits, rounded by noise of (seed, step, port): `finish` draws with the steps of the round plus one."
)
def coded_update(harness: RoundHarness) -> None:
    harness.good_round(harness.material("coded"), seed=2**40 + 3)


@ALGORITHMS.case(
    "Trains two phases one after the other, the second with noise in each step, and sends codes of one bit."
)
def one_bit_update(harness: RoundHarness) -> None:
    harness.good_round(harness.material("onebit"), seed=5)


@ALGORITHMS.case(
    "Passes over its rows in their order before it trains, the last batch filled from the first rows and masked."
)
def pass_over_the_data(harness: RoundHarness) -> None:
    harness.good_round(harness.material("passes"), seed=6)


@ALGORITHMS.case("Draws each batch anew, of several streams and sizes, as the manifest says (`draw`).")
def inner_steps(harness: RoundHarness) -> None:
    harness.good_round(harness.material("inner"), seed=9)


@ALGORITHMS.case(
    "Runs the frozen chunks of a tier once over all its rows, and trains the rest from their record."
)
def frozen_prefix(harness: RoundHarness) -> None:
    harness.good_round(harness.material("tier"), seed=8)


@ALGORITHMS.case(
    "Fetches the weights of a frozen chunk before those that it trains, which it asks for when it is done with it."
)
def prefix_before_suffix(harness: RoundHarness) -> None:
    harness.ensure()
    what = harness.material("tier")
    fresh = what.with_units({name: {k: a + 1 for k, a in part.items()} for name, part in what.units.items()})
    begun = time.monotonic()
    play = harness.open(fresh)
    harness.settle(play)
    if not harness.relay.reads:
        return
    asked = [each.topic for each in harness.relay.subscriptions(begun)]
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
def sparse_update(harness: RoundHarness) -> None:
    harness.good_round(harness.material("sparse"), seed=10)


@ALGORITHMS.case("Reads weights that hold a packed mask which travels as gaps.")
def masked_weights(harness: RoundHarness) -> None:
    harness.good_round(harness.material("masked"), seed=12)


@ALGORITHMS.case(
    "Uses no record of a frozen chunk for other weights, though they have the name of the same model version."
)
def record_of_other_weights(harness: RoundHarness) -> None:
    harness.ensure()
    what = harness.material("tier")
    other = what.with_units({name: {k: a * 2 for k, a in part.items()} for name, part in what.units.items()})
    for each in (what, other):
        harness.settle(
            harness.open(
                each, change=lambda announced: msgspec.structs.replace(announced, model_version="one")
            )
        )


@ALGORITHMS.case("Feeds zeros as carry at first, and then what `finish` left, also after a restart.")
def carry(harness: RoundHarness) -> None:
    left = _carried(harness, None, seed=1)
    left = _carried(harness, left, seed=2)
    harness.restart()
    _carried(harness, left, seed=3)


@ALGORITHMS.case(
    "Drops the carry of a round that was abandoned (Round.base), and continues from the one before it."
)
def carry_of_an_abandoned_round(harness: RoundHarness) -> None:
    harness.run += "-abandoned"
    first = _carried(harness, None, seed=1)
    good = harness.number
    _carried(harness, first, seed=2)
    _carried(harness, first, seed=3, base=good)


@ALGORITHMS.case("Drops the carry of an update that was rejected, and continues from the one before it.")
def carry_of_a_rejected_update(harness: RoundHarness) -> None:
    harness.run += "-rejected"
    first = _carried(harness, None, seed=1)
    _carried(harness, first, seed=2, rejected=True)
    _carried(harness, first, seed=3)


@ALGORITHMS.case("Keeps no carry over to another run.")
def carry_of_another_run(harness: RoundHarness) -> None:
    harness.run += "-one"
    _carried(harness, None, seed=1)
    harness.run += "-two"
    _carried(harness, None, seed=2)


@ALGORITHMS.case(
    "Continues from the newest carry of all tiers where the manifest permits it (`carry_any_tier`), and only there.",
    optional=True,
)
def carry_of_another_tier(harness: RoundHarness) -> None:
    harness.run += "-tiers"
    _carried(harness, None, seed=1)
    newest = _carried(harness, None, seed=2, tier="second")
    _carried(harness, newest, seed=3, tier="third", carry_any_tier=True)


@ALGORITHMS.case(
    "Follows a method of several exchanges, the second of which continues from the state of the first."
)
def exchanges(harness: RoundHarness) -> None:
    harness.run += "-exchanges"
    play = harness.open(harness.material("opening"), seed=21)
    received = harness.update(play)
    left = harness.judge(received, play)
    harness.answer(received)
    harness.settle(harness.open(harness.material("exchange"), seed=22), left)


@ALGORITHMS.case(
    "Declines (no-carry) where an algorithm needs what it kept, and it has nothing, or something too old."
)
def no_carry(harness: RoundHarness) -> None:
    harness.run += "-none"
    harness.ensure()
    play = harness.open(harness.material("exchange"), seed=1)
    expect_equal("decline.reason", NO_CARRY, harness.decline(play).reason)
    play = harness.open(harness.material("opening"), seed=2)
    harness.settle(play)
    harness.number += 1  # a round that others completed
    play = harness.open(harness.material("exchange"), seed=3)
    expect_equal("decline.reason", NO_CARRY, harness.decline(play).reason)


def _carried(
    harness: RoundHarness,
    left: Arrays | None,
    *,
    seed: int,
    base: int | None = None,
    rejected: bool = False,
    **fields: Any,
) -> Arrays:
    """Play a round of the algorithm with carry, which begins with ``left``; return the new carry.

    ``fields`` replace those of the manifest.
    """

    def based(announced: Round) -> Round:
        return announced if base is None else msgspec.structs.replace(announced, base=base)

    play = harness.open(harness.material("carried").changed(**fields), seed=seed, change=based)
    received = harness.update(play)
    found = harness.judge(received, play, left)
    if rejected:
        harness.answer(received, "rejected", reason="closed-round", text="the kit says so")
    else:
        harness.answer(received)
    read_tensors(received.update)
    time.sleep(harness.patient(0.2))
    return found


def _first(topics: list[str], sha256: str) -> int:
    return next((at for at, topic in enumerate(topics) if sha256 in topic), -1)
