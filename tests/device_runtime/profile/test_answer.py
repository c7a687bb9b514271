"""The size of an answer: a profile that fits one message, thinned where it has to be."""

from __future__ import annotations

import pytest

from edgefl.wire.bundle import profiles
from edgefl.wire.mqtt import messages
from edgefl_device.profile.answer import answer_with
from tests.wire.bundle.example_profile import example_profile

NONCE = "00112233aabbccdd"


@pytest.mark.parametrize("limit", [1 << 17, 8192, 4096, 2048])
def test_an_answer_fits_its_message_and_keeps_the_figures_of_each_graph(limit: int) -> None:
    profile = example_profile(points=profiles.MOMENTS, ops=profiles.OPS)

    answer = answer_with(NONCE, profile, limit)

    assert len(messages.encode(answer)) <= limit
    found = profiles.decode(answer.profile)
    assert [graph.run for graph in found.graphs] == [graph.run for graph in profile.graphs]
    assert found.peak_bytes == profile.peak_bytes
    assert (found == profile) == (limit > 4096)


def test_thinning_the_points_of_time_loses_no_peak() -> None:
    profile = example_profile(points=profiles.MOMENTS)

    found = profiles.decode(answer_with(NONCE, profile, 4096).profile).timeline.moments

    assert 0 < len(found) < profiles.MOMENTS
    assert max(moment.rss_bytes for moment in found) == max(
        moment.rss_bytes for moment in profile.timeline.moments
    )


def test_a_profile_that_fits_no_message_is_declined() -> None:
    answer = answer_with(NONCE, example_profile(), 256)

    assert (answer.state, answer.reason) == ("declined", "too-large")
