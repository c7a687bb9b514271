"""Many clients in one call: every codec's ``finish`` and FedBAT's steps under vmap give what each client's own call does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgefl.contract.algorithm import Function
from tests.codecs.coding import Coding

ALL: list[tuple[str, dict[str, Any]]] = [
    ("float16", {}),
    ("bfloat16", {}),
    ("int8", {"feedback": True}),
    ("fedpaq", {"bits": 3}),
    ("signsgd", {}),
    ("ef_signsgd", {}),
    ("noisy_signsgd", {}),
    ("stoc_signsgd", {}),
    ("topk", {"share": 0.1, "feedback": True}),
    ("zerofl", {"sparsity": 0.8}),
    ("bifl", {}),
    ("fedbat", {}),
    ("fedbat", {"step_size": "largest", "upload_mode": "det_sign"}),
    ("fedbat", {"upload_mode": "last_forward", "granularity": "module"}),
]


def compare(function: Function) -> None:
    clients = [function.example(seed) for seed in range(3)]
    together = torch.vmap(function.fn)({name: torch.stack([c[name] for c in clients]) for name in clients[0]})
    for number, client in enumerate(clients):
        for name, expected in function.fn(client).items():
            found = together[name][number]
            assert found.dtype == expected.dtype and found.shape == expected.shape, name
            if expected.dtype.is_floating_point:
                assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5), name
            else:
                assert int((found != expected).sum()) <= 1, name


@pytest.mark.sample(5)
@pytest.mark.parametrize(("codec", "options"), ALL)
def test_finish_runs_under_vmap(codec: str, options: dict[str, Any]) -> None:
    compare(Coding.of(codec, **options).algorithm.finish)


@pytest.mark.parametrize("options", [{}, {"step_size": "largest"}, {"alpha_range": (5e-4, 5e-2)}])
def test_phases_of_fedbat_run_under_vmap(options: dict[str, Any]) -> None:
    for phase in Coding.of("fedbat", **options).algorithm.phases:
        compare(phase.function)
