"""Any module as a unit list: an ``nn.Sequential`` as it is, any other ``nn.Module`` cut at places named or found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from torch import Tensor, fx, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.counters import moved_buffers, note_counters
from edgefl.models.draws.steering import without_dispatch, without_masking
from edgefl.models.graph import autocut
from edgefl.models.graph.conditions import check_draws, check_modes, switches
from edgefl.models.graph.flow import Flow
from edgefl.models.graph.output import Output, giving, returning
from edgefl.models.graph.plain import draws, path_of, paths_of, vectorised
from edgefl.models.graph.returned_loss import lifted
from edgefl.models.graph.tracing import Traced, trace
from edgefl.models.graph.units import Stretch
from edgefl.models.hooks import (
    drop_backward_hooks,
    has_forward_hooks,
    hooks_by_parameter,
    note_gradient_hooks,
    noting_gradient_hooks,
)
from edgefl.models.layers.given import joined
from edgefl.models.layers.visible import shaped, visible
from edgefl.models.losses.catalog import fitted
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.returned import ModelLoss
from edgefl.models.modes import in_mode
from edgefl.models.source import Request, Source, unwrapped
from edgefl.models.spec import ModelSpec, on_meta, output_spec, run_fake, sequential, without_values
from edgefl.models.tied import shared
from edgefl.models.user_code import blamed

TAIL, WHOLE = "tail", "model"
Cuts = Sequence[str] | Literal["auto"] | None


def split(
    module: nn.Module,
    cuts: Cuts = None,
    *,
    sample: Sequence[int] | TensorSpec | Mapping[str, TensorSpec],
    classes: int,
    units: int | None = None,
    name: str = "custom",
    accounting_batch: int = 32,
    loss: Loss | None = None,
    labels: TensorSpec | None = None,
    output: Output = None,
) -> ModelSpec:
    """``module`` as a :class:`ModelSpec` that computes the same; ``sample`` is the shape of one float32 input without
    batch dimension, or its shape and dtype, or those of several by the names that forward gives them; ``classes`` how
    many a label chooses from, ``name`` what the model is called.

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
    chosen = cuts if cuts is None or isinstance(cuts, str) else tuple(cuts)
    spec = sample if isinstance(sample, TensorSpec | Mapping) else TensorSpec(tuple(sample))
    request = Request(
        chosen, spec, classes, units, name, accounting_batch, loss=loss, labels=labels, output=output
    )
    with blamed(f"torch cannot list the parts of {type(module).__name__}"):
        inner = unwrapped(module)
    return _split(inner, request)


def _split(module: nn.Module, request: Request) -> ModelSpec:
    shaped_module = shaped(module, request.sample)
    name = type(module).__name__
    unfit = f"{name} cannot be copied and set to training; expected a module that deepcopy and train() accept"
    with noting_gradient_hooks(shaped_module), blamed(unfit):
        copied = visible(shaped_module)
    hooks = hooks_by_parameter(copied)
    drop_backward_hooks(copied)
    without_masking(copied)
    without_dispatch(copied)
    sample, loss, output = request.sample, request.loss, request.output
    if isinstance(loss, ModelLoss):
        loss = lifted(copied, sample, output, loss, request.labels)
    if isinstance(sample, Mapping):
        copied, sample = joined(copied, sample), request.first
    moved = moved_buffers(copied, run_fake, sample)
    for name in moved:
        path, _, own = name.rpartition(".")
        copied.get_submodule(path)._non_persistent_buffers_set.discard(own)
    state = copied.state_dict(keep_vars=True)
    made = _units(copied, sample, request)
    note_gradient_hooks(made, hooks)
    made = shared(made)
    names = _names(state, made)
    note_counters(made, [names[each] for each in moved if each in names])
    output_sample = output_spec(made, sample)
    spec = ModelSpec(
        request.name,
        made,
        sample,
        request.classes,
        request.accounting_batch,
        loss=fitted(loss, output_sample, request.labels, sample),
        global_names=names,
        again=lambda length: _split(
            module,
            replace(
                request.shortened(length),
                loss=request.loss if isinstance(request.loss, ModelLoss) else spec.loss,
            ),
        ),
        source=Source(shaped_module, request, _split),
    )
    spec._boundaries[len(made)] = output_sample
    check_classes(spec)
    return spec


