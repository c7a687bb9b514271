"""Which algorithms a codec goes with: those whose update is the trained weights and nothing else."""

from __future__ import annotations

import pytest

from edgefl import algorithms
from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import applied
from edgefl.contract.tensors import select
from edgefl.errors import ConfigError
from edgefl.objective.objective import Objective
from edgefl.optimizers import with_optimizer
from edgefl.submodels.output_side.submodel import OutputSide
from tests.codecs.coding import small

TRAINING = {"batch": 2, "steps": 2, "lr": 0.1}
OWN = ("scaffold", "local_amsgrad", "mimeadam", "mimelite", "local")


def _objective() -> Objective:
    return Objective.of(OutputSide(small(), 0))


@pytest.mark.sample(7)
@pytest.mark.parametrize("codec", ["signsgd", "int8", "fedpaq", "topk"])
@pytest.mark.parametrize("algorithm", OWN)
def test_an_algorithm_that_sends_or_keeps_more_than_weights_is_refused(algorithm: str, codec: str) -> None:
    made = algorithms.build(algorithm, _objective(), **TRAINING)

    with pytest.raises(ConfigError, match=f"codec '{codec}'.*{algorithm!r} sends or keeps more.*codec dense"):
        applied(codecs.build(codec), made, _objective())


def test_only_a_fresh_device_optimizer_is_coded() -> None:
    fresh = algorithms.build("adamw", _objective(), **TRAINING)
    kept = algorithms.build("adamw", _objective(), **TRAINING, keep=True)

    assert applied(codecs.build("signsgd"), fresh, _objective()).form.sections
    with pytest.raises(ConfigError, match=r"'carry\.adam\.m"):
        applied(codecs.build("signsgd"), kept, _objective())


@pytest.mark.parametrize("algorithm", OWN)
def test_the_dense_codec_leaves_every_algorithm_as_it_is(algorithm: str) -> None:
    made = algorithms.build(algorithm, _objective(), **TRAINING)

    assert applied(codecs.build("dense"), made, _objective()) is made


@pytest.mark.parametrize("optimizer", ["none", "fedams"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg_update", "fedprox"])
def test_algorithms_that_send_weights_alone_are_coded(algorithm: str, optimizer: str) -> None:
    made = with_optimizer(algorithms.build(algorithm, _objective(), **TRAINING), optimizer)

    coded = applied(codecs.build("signsgd"), made, _objective())

    assert coded.server is made.server
    assert coded.personalize is made.personalize
    assert list(select(coded.finish(coded.finish.example(0)), "update")) == ["codes", "scales"]
