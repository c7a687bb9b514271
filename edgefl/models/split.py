"""Any module as a unit list: an ``nn.Sequential`` as it is, any other ``nn.Module`` cut at places named or found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Literal

from torch import Tensor, fx, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.draws.steering import without_dispatch, without_masking
from edgefl.models.graph import autocut
from edgefl.models.graph.flow import Flow
from edgefl.models.graph.output import Output, returning
from edgefl.models.graph.plain import draws, path_of, paths_of
from edgefl.models.graph.returned_loss import lifted
from edgefl.models.graph.tracing import Traced, trace
from edgefl.models.graph.units import Stretch
from edgefl.models.layers.given import joined
from edgefl.models.layers.visible import shaped, visible
from edgefl.models.losses.catalog import fitted
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.returned import ModelLoss
from edgefl.models.spec import ModelSpec, cut_to, on_meta, output_spec, sequential, without_values
from edgefl.models.tied import shared
from edgefl.models.user_code import source_of
from edgefl.wire.errors import ModelError

TAIL, WHOLE = "tail", "model"
Cuts = Sequence[str] | Literal["auto"] | None


def split(
    module: nn.Module,
    cuts: Cuts = None,
    *,
    sample: TensorSpec | Mapping[str, TensorSpec],
    classes: int,
    units: int | None = None,
    name: str = "custom",
    accounting_batch: int = 32,
    loss: Loss | None = None,
    labels: TensorSpec | None = None,
    output: Output = None,
) -> ModelSpec:
    """``module`` as a :class:`ModelSpec` that computes the same; ``sample`` is the shape and dtype of one input without
    batch dimension, or those of several by the names that forward gives them; ``classes`` how many a label chooses from,
    ``name`` what the model is called.

    Its forward may return a tensor, or a mapping, a dataclass or a tuple with one: ``output``, a key, an attribute or a
    position, by default ``logits`` or else the first floating tensor.

    Without ``cuts`` an ``nn.Sequential`` keeps its children as units and any other module is cut automatically
    (``"auto"``: both): at points of its graph that exactly one tensor crosses, between the blocks that it repeats,
    each unit with at least one kernel; ``units`` merges them into at most that many, of balanced weights. The units
    are named by the submodules they hold.

    Otherwise each cut is the path of a submodule (``"layer1"``, ``"features.3"``) after which exactly one tensor may
    be needed by the rest; the units are named by their cuts, the last one ``tail``. Dots in names become underscores.
    Inside a unit, tensors keep their paths; a unit that is exactly one submodule drops that path, so
    ``layer2.0.weight`` stays ``layer2.0.weight``. Tensors that forward never uses are left out.

    The module is copied. A module whose own forward draws
    random numbers, by anything but dropout, stays whole. ``loss`` is one of :mod:`edgefl.models.losses`; without it cross
    entropy for an output (classes,), or the one loss that fits the output and ``labels`` (one label of the data).
    ``accounting_batch`` is :class:`ModelSpec`'s. Weights with several uses are one tensor, of the last unit that uses it
    (:mod:`edgefl.models.tied`). Raises ModelError, naming the cut and the tensors, where more than one tensor crosses or
    moving statistics are needed on both sides, and with torch's reason and the line of code where the module
    cannot be traced or draws in inference.
    """
    whole, chosen = sample, loss

    def again(length: int) -> ModelSpec:
        """The same cuts for shorter samples."""
        first = next(iter(whole.values())) if isinstance(whole, Mapping) else whole

        def cut(each: TensorSpec) -> TensorSpec:
            return cut_to(each, length) if each.shape[:1] == first.shape[:1] else each

        return split(
            module,
            cuts,
            sample={key: cut(each) for key, each in whole.items()}
            if isinstance(whole, Mapping)
            else cut(whole),
            classes=classes,
            units=units,
            name=name,
            accounting_batch=accounting_batch,
            loss=chosen if isinstance(chosen, ModelLoss) else spec.loss,
            labels=None if labels is None else cut(labels),
            output=output,
        )

    copied = visible(shaped(module, sample))
    without_masking(copied)
    without_dispatch(copied)
    if isinstance(loss, ModelLoss):
        with _mode(copied, training=False):
            loss = lifted(copied, sample, output, loss, labels)
    if isinstance(sample, Mapping):
        copied, sample = joined(copied, sample), next(iter(sample.values()))
    state = copied.state_dict(keep_vars=True)
    plain = type(copied).forward is nn.Sequential.forward
    if cuts is None and units is None and plain and isinstance(copied, nn.Sequential):
        made = _children(copied, sample, output)
    elif cuts is None or cuts == "auto":
        made = _automatic(copied, sample, units, output)
    else:
        made = _at(copied, sample, tuple(cuts), output)
    made = shared(made)
    spec = ModelSpec(
        name,
        made,
        sample,
        classes,
        accounting_batch,
        loss=fitted(loss, output_spec(made, sample), labels, sample),
        global_names=_names(state, made),
        again=again,
    )
    check_classes(spec)
    return spec


def _names(state: Mapping[str, Tensor], units: nn.Sequential) -> dict[str, str]:
    """For each name in a module's ``state``, of a tensor that the state of its units has too, the name there."""
    names = {id(tensor): name for name, tensor in units.state_dict(keep_vars=True).items()}
    return {own: names[id(tensor)] for own, tensor in state.items() if id(tensor) in names}


