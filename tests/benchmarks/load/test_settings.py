"""Who behaves how, and what is no load."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.load.settings import BehaviourShares, LoadSettings, quantile
from edgefl.errors import ConfigError


def test_behaviours_come_in_the_shares_that_were_asked_for() -> None:
    shares = BehaviourShares(vanish=0.1, late=0.2, garbage=0.3)
    drawn = Counter(shares.behaviour("0", f"load-{number}", 1) for number in range(2000))
    wanted = {"vanish": 200, "late": 400, "garbage": 600, "honest": 800}
    assert drawn.keys() == wanted.keys()
    assert all(abs(drawn[name] - count) < 90 for name, count in wanted.items()), drawn


def test_a_behaviour_depends_on_seed_device_and_round_and_nothing_else() -> None:
    shares = BehaviourShares(late=0.5)
    drawn = [shares.behaviour("0", f"load-{number}", 1) for number in range(64)]
    assert drawn == [shares.behaviour("0", f"load-{number}", 1) for number in range(64)]
    assert drawn != [shares.behaviour("0", f"load-{number}", 2) for number in range(64)]
    assert drawn != [shares.behaviour("1", f"load-{number}", 1) for number in range(64)]


def test_all_or_none() -> None:
    assert {BehaviourShares(duplicate=1.0).behaviour("0", str(n), n) for n in range(50)} == {"duplicate"}
    assert {BehaviourShares().behaviour("0", str(n), n) for n in range(50)} == {"honest"}


@pytest.mark.parametrize("shares", [{"late": 1.5}, {"vanish": -0.1}, {"late": 0.6, "garbage": 0.6}])
def test_shares_that_cannot_be_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(shares))):
        BehaviourShares(**shares)


def test_names_have_equal_lengths() -> None:
    assert LoadSettings("demo", 2, prefix="strong-", first=9).names == ["strong-00009", "strong-00010"]
    assert {len(name) for name in LoadSettings("demo", 3, first=99_999).names} == {len("load-") + 6}


def test_a_prefix_that_no_topic_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="not usable"):
        LoadSettings("demo", 1, prefix="a/b")


def test_quantiles_are_values_that_were_there() -> None:
    times = [float(number) for number in range(1, 101)]
    assert (quantile(times, 0.5), quantile(times, 0.99), quantile(times, 1.0)) == (50.0, 99.0, 100.0)
    assert quantile([3.0], 0.99) == 3.0 and quantile([], 0.5) == 0.0
