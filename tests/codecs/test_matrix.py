"""Which codec goes with which submodel kind and local training, and why the others do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from edgefl.codecs.catalog import CODECS
from edgefl.config import parse
from edgefl.contract.program import Program
from edgefl.models.exits import early_exits
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.programs.catalog import PROGRAMS
from edgefl.setup.training import program_of
from edgefl.submodels import catalog as kinds
from edgefl.submodels.catalog import KINDS
from edgefl.submodels.submodel import Submodel
from edgefl.wire.errors import ConfigError, ModelError

ALL = frozenset
CODEC, KIND, PROGRAM = ALL(CODECS), ALL(KINDS) | {"rolling"}, ALL(PROGRAMS)
MOVING = ALL({"importance", "importance_structured", "rolling"})
SHARING = ALL({"scaffold", "local_amsgrad", "mimeadam", "mimelite", "fafed", "stem"}) & PROGRAM
KEEPING = ALL({"local", "naive_adaptive"}) & PROGRAM

IMPOSSIBLE: tuple[tuple[str, frozenset[str], frozenset[str], frozenset[str], type[Exception], str], ...] = (
    (
        "what is held changes each round, and with it what a residual would be of",
        ALL({"ef_signsgd"}),
        MOVING,
        PROGRAM,
        ConfigError,
        r"'ef_signsgd' keeps .* other entries in each round; choose a codec without feedback, or a kind that stays",
    ),
    (
        "FedBAT is a training, of which the codec is the last part",
        ALL({"fedbat"}),
        KIND,
        PROGRAM - {"sgd", "fedbat"},
        ConfigError,
        r"local training 'fedbat', and program.name is .*; leave program.name out, or choose a codec",
    ),
    (
        "ZeroFL trains by SWAT",
        ALL({"zerofl"}),
        KIND,
        PROGRAM - {"sgd", "swat"},
        ConfigError,
        r"local training 'swat', and program.name is .*; leave program.name out, or choose a codec",
    ),
    (
        "BiFL sends the weights of a net that was trained binary",
        ALL({"bifl", "bifl_full"}),
        KIND,
        PROGRAM - {"sgd", "binary"},
        ConfigError,
        r"local training 'binary', and program.name is .*; leave program.name out, or choose a codec",
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
        "what is held changes each round, and with it what a device kept of it",
        CODEC,
        MOVING,
        KEEPING,
        ConfigError,
        r"keeps something of every entry .* choose another program, or a kind that stays",
    ),
    (
        "a codec codes the weights, and these send or keep more",
        CODEC - {"dense"},
        KIND,
        SHARING | KEEPING,
        ConfigError,
        r"codes the change of the weights, and program .* sends or keeps more than that .*; choose codec dense",
    ),
    (
        "an update is coded once",
        CODEC - {"dense", "fedbat"},
        KIND,
        ALL({"fedbat"}),
        ConfigError,
        r"program 'fedbat' codes its update itself \(fedbat\); leave out codec",
    ),
)
"""(why, codecs, kinds, programs, error, its text); the first row that fits a triple counts, all others go together."""


def reason(codec: str, kind: str, program: str) -> tuple[str, type[Exception], str] | None:
    for why, codecs, kind_names, programs, error, text in IMPOSSIBLE:
        if codec in codecs and kind in kind_names and program in programs:
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


def built(codec: str, kind: str, program: str) -> Program:
    table = {"codec": {"name": codec}, "program": {"name": program, "batch": 2, "steps": 2}}
    return program_of(parse(table, source="the matrix"), submodel(kind))


def triples(*, possible: bool) -> Iterator[tuple[str, str, str]]:
    for codec, kind, program in product(CODECS, sorted(KIND), PROGRAMS):
        if (reason(codec, kind, program) is None) is possible:
            yield codec, kind, program


def refused(codec: str, kind: str, program: str) -> str:
    """Why."""
    why, error, text = reason(codec, kind, program) or ("", Exception, "")
    with pytest.raises(error, match=text):
        built(codec, kind, program)
    return why


def test_what_cannot_be_combined_says_why_and_what_to_choose() -> None:
    met = {refused(*triple) for triple in list(triples(possible=False))[::13]}
    assert met == {row[0] for row in IMPOSSIBLE}


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_every_triple_that_cannot_be_combined_says_why(codec: str) -> None:
    assert [refused(*triple) for triple in triples(possible=False) if triple[0] == codec]


def updated(codec: str, kind: str, program_name: str) -> bool:
    """Whether the update lies in sections; if so, as its form says."""
    program = built(codec, kind, program_name)
    form, where = program.form, (codec, kind, program_name)
    coded = {"bifl_full": "dense"}.get(codec, codec)
    assert form.codec == ("fedbat" if program_name == "fedbat" else coded), where
    found = program.finish(program.finish.example(1))
    update = {name.removeprefix("update."): t for name, t in found.items() if name.startswith("update.")}
    if not form.sections:
        return False
    carrier = Objective.of(submodel(kind)).carrier
    sizes = {n: math.prod(spec.shape) for n, spec in carrier.update.items()}
    told = {name: (str(t.dtype).removeprefix("torch."), t.numel()) for name, t in update.items()}
    assert told == form.arrays(sizes), where
    assert sorted(n for section in form.sections for n in section.names) == sorted(sizes), where
    masks = sum(sizes[name] for name in form.masked)
    assert dict(program.masks) == ({"mask": masks} if masks else {}), where
    return True


@pytest.mark.slow
def test_all_else_builds_an_update_of_the_codec_s_form() -> None:
    """One triple for each codec beside each kind, and for each program."""
    seen: set[object] = set()
    for codec, kind, program in triples(possible=True):
        if {(codec, kind), program} <= seen:
            continue
        seen |= {(codec, kind), program}
        assert updated(codec, kind, program) or codec in ("dense", "bifl_full")
    assert {*PROGRAMS} <= seen and {codec for codec, _ in seen & {*product(CODECS, sorted(KIND))}} == {
        *CODECS
    }


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_every_other_triple_builds_one(codec: str) -> None:
    assert [updated(*triple) for triple in triples(possible=True) if triple[0] == codec]


@pytest.mark.parametrize("codec", ["topk", "int8"])
def test_feedback_as_an_option_is_refused_where_what_is_held_changes(codec: str) -> None:
    table = {"codec": {"name": codec, "options": {"feedback": True}}, "program": {"batch": 2, "steps": 2}}
    for kind in sorted(KIND):
        if kind in MOVING:
            with pytest.raises(ConfigError, match="choose a codec without feedback"):
                program_of(parse(table, source="the matrix"), submodel(kind))
        else:
            kept = program_of(parse(table, source="the matrix"), submodel(kind)).finish.inputs
            assert any(name.startswith("carry.residual.") for name in kept)


def test_the_matrix_has_every_codec_kind_and_program_and_most_of_it_is_possible() -> None:
    possible, impossible = (len(list(triples(possible=choice))) for choice in (True, False))
    assert possible + impossible == len(CODECS) * (len(KINDS) + 1) * len(PROGRAMS)
    assert possible > 280
