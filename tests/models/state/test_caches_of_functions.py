"""Caches outside of a module, and Python state in it, are after a run without values what they were before."""

# ruff: noqa: PLW0603, PLW0108 - globals and names that are looked up late are what is tested
from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

import edgefl
from edgefl.contract.tensors import TensorSpec
from edgefl.models.partition.tracer import export_module
from edgefl.models.python_state.snapshots import restored_state
from edgefl.models.spec import run_meta
from edgefl.models.split import split
from edgefl.objective.objective import Objective

ROWS = TensorSpec((6,))
TABLES: dict[int, Tensor] = {}
ORDERED: OrderedDict[int, Tensor] = OrderedDict()
LISTED: list[Tensor] = []
SEEN: set[str] = set()
LAST: Tensor | None = None


def _made(size: int) -> Tensor:
    return torch.arange(size) * 0.5


@lru_cache
def bounded(size: int) -> Tensor:
    return _made(size)


@cache
def unbounded(size: int) -> Tensor:
    return _made(size)


@lru_cache(maxsize=4)
def nested(size: int) -> dict[str, tuple[Tensor, int]]:
    return {"row": (_made(size), size)}


@cache
def settings() -> dict[str, int]:
    """Returns the same object each time, which whoever holds it relies on."""
    return {"size": 6}


def memoized(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    kept: dict[int, Tensor] = {}

    @wraps(function)
    def called(size: int) -> Tensor:
        if size not in kept:
            kept[size] = function(size)
        return kept[size]

    return called


@memoized
def by_closure(size: int) -> Tensor:
    return _made(size)


def by_default(size: int, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault(size, _made(size)) if size not in kept else kept[size]


def by_keyword(size: int, *, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault(size, _made(size)) if size not in kept else kept[size]


def by_global(size: int) -> Tensor:
    if size not in TABLES:
        TABLES[size] = _made(size)
    return TABLES[size]


def by_order(size: int) -> Tensor:
    if size not in ORDERED:
        ORDERED[size] = _made(size)
    ORDERED.move_to_end(size)
    return ORDERED[size]


def by_list(size: int) -> Tensor:
    if not LISTED:
        LISTED.append(_made(size))
        SEEN.add("made")
    return LISTED[0]


def by_name(size: int) -> Tensor:
    global LAST
    if LAST is None:
        LAST = _made(size)
    return LAST


def by_new_name(size: int) -> Tensor:
    global NEW
    try:
        return NEW  # type: ignore[name-defined, no-any-return]
    except NameError:
        NEW = _made(size)  # type: ignore[name-defined]
        return NEW  # type: ignore[name-defined, no-any-return]


def by_attribute(size: int) -> Tensor:
    if not hasattr(by_attribute, "kept"):
        by_attribute.kept = _made(size)  # type: ignore[attr-defined]
    return by_attribute.kept  # type: ignore[attr-defined, no-any-return]


class Rotary:
    """Not a module, with a table of its own."""

    def __init__(self) -> None:
        self.size, self.table = 0, torch.zeros(0)

    def __call__(self, size: int) -> Tensor:
        if self.size != size:
            self.size, self.table = size, _made(size)
        return self.table


class Shared:
    """Keeps tables for all of its class."""

    tables: ClassVar[dict[int, Tensor]] = {}
    last: ClassVar[Tensor | None] = None

    @classmethod
    def of(cls, size: int) -> Tensor:
        if cls.last is None:
            cls.last = _made(size)
        return cls.tables.setdefault(size, cls.last)

    @staticmethod
    @lru_cache
    def static(size: int) -> Tensor:
        return _made(size)

    @lru_cache  # noqa: B019
    def method(self, size: int) -> Tensor:
        return _made(size)


SHARED = Shared()
WAYS: dict[str, Callable[[int], Tensor]] = {
    "lru_cache": bounded,
    "cache": unbounded,
    "nested": lambda size: nested(size)["row"][0],
    "closure": by_closure,
    "default": by_default,
    "keyword": by_keyword,
    "global": by_global,
    "ordered": by_order,
    "list": by_list,
    "name": by_name,
    "new name": by_new_name,
    "attribute of a function": by_attribute,
    "object": Rotary(),
    "class": Shared.of,
    "static method": Shared.static,
    "cached method": lambda size: SHARED.method(size),
}


class Positions(nn.Module):
    """Adds positions from a cache. What is added reads their values in Python, as BEiT does."""

    def __init__(self, table: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.table = nn.Linear(6, 6), nn.Linear(6, 4), table

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.second(torch.tanh(self.first(x) + self.table(x.shape[1]))))


@pytest.mark.sample(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_serves_runs_with_and_without_values(way: str, filled: bool) -> None:
    torch.manual_seed(0)
    table, x = WAYS[way], torch.randn(3, 6)
    module = Positions(table)
    wanted = module(x) if filled else None
    for _ in range(2):
        algorithm = export_module(module, ROWS)
        objective = Objective(split(nn.Sequential(module), sample=ROWS, classes=4).module, ROWS)
        objective.noise(3)
        run_meta(nn.Sequential(module), ROWS, 2)
        torch.testing.assert_close(algorithm.module()(x), module(x))
    found = table(6)
    assert type(found) is Tensor and found.device.type == "cpu" and found.tolist() == _made(6).tolist()
    assert wanted is None or torch.equal(module(x), wanted)


def test_a_bundle_s_compile_leaves_a_cache_as_it_was() -> None:
    spec = split(Positions(bounded), sample=ROWS, classes=4)
    edgefl.compile(spec)
    assert bounded(6).tolist() == _made(6).tolist()


def test_a_cache_without_tensors_is_left_alone() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.layer(x) * settings()["size"])

    held = settings()
    export_module(Sized(), ROWS)
    assert settings() is held


class Counting(nn.Module):
    """Changes all kinds of Python state as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(6, 4), nn.Dropout()
        self.step, self.h, self.name = 0, None, "new"
        self.log: list[int] = []
        self.recent: deque[int] = deque([1], maxlen=2)
        self.names, self.counts = {"a"}, defaultdict(int, b=1)
        self.deep = {"x": [{"y": 1}]}
        self.gone: Any = 1

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        self.log.append(self.step)
        self.recent.extend([4, 5])
        self.names.add("b")
        self.counts["c"] += 1
        self.deep["x"][0]["y"] += 1
        self.name, self.made, self.h = "old", 3, x.shape[1]  # type: ignore[assignment]
        self.part.p, self.part.asked = 0.1, True  # type: ignore[assignment]
        self.part.eval()
        if hasattr(self, "gone"):
            del self.gone
        return cast(Tensor, self.layer(x))


@pytest.mark.parametrize("run", ["export", "draws", "meta", "plain"])
def test_python_state_of_all_parts_is_as_before(run: str) -> None:
    module = Counting()
    units = nn.Sequential(module)
    before = copy.deepcopy(_state(module))
    if run == "export":
        export_module(module, ROWS)
    elif run == "draws":
        Objective(units, ROWS).noise(2)
    elif run == "meta":
        run_meta(units, ROWS, 2)
    else:
        with restored_state(module):
            module(torch.ones(2, 6))
            assert module.step == 1 and not hasattr(module, "gone")
    assert _state(module) == before
    assert module.part.training and module.part.p == 0.5


def _state(module: nn.Module) -> list[dict[str, Any]]:
    own = {*nn.Module().__dict__} - {"training"}
    return [{key: value for key, value in vars(part).items() if key not in own} for part in module.modules()]