def check_classes(spec: ModelSpec) -> None:
    """ModelError if the loss cannot read the output, or the model gives another number of classes than it should."""
    label = spec.label
    # Other labels than numbers of classes are no choice, whatever their bounds are.
    if not label.dtype.is_floating_point and label.below not in (None, spec.classes):
        out = spec.boundary(len(spec.units)).shape
        raise ModelError(
            f"{spec.name} gives {out} per sample, so {label.below} classes; {spec.classes} classes were asked for: give it "
            "as many outputs, or the loss that reads them (`edgefl ls losses`)",
            found=out,
        )


def _children(module: nn.Sequential, sample: TensorSpec, output: Output) -> nn.Sequential:
    """The children as they are; a last one that returns more than a tensor gives its output alone."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    if children and not _gives_tensor(sequential(children), sample, output):
        name, last = children.pop()
        children.append((name, returning(last, output)))
    return sequential(children)


def _gives_tensor(module: nn.Sequential, sample: TensorSpec, output: Output) -> bool:
    """Whether ``module`` returns a tensor as it is; also if it fails, which is told elsewhere."""
    if output is not None:
        return False
    try:
        with without_values():
            returned = on_meta(module).eval()(sample.rows(2).zeros().to("meta"))
    except Exception:
        return True
    return isinstance(returned, Tensor)


def _automatic(module: nn.Module, sample: TensorSpec, units: int | None, output: Output) -> nn.Sequential:
    with _mode(module, training=True):
        traced = _sketch(module, sample, output)
    # What draws computes something else in inference: code that only a closed submodule may hold.
    drawing = {path_of(node) for node in draws(traced.graph)}
    if "" in drawing:
        return _whole(module, sample, output)
    fine = autocut.lending(autocut.rereading(Flow(traced), sample))
    blocks = autocut.blocks(fine)
    opened = autocut.opened(fine, autocut.chosen(fine, blocks)) - drawing
    # Traced once more with all closed that no cut lies in: it stays what its author wrote.
    flow = _flow(module, sample, opened, output)
    flow = replace(flow, lent=fine.lent, again=fine.again)
    cuts = autocut.chosen(flow, blocks)
    if units is not None:
        cuts = _merged(flow, cuts, units)
    stretches = _stretches(flow, cuts)
    return sequential(
        (name, part.module()) for name, part in zip(autocut.named(stretches), stretches, strict=True)
    )


def _sketch(module: nn.Module, sample: TensorSpec, output: Output) -> Traced:
    """The graph with layers closed, to find cuts in."""

    def layers(_path: str, part: nn.Module) -> bool:
        return autocut.is_layer(part)

    try:
        return trace(module, sample, layers, output, sketched=True)
    except ModelError:  # a batch of any size says better what is wrong
        return trace(module, sample, layers, output)


def _merged(flow: Flow, cuts: Sequence[int], units: int) -> list[int]:
    if units < 1:
        raise ModelError(f"a model has at least one unit; found units={units}", units=units)
    state = flow.traced.root.state_dict()
    sizes = [sum(state[name].numel() for name in part.state) for part in _stretches(flow, cuts)]
    return [cuts[start - 1] for start in autocut.grouped(sizes, units)]


def _at(module: nn.Module, sample: TensorSpec, cuts: tuple[str, ...], output: Output) -> nn.Sequential:
    known = {path for path, _ in module.named_modules() if path}
    unknown = [cut for cut in cuts if cut not in known]
    if unknown or len(set(cuts)) != len(cuts):
        problem = f"no submodule {unknown[0]!r}" if unknown else f"a cut is named twice in {cuts}"
        raise ModelError(
            f"cannot cut: {problem}; cuts are paths of submodules", cuts=cuts, known=sorted(known)
        )
    ancestors = {cut[:dot] for cut in cuts for dot, letter in enumerate(cut) if letter == "."}
    flow = _flow(module, sample, frozenset(ancestors), output)
    flow = replace(flow, lent=flow.lendable)
    ends = {cut: _end(flow, cut) for cut in cuts}
    ordered = sorted(cuts, key=ends.__getitem__)
    for before, after in pairwise(ordered):
        if ends[before] == ends[after]:
            raise ModelError(
                f"cuts {before!r} and {after!r} lie at the same place; name one of them", cuts=cuts
            )
    for cut in ordered:
        _check_crossing(flow, cut, ends[cut])
    last = len(flow.steps) - 1
    stretches = _stretches(flow, [ends[cut] for cut in ordered if ends[cut] < last])
    names = autocut.unit_names(ordered if len(stretches) == len(ordered) else [*ordered, TAIL])
    return sequential((name, part.module()) for name, part in zip(names, stretches, strict=True))


def _whole(module: nn.Module, sample: TensorSpec, output: Output) -> nn.Sequential:
    """``module`` as its one unit. ModelError if it draws in inference, too."""
    with _mode(module, training=False):
        inference = Flow(trace(module, sample, lambda path, part: True, output))
    _check_draws(module, inference, "in inference; draw in training only, under `if self.training:`")
    return sequential([(WHOLE, returning(module, output))])


def _flow(module: nn.Module, sample: TensorSpec, opened: frozenset[str], output: Output) -> Flow:
    """The graph of ``module`` with all but the submodules ``opened`` closed; the same in training and inference."""

    def flow(training: bool) -> Flow:
        with _mode(module, training=training):
            made = Flow(trace(module, sample, lambda path, part: path not in opened, output))
        _check_draws(
            module, made, "where a cut opens the code; draw in a submodule, or leave the cuts to edgefl"
        )
        return made

    found = flow(training=True)
    if found.place.get(found.traced.result, -1) < 0:
        raise ModelError(f"the output of {type(module).__name__} is not computed from its input")
    if found.traced.asked_mode or _switches(module):
        _check_modes(module, flow(training=False), found)
    return found


def _switches(module: nn.Module) -> bool:
    """Whether a part of ``module`` does more than to note in which mode it is."""
    held = []
    for training in (False, True):
        with _mode(module, training=training):
            held.append([_held(part) for part in module.modules()])
    return held[0] != held[1]


def _held(part: nn.Module) -> dict[str, int]:
    """What a module holds beside its mode, by identity."""
    groups = (part.__dict__, part._modules, part._parameters, part._buffers)
    return {name: id(value) for group in groups for name, value in group.items() if name != "training"}


@contextmanager
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """``module`` in one mode as a whole; afterwards each part is in its own again."""
    before = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for part, own in before.items():
            part.training = own


def _check_draws(module: nn.Module, flow: Flow, where: str) -> None:
    for node in draws(flow.traced.graph):
        source = source_of(node)
        raise ModelError(
            f"{node.target} in {path_of(node) or type(module).__name__} draws random numbers {where}"
            + (f" (at {source})" if source else ""),
            operation=str(node.target),
            source=source,
        )


def _check_modes(module: nn.Module, inference: Flow, training: Flow) -> None:
    """ModelError if the code between the closed submodules does something else in training than in inference."""
    described = [flow.traced.described() for flow in (inference, training)]
    nodes = [flow.nodes for flow in (inference, training)]
    for (before, after), both in zip(zip_longest(*described), zip_longest(*nodes), strict=True):
        if before != after:
            source = next(filter(None, (source_of(node) for node in reversed(both) if node is not None)), "")
            raise ModelError(
                f"{type(module).__name__} computes {_short(after)} in training where it computes {_short(before)} in "
                "inference" + (f" (at {source})" if source else "") + "; put what differs into a submodule "
                "that no cut opens",
                training=after,
                inference=before,
                source=source,
            )


def _short(line: str | None) -> str:
    return (line or "nothing").partition("(")[0]


def _stretches(flow: Flow, cuts: Sequence[int]) -> list[Stretch]:
    source: fx.Node = flow.traced.source
    stretches: list[Stretch] = []
    for before, after in pairwise([-1, *cuts, len(flow.steps) - 1]):
        last = after == len(flow.steps) - 1
        result = flow.traced.result if last else flow.crossing[after][0]
        stretches.append(Stretch(flow, before + 1, after + 1, source, result))
        source = result
    return stretches


def _end(flow: Flow, cut: str) -> int:
    """The last step that belongs to the submodule ``cut``."""
    inside = [place for place, step in enumerate(flow.steps) if cut in paths_of(step)]
    if not inside:
        raise ModelError(f"the submodule {cut!r} is never called in forward", cut=cut)
    return inside[-1]


def _check_crossing(flow: Flow, cut: str, place: int) -> None:
    if place == len(flow.steps) - 1:
        return
    crossing, statistics = flow.crossing[place], flow.shared[place] - flow.lent
    if len(crossing) != 1 or not flow.is_samples(crossing[0]):
        names = [flow.traced.label(node) for node in crossing]
        raise ModelError(
            f"cut {cut!r}: exactly one tensor of samples may cross, found {len(crossing)}: {', '.join(names)}. Cut "
            "where nothing but the cut's own output is used later (after a whole block, not inside a skip connection)",
            cut=cut,
            tensors=names,
        )
    if statistics:
        target = min(statistics)
        raise ModelError(
            f"cut {cut!r}: {target!r} is used before and after it, and training moves it in its forward pass: it cannot be "
            "in both units. Cut elsewhere, or give each place a layer of its own",
            cut=cut,
            target=target,
        )
