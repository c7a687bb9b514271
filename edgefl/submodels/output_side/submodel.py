"""EmbracingFL: a tier trains the units behind its cut and runs the units before it forward, frozen, in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.layers.recurrent import BiLstm, truncate
from edgefl.models.spec import ModelSpec, output_spec, sequential
from edgefl.models.tied import borrowed_names
from edgefl.submodels.submodel import FrozenUnits, Submodel, units_with_tensors
from edgefl.wire.regions import Placement
from edgefl.wire.tensors import Array

Names = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OutputSide(Submodel):
    """The units (stages of the model) behind the cut, trained, and the units before it, frozen, in ``chunks``
    downloads (embracingfl.md 2.2).

    With U units in ``spec``, ``cut+1 .. U`` are trained and ``1 .. cut`` are frozen. ``cut=0`` is the strong tier:
    everything is trained, without prefix and record. A tensor that units on both sides of the cut use (tied weights) is
    trained through its uses behind the cut. The frozen units read its value at the start of the round, as in the LSTM's
    weak tier (embracingfl.md 3.3).

    Attributes:
        cut: Number of frozen units.
        chunks: Number of groups of frozen units, made so that the largest is as small as possible; or the groups as
            lists of unit names.
        skip: Above 0 the LSTM's weak tier: the unit behind the cut is a BiLstm, and the states after its first
            ``skip`` words are computed once, frozen, and recorded (embracingfl.md 3.3). Its tensors are in the prefix
            *and* trained.
    """

    kind = "output_side"
    spec: ModelSpec
    cut: int
    chunks: int | Sequence[Sequence[str]] = 1
    skip: int = 0

    def __post_init__(self) -> None:
        units = len(self.spec.units)
        if not 0 <= self.cut < units:
            raise ModelError(
                f"a cut of {self.spec.name} lies in 0..{units - 1} (its units: {', '.join(self.spec.units)}); "
                f"found {self.cut}",
                cut=self.cut,
                units=self.spec.units,
            )
        if self.skip:
            self._check_skip()
        _ = self.groups

    def _check_skip(self) -> None:
        first, length = self._first_trained, self.spec.sample.shape[0]
        if not isinstance(first, BiLstm):
            raise ModelError(
                "only a BiLstm right behind the cut can skip words", skip=self.skip, unit=type(first).__name__
            )
        if first.length != length:
            raise ModelError(
                f"a tier with skip records states of {first.length} tokens, and this input has {length}: leave out "
                "data.lengths, or skip",
                skip=self.skip,
                length=length,
            )

    @cached_property
    def groups(self) -> tuple[Names, ...]:
        """Names of the frozen units (stages of the model) of each chunk, in order. Empty if ``cut`` is 0.

        Raises:
            ModelError: ``chunks`` does not divide the frozen units.
        """
        frozen = self.spec.units[: self.cut]
        if isinstance(self.chunks, int):
            return _balance(frozen, self._sizes(frozen), self.chunks)
        groups = tuple(tuple(group) for group in self.chunks)
        if tuple(name for group in groups for name in group) != frozen or not all(groups):
            raise ModelError(
                f"the chunks of cut {self.cut} must list the units {list(frozen)} in order, found {groups}",
                chunks=groups,
                units=frozen,
                cut=self.cut,
            )
        return groups

    @cached_property
    def prefix(self) -> tuple[FrozenUnits, ...]:
        """Chunks of frozen units (stages of the model), in the order of their execution. Empty if ``cut`` is 0."""
        chunks: list[FrozenUnits] = []
        sample = self.spec.sample
        for group in self.groups:
            units = [(name, self.spec.module.get_submodule(name)) for name in group]
            if self.skip and group is self.groups[-1]:
                units.append((self.spec.units[self.cut], self._truncated[0]))
            module = sequential(units)
            result = output_spec(module, sample)
            lenders = dict.fromkeys(name.partition(".")[0] for name in borrowed_names(module).values())
            chunks.append(FrozenUnits((*units_with_tensors(module), *lenders), module, sample, result))
            sample = result
        return tuple(chunks)

    @cached_property
    def suffix(self) -> nn.Sequential:
        """Trained units (stages of the model): the last ones. They share their modules with the model."""
        trained = self.spec.part(self.cut, len(self.spec.units))
        if not self.skip:
            return trained
        first = self.spec.units[self.cut]
        return sequential(
            (name, self._truncated[1] if name == first else unit) for name, unit in trained.named_children()
        )

    @cached_property
    def boundary(self) -> TensorSpec:
        return self.prefix[-1].result if self.prefix else self.spec.sample

    @cached_property
    def holds(self) -> Names:
        """Global names of the tensors of the trained units (stages of the model), with moving statistics."""
        return tuple(self.suffix.state_dict())

    @cached_property
    def units(self) -> Names:
        """Names of the trained units (stages of the model) that have tensors.

        Tiers that train the same units download the same blobs.
        """
        return units_with_tensors(self.suffix)

    @property
    def identity(self) -> Mapping[str, object]:
        return {"kind": self.kind, "cut": self.cut, "chunks": self.groups, "skip": self.skip}

    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        """Return the regions of the tensors of the trained units: their positions in the global weights, here whole
        tensors.

        The payload (arrays that only this tier receives) is empty. The arguments have no effect.
        """
        return self._placement

    @cached_property
    def _placement(self) -> Placement:
        return Placement(dict.fromkeys(self.holds))

    @property
    def _first_trained(self) -> nn.Module:
        return self.spec.module.get_submodule(self.spec.units[self.cut])

    @cached_property
    def _truncated(self) -> tuple[nn.Module, nn.Module]:
        whole = self._first_trained
        if not isinstance(whole, BiLstm) or not 0 < self.skip < whole.length or self.cut == 0:
            raise ModelError(
                f"cannot skip {self.skip} words behind cut {self.cut}", skip=self.skip, cut=self.cut
            )
        return truncate(whole, self.skip)

    def _sizes(self, units: Names) -> list[int]:
        state = self.spec.weights
        return [
            sum(tensor.numel() for key, tensor in state.items() if key.startswith(f"{name}."))
            for name in units
        ]


def output_side(
    spec: ModelSpec, *, cut: int = 0, chunks: int | Sequence[Sequence[str]] = 1, skip: float = 0.0
) -> OutputSide:
    """Return the units (stages of the model) behind ``cut``, trained; those before it, frozen, in ``chunks`` downloads
    (EmbracingFL, embracingfl.md 2.2).

    Args:
        spec: Model.
        cut: Number of frozen units.
        chunks: Number of downloads of the frozen units, or lists of unit names.
        skip: Share of a sample's tokens without gradients, for a bidirectional LSTM right behind the cut: 0.5 is the
            paper's weak tier (embracingfl.md 3.3).

    Raises:
        ModelError: The model does not have this cut, these chunks or this share.
    """
    if not 0.0 <= skip < 1.0:
        raise ModelError(f"skip is a share of the tokens, from 0 to below 1; found {skip}", skip=skip)
    length, *_ = (*spec.sample.shape, 0)  # a sample that is one number has none
    return OutputSide(spec, cut, chunks, int(skip * length))


def _balance(units: Names, sizes: Sequence[int], count: int) -> tuple[Names, ...]:
    """Return ``units`` split into ``count`` consecutive groups such that the largest sum of ``sizes`` is least.

    Of equally good splits, take the one whose groups start earliest. Without units return ().

    Raises:
        ModelError: ``count`` is below 1 or above the number of units.
    """
    if not units:
        return ()
    if not 1 <= count <= len(units):
        raise ModelError(
            f"{len(units)} frozen units make 1..{len(units)} chunks, found {count}", chunks=count, units=units
        )
    # best[k][i]: (largest sum, where the last group starts) over splits of the first i units into k groups.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for groups in range(1, count + 1):
        best.append(
            {
                stop: min(
                    (max(best[-1][start][0], sum(sizes[start:stop])), start)
                    for start in range(groups - 1, stop)
                    if start in best[-1]
                )
                for stop in range(groups, len(units) + 1)
            }
        )
    stop, chunks = len(units), []
    for groups in range(count, 0, -1):
        start = best[groups][stop][1]
        chunks.append(units[start:stop])
        stop = start
    return tuple(reversed(chunks))


@dataclass(frozen=True)
class PresetTier:
    """Preset tier of a model, see :func:`tiers`. Its fields are arguments of :func:`output_side`."""

    cut: int
    chunks: int | tuple[Names, ...] = 1
    # Share of the words whose states are not back-propagated through (the LSTM's weak tier).
    skip: float = 0.0

    def of(self, spec: ModelSpec) -> OutputSide:
        """Return the submodel of ``spec`` for this tier."""
        return output_side(spec, cut=self.cut, chunks=self.chunks, skip=self.skip)

    @property
    def table(self) -> Mapping[str, object]:
        """Options of the tier as a dictionary, in the form of a tier's table in a federation file."""
        options = {"options": {"skip": self.skip}} if self.skip else {}
        return {"cut": self.cut, "chunks": self.chunks, **options}


