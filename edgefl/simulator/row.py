"""A simulated round as people read it: a line of ``rounds.jsonl``, a row of ``rounds.csv``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A round that ended, ``closed`` or ``abandoned``. ``accuracy``, ``loss`` and ``metrics`` are the global model's on the
    test set, None and {} if it was not its turn; ``metric`` names the one that people are shown first.

    ``train_loss``: mean over the clients that reported. ``down_bytes``: of the weights that they fetched, each as a client
    that has nothing yet; ``up_bytes``: of their updates' tensors, ``up_float32_bytes`` the same in float32. ``seconds``:
    what simulating it took here; ``simulated_s``: what it would have taken there, ``energy_j``: joules that all selected
    clients would have spent until then (the table ``simulation``).
    ``staleness``: versions between what an update began from and what it was counted in, the mean over those that were.
    ``fairness``: Jain's index of how often each client has reported so far, 1 if all did as often.
    ``weights_sha256``: of the model, with what the server keeps beside it, as safetensors.
    """

    round: int
    outcome: str
    accuracy: float | None
    loss: float | None
    train_loss: float | None
    selected: int
    reports: int
    rejected: int
    declined: int
    down_bytes: int
    up_bytes: int
    up_float32_bytes: int
    seconds: float
    simulated_s: float
    energy_j: float = 0.0
    staleness: float = 0.0
    weights_sha256: str
    text: str = ""
    metric: str = "accuracy"
    metrics: dict[str, float] = {}
    fairness: float | None = None


def scalars(row: Row) -> Mapping[str, float]:
    """The numbers of a round by name, without those that it has not."""
    told = {name: value for name, value in msgspec.structs.asdict(row).items() if name != "round"}
    numbers = {name: float(value) for name, value in told.items() if isinstance(value, int | float)}
    return {**row.metrics, **numbers}
