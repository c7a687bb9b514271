"""Every public name says what it takes and gives: its options, shapes and types of arrays, its errors, and its source.

It walks ``edgefl.__all__``, whatever is in it. Options that all algorithms or all codecs share are explained once, in the
description of their kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

import edgefl
from edgefl.contract.choice import CatalogEntry
from tests.docs.documents import DOCS

NO_PAPER = {"Dense", "Float16", "BFloat16", "Int8", "LocalOnly"}
NO_PAPER |= {"CrossEntropy", "SequenceCrossEntropy", "CausalLM", "BinaryCrossEntropy"}
NO_PAPER |= {"SquaredError", "AbsoluteError", "ModelLoss"}
"""Methods that nobody wrote a paper about."""

SPACES = [thing for thing in map(partial(getattr, edgefl), edgefl.__all__) if inspect.ismodule(thing)]
NAMES = {
    name: getattr(space, name)
    for space in (edgefl, *SPACES)
    for name in space.__all__
    if inspect.isclass(getattr(space, name))
    or inspect.isroutine(getattr(space, name))
    or type(getattr(space, name)) is CatalogEntry
}

_ARRAYS = re.compile(r"\b(Array|Arrays|Tensor|Tensors|NDArray|ndarray)\b")
_SHAPE = re.compile(r"\(\w+,|\bshape|\bby (global )?name\b")
_DTYPE = re.compile(r"\b(u?int\d*|float\d*|floats|integers|dtypes?|bool)\b")
_SOURCE = re.compile(r"\b(?:19|20)\d\d\b|\b\w+\.md\b")
_ERROR = re.compile(r"\b\w+Error\b")


def text_of(thing: Any) -> str:
    """Its own description, and that of its kind; none that Python or pydantic wrote."""
    if isinstance(thing, CatalogEntry):
        return f"{thing.__doc__ or ''}\n{inspect.getdoc(type(thing()))}"
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    own = inspect.cleandoc(own or "")
    made = own.startswith(f"{getattr(thing, '__name__', '')}(")  # dataclasses write their signature
    return "" if made else own


def parameters(thing: Any) -> list[str]:
    """Names of what a caller gives."""
    if inspect.isclass(thing) and (issubclass(thing, BaseModel | BaseException)):
        return []
    return [
        each.name
        for each in inspect.signature(thing).parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and not each.name.startswith("_")
    ]


def mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


def raises(thing: Any) -> bool:
    function = thing.factory if isinstance(thing, CatalogEntry) else thing
    return (
        inspect.isroutine(function)
        and re.search(r"^\s+raise \w", inspect.getsource(function), re.M) is not None
    )


def annotations(thing: Any) -> str:
    try:
        return str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""


def gaps(name: str, thing: Any) -> Iterator[str]:
    """What a reader of the description is not told."""
    text = text_of(thing)
    if len(text.split()) < 4:
        yield "no description"
        return
    yield from (f"argument {each}" for each in parameters(thing) if not mentions(text, each))
    if raises(thing) and not _ERROR.search(text):
        yield "errors"
    if _ARRAYS.search(annotations(thing)) and not (_SHAPE.search(text) and _DTYPE.search(text)):
        yield "shapes and types of its arrays"
    if isinstance(thing, CatalogEntry) and name not in NO_PAPER and not _SOURCE.search(thing.__doc__ or ""):
        yield "source"


def members(thing: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Its own public methods and properties."""
    for name, member in vars(thing).items():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        function = getattr(function, "__func__", function)
        if (
            not name.startswith("_")
            and inspect.isfunction(function)
            and not function.__name__.startswith("_")
        ):
            yield name, function


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_whole(name: str) -> None:
    thing = NAMES[name]

    assert list(gaps(name, thing)) == []
    if inspect.isclass(thing) and issubclass(thing, BaseModel):
        assert [
            field
            for field, info in thing.model_fields.items()
            if not (info.description or field in text_of(thing))
        ] == []
    elif inspect.isclass(thing):
        assert [member for member, function in members(thing) if not function.__doc__] == []


def test_the_table_of_the_reference_has_all_public_names_and_no_others() -> None:
    table = (DOCS / "api" / "index.md").read_text().partition("## All names")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `edgefl\.([\w.]+)` \| (.+?) \|", table, re.MULTILINE)
    spaces = {space.__name__.removeprefix("edgefl.") for space in SPACES}
    named = {f"{space}.{name}" for space in spaces for name in getattr(edgefl, space).__all__}

    assert {f"{space}.md" for space in spaces} <= {page.name for page in (DOCS / "api").glob("*.md")}
    assert sorted(name for name, _ in rows if "." not in name) == sorted({*edgefl.__all__} - spaces)
    assert {name for name, _ in rows if "." in name} <= named
    assert all(text.endswith(".") for _, text in rows)


def test_gaps_are_seen() -> None:
    def mean(values: np.ndarray[Any, Any], weight: float) -> float:
        """The mean of some values."""
        if weight < 0:
            raise ValueError(weight)
        return float(values.mean() * weight)

    assert set(gaps("mean", mean)) == {"argument weight", "errors", "shapes and types of its arrays"}
    mean.__doc__ = "The mean of ``values``, float64 (n,), times ``weight``. ValueError for a negative one."
    assert list(gaps("mean", mean)) == []


# -- names that the pages of the Python API render exist under the module that they name -------------------


API_NAMES = [
    name
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", API_NAMES)
def test_a_name_of_the_reference_exists(name: str) -> None:
    found = resolve_name(name)
    assert getattr(found, "__module__", name.rpartition(".")[0]) == name.rpartition(".")[0]
