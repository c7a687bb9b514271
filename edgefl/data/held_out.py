"""Samples that the server evaluates on, drawn from data without a test set."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from edgefl.errors import DataError

_TEST_SHARE = 0.2

Class = TypeVar("Class", bound=Hashable)
Sample = TypeVar("Sample", bound=Any)


def split(
    samples: Mapping[Class, Sequence[Sample]], seed: int
) -> tuple[dict[Class, list[Sample]], dict[Class, list[Sample]]]:
    """Split the samples of each class into a part to train on and a fifth to test on, both sorted.

    Args:
        samples: file names or row numbers by class.
        seed: decides which fifth is for tests.

    Raises:
        DataError: No class has two samples.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    train, test = {}, {}
    for name, members in samples.items():
        order = [members[place] for place in generator.permutation(len(members))]
        count = min(max(1, round(_TEST_SHARE * len(order))), len(order) - 1)
        train[name], test[name] = sorted(order[count:]), sorted(order[:count])
    if not any(test.values()):
        raise DataError(
            "expected at least 2 samples of a class, one of them to test on, found 1 of each; add samples, or test data"
        )
    return train, test
