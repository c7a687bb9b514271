"""Side effects of the code of a module: it writes weights, switches gradients, changes Python state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgefl.comparison.outside import noting_outside
from edgefl.errors import ModelError
from edgefl.models.losses.loss import Loss
from edgefl.models.python_state.snapshots import Snapshot, StateChange, snapshot_of
from edgefl.models.torch_functions.control_flow import writes
from edgefl.models.torch_functions.storage import memory_of
from edgefl.models.user_code import at_line
from edgefl_export.capture.refusals import instead_of

_TOGGLED = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_REPLACED = Tensor.data.__set__  # type: ignore[attr-defined]


class SideEffects(TorchFunctionMode):
    """Observer of side effects of the user's code while torch trains ``module``.

    Attributes:
        changed: Python state that changes from step to step, by its path.
        hooked: True if the forward pass registered hooks of tensors.
        tensors: (path, tensor) of all tensors that the code can reach after the first step.
        outside: names of functions that the code calls and that read or write state outside of Python.
    """

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self._module, self._loss = module, loss
        self._names = {memory_of(each): name for name, each in module.named_parameters()}
        self._parameters = {name: id(each) for name, each in module.named_parameters(remove_duplicate=False)}
        self._problems: list[str] = []
        self._after_first: Snapshot | None = None
        self.changed: dict[str, StateChange] = {}
        self.hooked = False
        self.tensors: list[tuple[str, Tensor]] = []
        self.outside: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Open a context in which the module's backward hooks are observed. Its end restores the hooks."""
        watched: list[tuple[dict[int, Any], int, Any]] = []
        self._after_first = None
        for path, part in self._module.named_modules():
            for hooks in (part._backward_hooks, part._backward_pre_hooks):
                for key, hook in list(hooks.items()):
                    watched.append((hooks, key, hook))
                    hooks[key] = partial(self._call, hook, path or type(part).__name__)
        try:
            yield
        finally:
            for hooks, key, hook in watched:
                hooks[key] = hook

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Open a context that observes the one training step inside, and records its side effects."""
        # The first step imports and fills caches.
        with self, nullcontext() if self._after_first is None else noting_outside(self.outside):
            yield
        now = dict(self._module.named_parameters(remove_duplicate=False))
        for name, known in self._parameters.items():
            if name not in now or id(now[name]) != known:
                self._note(f"it replaces the parameter {name!r} in forward", _WRITE)
        if self._after_first is None:
            self._after_first = after = snapshot_of(self._module, self._loss)
            self.tensors = after.tensors
        else:
            self.changed |= {each.path: each for each in self._after_first.changes()}

    def check(self) -> None:
        """Raise an error for the first recorded side effect that a training graph cannot express.

        Raises:
            ModelError: if there is one.
        """
        if self._problems:
            raise ModelError(
                f"{type(self._module).__name__} cannot be trained as torch would train it: {self._problems[0]}",
                problems=tuple(self._problems),
                refused=True,
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _TOGGLED and isinstance(args[0], nn.Parameter):
            wanted = bool(args[1]) if len(args) > 1 else bool(kwargs.get("requires_grad", True))
            if wanted != args[0].requires_grad:
                known = self._names.get(memory_of(args[0]), "a parameter")
                self._note(f"it switches requires_grad of {known!r} in forward{at_line()}", _TOGGLE)
        elif func is Tensor.register_hook:
            self.hooked = True
        elif func == _REPLACED or (name != "__set__" and writes(name, kwargs)):
            for each in _written_tensors(args, kwargs):
                if memory_of(each) in self._names:
                    known = self._names[memory_of(each)]
                    remedy = instead_of(f"aten.{name}", _WRITE) if name.endswith("_") else _WRITE
                    self._note(f"it writes the parameter {known!r} in forward{at_line()}", remedy)
        return func(*args, **kwargs)

    def _call(self, hook: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a backward hook of the module at ``path`` and return its result. If that is a gradient, record a problem."""
        result = hook(*args, **kwargs)
        if result is not None:
            self._note(f"a backward hook of {path!r} returns a gradient", _HOOK)
        return result

    def _note(self, what: str, remedy: str) -> None:
        problem = f"{what}; {remedy}"
        if problem not in self._problems:
            self._problems.append(problem)


_WRITE = (
    "expected weights that only the optimizer moves; keep what is written in a buffer, or compute what is used from the "
    "weight (such as weight.clamp(-1, 1)) and leave the weight as it is"
)
_TOGGLE = "expected a fixed choice; call requires_grad_ before the model is compiled, or detach() the result in forward"
_HOOK = "expected hooks that only observe; change the gradient of a parameter by register_hook, or of a tensor in forward"


def _written_tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that a function of torch may write into, given its arguments: the first one, or a list of them,
    and ``out``.
    """
    for each in (*args[:1], kwargs.get("out")):
        yield from (
            part for part in (each if isinstance(each, list | tuple) else (each,)) if isinstance(part, Tensor)
        )
