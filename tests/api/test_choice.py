"""Choices are plain data: equal ones are one key, and none is changed behind another's back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import edgefl


def test_equal_choices_are_one_key_whatever_their_options_hold() -> None:
    widths = edgefl.submodels.Width(widths=[0.5, 1.0])
    assert {edgefl.algorithms.FedProx(mu=0.1): 1, widths: 2}[edgefl.algorithms.FedProx(mu=0.1)] == 1
    assert len({widths, edgefl.submodels.Width(widths=[0.5, 1.0]), edgefl.submodels.Width()}) == 2


def test_options_are_those_it_was_made_with() -> None:
    given: dict[str, Any] = {"mu": 0.1}
    choice = edgefl.algorithms.FedProx(**given)
    given["mu"] = 9.0
    with pytest.raises(TypeError):
        choice.options["mu"] = 9.0  # type: ignore[index]
    assert choice.options == {"mu": 0.1} and repr(choice.with_options(lr=0.2)) == "FedProx(mu=0.1, lr=0.2)"


def test_a_choice_can_be_copied_and_sent_to_another_process() -> None:
    choice = edgefl.codecs.FedPAQ(bits=3)
    for other in (copy.deepcopy(choice), pickle.loads(pickle.dumps(choice))):
        assert (other, repr(other)) == (choice, repr(choice))