def _units(module: nn.Module, sample: TensorSpec, request: Request) -> nn.Sequential:
    cuts, output = request.cuts, request.output
    if request.whole:
        return sequential([(WHOLE, returning(module, output))])
    plain = type(module).forward is nn.Sequential.forward and not has_forward_hooks(module)
    if cuts is None and request.units is None and plain and isinstance(module, nn.Sequential):
        return _children(module, sample, output)
    if request.units is not None and request.units < 1:
        raise ModelError(f"a model has at least one unit; found units={request.units}", units=request.units)
    if isinstance(cuts, tuple):
        return _at(module, sample, cuts, output)
    try:
        with blamed(f"cannot cut {type(module).__name__}"):
            return _automatic(module, sample, request.units, output)
    except ModelError as error:
        if error.details.get("refused"):
            raise
        return _whole(module, sample, output, error)


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
        bare = on_meta(module).eval()
        with without_values(bare):
            returned = bare(sample.rows(2).zeros().to("meta"))
    except Exception:
        return True
    return isinstance(returned, Tensor)


def _automatic(module: nn.Module, sample: TensorSpec, units: int | None, output: Output) -> nn.Sequential:
    with in_mode(module, training=True):
        traced = _sketch(module, sample, output)
    # What draws computes something else in inference: code that only a closed submodule may hold.
    drawing = {path_of(node) for node in draws(traced.graph)}
    if "" in drawing:
        return _drawing(module, sample, output)
    mapped = {path_of(node) for node in vectorised(traced.graph)}
    if "" in mapped:
        raise ModelError("its forward calls torch.vmap")
    fine = autocut.lending(autocut.rereading(Flow(traced), sample))
    blocks = autocut.blocks(fine)
    opened = autocut.opened(fine, autocut.chosen(fine, blocks)) - drawing - mapped
    # Traced once more with all closed that no cut lies in: it stays what its author wrote.
    try:
        flow = _flow(module, sample, opened, output)
    except ModelError as error:
        if "operation" not in error.details:
            raise
        # A submodule that draws stays open where the code around it changes it or passes more than tensors.
        return _drawing(module, sample, output)
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
    except ModelError as error:
        if error.details.get("refused"):
            raise
        # A batch of any size says better what is wrong.
        return trace(module, sample, layers, output)


def _merged(flow: Flow, cuts: Sequence[int], units: int) -> list[int]:
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


def _drawing(module: nn.Module, sample: TensorSpec, output: Output) -> nn.Sequential:
    """Return ``module``, whose own forward draws in training, as its one unit. ModelError if it draws in inference, too."""
    with in_mode(module, training=False):
        inference = Flow(trace(module, sample, lambda path, part: True, output))
    check_draws(module, inference, "in inference; draw in training only, under `if self.training:`")
    return sequential([(WHOLE, returning(module, output))])


def _whole(module: nn.Module, sample: TensorSpec, output: Output, reason: ModelError) -> nn.Sequential:
    """Return ``module`` as its one unit, because it cannot be cut.

    Raises:
        ModelError: ``reason``, why it cannot be cut, if it does not even run without values.
    """
    for training in (True, False):
        try:
            with in_mode(module, training=training), giving(module, output):
                run_fake(module, sample)
        except Exception:
            raise reason from None
    return sequential([(WHOLE, returning(module, output))])


def _flow(module: nn.Module, sample: TensorSpec, opened: frozenset[str], output: Output) -> Flow:
    """The graph of ``module`` with all but the submodules ``opened`` closed; the same in training and inference."""

    def flow(training: bool) -> Flow:
        with in_mode(module, training=training):
            made = Flow(trace(module, sample, lambda path, part: path not in opened, output))
        check_draws(
            module, made, "where a cut opens the code; draw in a submodule, or leave the cuts to edgefl"
        )
        return made

    found = flow(training=True)
    if found.place.get(found.traced.result, -1) < 0:
        raise ModelError(
            f"the output of {type(module).__name__} is not computed from its input", refused=True
        )
    if found.traced.asked_mode or switches(module):
        check_modes(module, flow(training=False), found)
    return found


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
