"""Which codec goes with which submodel kind and local training, and why the others do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.codecs.catalog import CODECS
from edgefl.config import parse
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError, ModelError
from edgefl.models.exits import early_exits
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.setup.training import algorithm_of
from edgefl.submodels import catalog as kinds
from edgefl.submodels.catalog import KINDS
from edgefl.submodels.submodel import Submodel

ALL = frozenset
CODEC, KIND, ALGORITHM = ALL(CODECS), ALL(KINDS) | {"rolling"}, ALL(ALGORITHMS)
MOVING = ALL({"importance", "importance_structured", "rolling"})
SHARING = ALL({"scaffold", "local_amsgrad", "mimeadam", "mimelite", "fafed", "stem"}) & ALGORITHM
KEEPING = ALL({"local", "naive_adaptive"}) & ALGORITHM
PERSONAL = ALL({"fedper", "fedrep", "fedbn"}) & ALGORITHM

IMPOSSIBLE: tuple[tuple[str, frozenset[str], frozenset[str], frozenset[str], type[Exception], str], ...] = (
    (
        "what is held changes each round, and with it what a residual would be of",
        ALL({"ef_signsgd"}),
        MOVING,
        ALGORITHM,
        ConfigError,
        r"'ef_signsgd' keeps .* other entries in each round; choose a codec without feedback, or a kind that stays",
    ),
    (
        "FedBAT is a training, of which the codec is the last part",
        ALL({"fedbat"}),
        KIND,
        ALGORITHM - {"sgd", "fedbat"},
        ConfigError,
        r"local training 'fedbat', and algorithm.name is .*; leave algorithm.name out, or choose a codec",
    ),
    (
        "ZeroFL trains by SWAT",
        ALL({"zerofl"}),
        KIND,
        ALGORITHM - {"sgd", "swat"},
        ConfigError,
        r"local training 'swat', and algorithm.name is .*; leave algorithm.name out, or choose a codec",
    ),
    (
        "BiFL sends the weights of a net that was trained binary",
        ALL({"bifl", "bifl_full"}),
        KIND,
        ALGORITHM - {"sgd", "binary"},
        ConfigError,
        r"local training 'binary', and algorithm.name is .*; leave algorithm.name out, or choose a codec",
    ),
    (
        "there are no exits to train",
        CODEC,
        KIND - {"early_exit"},
        ALL({"multi_exit"}),
        ModelError,
        r"multi_exit trains models with early exits, .*: give it some .*, or train it by sgd",
    ),
    (
        "a tensor of binary weights has one magnitude",
        CODEC,
        ALL({"importance", "importance_structured"}),
        ALL({"binary"}),
        ModelError,
        r"importance has nothing to choose by: train this submodel by sgd or tcbgd, or choose a kind",
    ),
    (
        "so has one of BiFL",
        ALL({"bifl", "bifl_full"}),
        ALL({"importance", "importance_structured"}),
        ALL({"sgd"}),
        ModelError,
        r"importance has nothing to choose by: train this submodel by sgd or tcbgd, or choose a kind",
    ),
    (
        "the server's state lies where the weights lie, which these kinds change in each round",
        CODEC,
        MOVING,
        SHARING,
        ConfigError,
        r"shares .* of every parameter with the devices, and kind .*; choose output_side or width without rolling",
    ),
    (
        "private layers are whole tensors",
        CODEC,
        ALL({"importance"}),
        ALL({"fedper", "fedrep"}),
        ConfigError,
        r"keeps whole tensors on each device, .* choose another algorithm, or a kind of whole tensors",
    ),
    (
        "what is held changes each round, and with it what a device kept of it",
        CODEC,
        MOVING,
        KEEPING | PERSONAL,
        ConfigError,
        r"keeps something of every entry .* choose another algorithm, or a kind that stays",
    ),
    (
        "a codec codes the weights, and these send or keep more",
        CODEC - {"dense"},
        KIND,
        SHARING | KEEPING,
        ConfigError,
        r"codes the change of the weights, and algorithm .* sends or keeps more than that .*; choose codec dense",
    ),
    (
        "an update is coded once",
        CODEC - {"dense", "fedbat"},
        KIND,
        ALL({"fedbat"}),
        ConfigError,
        r"algorithm 'fedbat' codes its update itself \(fedbat\); leave out codec",
    ),
)
"""(why, codecs, kinds, algorithms, error, its text); the first row that fits a triple counts, all others go together."""


def reason(codec: str, kind: str, algorithm: str) -> tuple[str, type[Exception], str] | None:
    for why, codecs, kind_names, algorithms, error, text in IMPOSSIBLE:
        if codec in codecs and kind in kind_names and algorithm in algorithms:
            return why, error, text
    return None


@cache
def submodel(kind: str) -> Submodel:
    """Of the smallest models: a hundred parameters with batch norm, and exits where the kind needs them."""
    size = {"size": 4, "widths": (2, 4), "classes": 3}
    if kind == "early_exit":
        return kinds.build(early_exits(base="fedbat_cnn", **size), kind)
    spec = build_model("fedbat_cnn", **size)
    if kind == "rolling":
        return kinds.build(spec, "width", gamma=0.5, rolling=True)
    return kinds.build(spec, kind, **({} if kind == "output_side" else {"gamma": 0.5}))


def built(codec: str, kind: str, algorithm: str) -> Algorithm:
    table = {"codec": {"name": codec}, "algorithm": {"name": algorithm, "batch": 2, "steps": 2}}
    return algorithm_of(parse(table, source="the matrix"), submodel(kind))


def triples(*, possible: bool) -> Iterator[tuple[str, str, str]]:
    for codec, kind, algorithm in product(CODECS, sorted(KIND), ALGORITHMS):
        if (reason(codec, kind, algorithm) is None) is possible:
            yield codec, kind, algorithm


def refused(codec: str, kind: str, algorithm: str) -> str:
    """Why."""
    why, error, text = reason(codec, kind, algorithm) or ("", Exception, "")
    with pytest.raises(error, match=text):
        built(codec, kind, algorithm)
    return why


def test_what_cannot_be_combined_says_why_and_what_to_choose() -> None:
    met = {refused(*triple) for triple in list(triples(possible=False))[::8]}
    assert met == {row[0] for row in IMPOSSIBLE}


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_every_triple_that_cannot_be_combined_says_why(codec: str) -> None:
    assert [refused(*triple) for triple in triples(possible=False) if triple[0] == codec]


def updated(codec: str, kind: str, algorithm_name: str) -> bool:
    """Whether the update lies in sections; if so, as its form says."""
    algorithm = built(codec, kind, algorithm_name)
    form, where = algorithm.form, (codec, kind, algorithm_name)
    coded = {"bifl_full": "dense"}.get(codec, codec)
    assert form.codec == ("fedbat" if algorithm_name == "fedbat" else coded), where
    found = algorithm.finish(algorithm.finish.example(1))
    update = {name.removeprefix("update."): t for name, t in found.items() if name.startswith("update.")}
    if not form.sections:
        return False
    carrier = Objective.of(submodel(kind)).carrier
    sizes = {n: math.prod(spec.shape) for n, spec in carrier.update.items() if n not in algorithm.private}
    told = {name: (str(t.dtype).removeprefix("torch."), t.numel()) for name, t in update.items()}
    assert told == form.arrays(sizes), where
    assert sorted(n for section in form.sections for n in section.names) == sorted(sizes), where
    masks = sum(sizes[name] for name in form.masked)
    assert dict(algorithm.masks) == ({"mask": masks} if masks else {}), where
    return True


@pytest.mark.slow
def test_all_else_builds_an_update_of_the_codec_s_form() -> None:
    """One triple for each codec beside each kind, and for each algorithm."""
    seen: set[object] = set()
    for codec, kind, algorithm in triples(possible=True):
        if {(codec, kind), algorithm} <= seen:
            continue
        seen |= {(codec, kind), algorithm}
        assert updated(codec, kind, algorithm) or codec in ("dense", "bifl_full")
    assert {*ALGORITHMS} <= seen and {codec for codec, _ in seen & {*product(CODECS, sorted(KIND))}} == {
        *CODECS
    }


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_every_other_triple_builds_one(codec: str) -> None:
    assert [updated(*triple) for triple in triples(possible=True) if triple[0] == codec]


@pytest.mark.parametrize("codec", ["topk", "int8"])
def test_feedback_as_an_option_is_refused_where_what_is_held_changes(codec: str) -> None:
    table = {"codec": {"name": codec, "options": {"feedback": True}}, "algorithm": {"batch": 2, "steps": 2}}
    for kind in sorted(KIND):
        if kind in MOVING:
            with pytest.raises(ConfigError, match="choose a codec without feedback"):
                algorithm_of(parse(table, source="the matrix"), submodel(kind))
        else:
            kept = algorithm_of(parse(table, source="the matrix"), submodel(kind)).finish.inputs
            assert any(name.startswith("carry.residual.") for name in kept)


def test_the_matrix_covers_every_codec_kind_and_algorithm() -> None:
    possible, impossible = (len(list(triples(possible=choice))) for choice in (True, False))
    assert possible + impossible == len(CODECS) * (len(KINDS) + 1) * len(ALGORITHMS)
    assert possible > 280