STRONG = PresetTier(0)
_STAGE_1 = ("stem", "block1", "block2", "block3")
_STAGE_2 = ("block4", "block5", "block6")

# The paper's Table 1 (embracingfl.md 2.2), its chunks (embracingfl.md 2.4), and ResNet-8 (embracingfl.md 9.2). The others
# are ours, after the same pattern: moderate leaves the first stages frozen, weak trains the last stage.
TIERS: Mapping[str, Mapping[str, PresetTier]] = {
    "resnet20": {"strong": STRONG, "moderate": PresetTier(4), "weak": PresetTier(7, (_STAGE_1, _STAGE_2))},
    "resnet8": {"strong": STRONG, "moderate": PresetTier(2), "weak": PresetTier(3, 2)},
    "cnn": {"strong": STRONG, "moderate": PresetTier(2), "weak": PresetTier(3, 2)},
    "bilstm": {"strong": STRONG, "moderate": PresetTier(1), "weak": PresetTier(1, 1, skip=0.5)},
    "resnet18": {"strong": STRONG, "moderate": PresetTier(5), "weak": PresetTier(7, 2)},
    "mobilenet": {"strong": STRONG, "moderate": PresetTier(7, 2), "weak": PresetTier(14, 2)},
    "convnext": {"strong": STRONG, "moderate": PresetTier(6), "weak": PresetTier(13, 2)},
    "vit": {"strong": STRONG, "moderate": PresetTier(3), "weak": PresetTier(5, 2)},
    "bert": {"strong": STRONG, "moderate": PresetTier(2), "weak": PresetTier(4, 2)},
    "lstm_lm": {"strong": STRONG, "moderate": PresetTier(1), "weak": PresetTier(2)},
}


def tiers(model: str) -> Mapping[str, PresetTier]:
    """Return the preset tiers ``strong``, ``moderate`` and ``weak`` of the model named ``model``.

    Raises:
        ModelError: The model has no preset tiers. The text lists the models that have some.
    """
    if model not in TIERS:
        raise ModelError(
            f"no preset tiers for model {model!r} (there are some for {', '.join(sorted(TIERS))}): give cuts",
            model=model,
        )
    return TIERS[model]
