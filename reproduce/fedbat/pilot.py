"""Fixed step sizes of FedBAT's baselines at scale cpu, chosen on a validation split.

Fashion-MNIST, 100 clients, Non-IID-2, seed 100; a tenth of the training samples is the validation data. The paper searched
1, 0.1, 0.01 and 0.001 at its own size, and found 0.001 for SignSGD and 0.01 for Noisy- and Stoc-SignSGD; over fewer rounds
SignSGD's has to be larger. ZeroFL's sparse training leaves too few weights in so narrow a net.
"""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.entry import Arm, Choice, Entry, Federated, Scale, note_of
from reproduce.fedbat.federations import CANDIDATES, CODECS, federated


def arms(scale: Scale) -> Sequence[Arm]:
    """Return an arm for each candidate."""
    found = []
    for method, values in CANDIDATES.items():
        base = federated("Fashion-MNIST", 100, "Non-IID-2", method, scale)
        for value, options in values.items():
            codec = {**CODECS[method][1], **options, "statistics": 32}
            changed = {"codec.options": codec, "data.validation": 0.1}
            found.append(Federated(f"{method}: {value}", {**base.settings, **changed}, base.measure))
    return found


PILOT = Entry(
    name="fedbat/pilot",
    title="Pilot: step sizes of the baselines at scale cpu",
    arms=arms,
    choices=[Choice(method, {value: f"{method}: {value}" for value in values}) for method, values in CANDIDATES.items()],
    note=note_of(__doc__),
    seeds={"smoke": 1, "cpu": 1, "paper": 1},
)  # fmt: skip
