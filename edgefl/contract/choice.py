"""Catalog entries with their options as objects: ``FedBAT(rho=6)``. A federation file writes them as a table.

A choice is plain data and builds nothing. So one choice describes every tier, can be stored, and can be compared.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from edgefl.contract.options import check_options
from edgefl.errors import ConfigError

P = ParamSpec("P")
C = TypeVar("C", bound="Choice")
_WITH_OPTIONS = re.compile(r":\w+=")
"""The first option in ``fedprox:mu=0.1``."""


@dataclass(frozen=True, repr=False)
class Choice:
    """Entry of a catalog by ``name``, with the options that were given. Other options have the catalog's defaults.

    ``label`` is the Python name for ``repr``, such as ``FedProx``. Immutable: :meth:`with_options` returns a new
    choice.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __hash__(self) -> int:
        # Values may be lists; equal choices have the same options at least.
        return hash((self.name, frozenset(self.options)))

    def __reduce__(self) -> tuple[object, ...]:
        # A view of a dictionary can be neither copied nor pickled.
        return type(self), (self.name, dict(self.options), self.label)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.label or self.name}({options})"

    def with_options(self, **options: object) -> Self:
        """Return a copy with ``options`` added or replaced. They are validated when the choice is built, not here."""
        return replace(self, options={**self.options, **options})


class AlgorithmChoice(Choice):
    """Local training algorithm with its options.

    Most have these options: ``batch`` samples per local step and ``steps`` local steps per round, both fixed in the
    graphs; ``lr``, the learning rate, a scalar that the server announces; ``momentum`` and ``weight_decay`` (on kernels
    only) of the local optimizer. ``masked_loss`` sets logits of classes without local samples to 0. A number out of
    range raises ConfigError.
    """

    def personal(self, alpha: float) -> Self:
        """Return a copy whose exported bundle also contains a graph that adapts the model to one user by steps of size
        ``alpha``.
        """
        return self.with_options(personal=alpha)


class LossChoice(Choice):
    """Training loss with its options. It has one value per sample."""


class CodecChoice(Choice):
    """Encoding of an update, with its options.

    Most have these options: ``statistics``, bits per entry of moving statistics (32: float32); ``binarize_1d``, True if
    biases and norms are coded like other tensors; and ``sign0``, the code of an unchanged entry (``random``, ``plus``). A
    number out of range raises ConfigError.
    """


class SubmodelChoice(Choice):
    """Submodel type of a tier, with its options."""


class OptimizerChoice(Choice):
    """Server optimizer for the mean of the updates, with its options."""


class CatalogEntry(Generic[P, C]):
    """Entry of a catalog. Calling it with options of its factory returns a :class:`Choice`, and builds nothing.

    The signature of the factory defines the options. The call raises ConfigError for an unknown option or one of
    another type, and TypeError for a positional argument.
    """

    def __init__(self, kind: type[C], name: str, label: str, factory: Any, upon: int) -> None:
        self.name, self.label, self.factory = name, label, factory
        self._kind, self._upon = kind, upon
        self.__doc__ = inspect.getdoc(factory)
        signature = inspect.signature(factory)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[upon:])

    def __call__(self, *args: P.args, **options: P.kwargs) -> C:
        if args:
            raise TypeError(f"{self.label} takes its options by name: {self!r}")
        check_options(self.label, self.factory, options, upon=self._upon)
        return self._kind(self.name, dict(options), self.label)

    def __repr__(self) -> str:
        parameters = self.__signature__.replace(return_annotation=inspect.Signature.empty)
        return f"{self.label}{parameters}"


def collect_factories(names: Mapping[str, object]) -> dict[str, Any]:
    """Return the factory of each catalog entry among the values of ``names``, such as a module's globals, by the
    entry's name.
    """
    return {each.name: each.factory for each in names.values() if isinstance(each, CatalogEntry)}


def as_choice(argument: str, kind: type[C], value: object) -> C:
    """Return ``value``, the argument of a public function, as a choice of class ``kind``.

    Args:
        argument: Name of the argument, for the error text.
        kind: Required class of the choice.
        value: A choice, a catalog entry (its defaults are used), or the name of an entry.

    Raises:
        ConfigError: ``value`` is something else, a choice of another class, or a name with options as on the command
            line.
    """
    if isinstance(value, str) and _WITH_OPTIONS.search(value):
        raise ConfigError(
            f"argument `{argument}` is {value!r}, as the command line has it; options go into an object, such as "
            "edgefl.algorithms.FedProx(mu=0.1)",
            argument=argument,
        )
    made = value() if isinstance(value, CatalogEntry) else kind(value) if isinstance(value, str) else value
    if not isinstance(made, kind):
        raise ConfigError(
            f"argument `{argument}` is {value!r}; give a choice such as those that `import edgefl` has, or its name",
            argument=argument,
        )
    return made


def define_entry(
    kind: type[C], name: str, label: str, factory: Callable[Concatenate[Any, P], Any]
) -> CatalogEntry[P, C]:
    """Return the catalog entry of a factory whose first parameter is no option, but a model, an objective or a name.

    Args:
        kind: Class of the choices that the entry returns.
        name: Name in federation files.
        label: Name in Python.
        factory: Function that builds the described object, such as an algorithm. Its other parameters are the
            options.
    """
    return CatalogEntry(kind, name, label, factory, 1)


def define_plain(kind: type[C], name: str, label: str, factory: Callable[P, Any]) -> CatalogEntry[P, C]:
    """Return the catalog entry of a factory whose parameters are all options.

    Args:
        kind: Class of the choices that the entry returns.
        name: Name in federation files.
        label: Name in Python.
        factory: Function that builds the described object, such as an optimizer.
    """
    return CatalogEntry(kind, name, label, factory, 0)
