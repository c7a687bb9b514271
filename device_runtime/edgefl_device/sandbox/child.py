"""The engine's process: ``python -m edgefl_device.sandbox.child``, controlled over its standard input and output."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

import msgspec

from edgefl_device.sandbox import messages
from edgefl_device.sandbox.confine import confine

_MOST_TEXT = 2000
_LOOK_S = 1.0


class EngineServer:
    """Server of one engine: handles one message after the other until the pipe closes."""

    def __init__(self, line: Any, engine: Any) -> None:
        self._line = line
        self._engine = engine
        self._graphs: dict[int, tuple[Any, Any]] = {}
        self._state: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def serve(self) -> None:
        from edgefl.errors import EdgeflError
        from edgefl_device.sandbox.frames import PipeClosed

        decoder = msgspec.msgpack.Decoder(messages.EngineRequest)
        while True:
            try:
                word = decoder.decode(self._line.head())
                try:
                    answer, arrays = self._answer(word)
                except PipeClosed:
                    raise
                except Exception as error:  # expected, or an engine's own
                    code, text = 0, f"{type(error).__name__}: {error}"
                    if isinstance(error, EdgeflError):
                        code, text = error.exit_code, error.message
                    answer, arrays = messages.RequestFailed(code=code, text=text[:_MOST_TEXT]), []
                if answer is not None:
                    self._line.send(msgspec.msgpack.encode(answer), arrays)
                del answer, arrays, word
            except PipeClosed:
                return

    def _answer(self, word: messages.EngineRequest) -> tuple[messages.EngineAnswer | None, list[Any]]:
        match word:
            case messages.LoadGraph():
                artifact = self._line.array("uint8", (word.nbytes,)).tobytes()
                self._graphs[word.number] = (
                    word.graph,
                    self._engine.load(word.graph, artifact, word.threads),
                )
                return messages.GraphLoaded(), []
            case messages.RunGraph():
                return self._run(word)
            case messages.ReadState():
                arrays = self._engine.read_state(self._held(word.state))
                tensors = tuple(
                    messages.TensorHeader(name=name, dtype=a.dtype.str, shape=a.shape)
                    for name, a in arrays.items()
                )
                return messages.StateTensors(tensors=tensors), [
                    _contiguous(array) for array in arrays.values()
                ]
            case messages.StateTensors():
                arrays = {each.name: self._line.array(each.dtype, each.shape) for each in word.tensors}
                return messages.StateCreated(state=self._keep(self._engine.write_state(arrays))), []
            case messages.FreeState():
                for number in word.state:
                    self._state.pop(number, None)
                for number in word.graphs:
                    self._graphs.pop(number, None)
        return None, []

    def _run(self, word: messages.RunGraph) -> tuple[messages.EngineAnswer, list[Any]]:
        graph, loaded = self._graphs[word.number]
        feeds = {
            port.name: self._line.array(port.dtype, port.shape)
            for port in graph.inputs
            if port.role != "state"
        }
        outputs = loaded.run(feeds, self._held(word.state))
        arrays = [outputs.arrays[port.name] for port in graph.outputs if port.role != "state"]
        return messages.GraphRan(state=self._keep(outputs.state)), [_contiguous(array) for array in arrays]

    def _held(self, state: dict[str, int]) -> dict[str, Any]:
        return {name: self._state[number] for name, number in state.items()}

    def _keep(self, state: dict[str, Any]) -> dict[str, int]:
        numbers = {name: next(self._numbers) for name in state}
        self._state.update({numbers[name]: value for name, value in state.items()})
        return numbers


def _contiguous(array: Any) -> Any:
    import numpy as np

    return np.asarray(array, order="C")


def _first(read_end: int) -> messages.OpenEngine:
    """Read the first message from the file descriptor ``read_end``, without numpy, whose threads must not start before
    the process is confined.
    """
    length = int.from_bytes(_exactly(read_end, 8), "little")
    return msgspec.msgpack.decode(_exactly(read_end, length), type=messages.OpenEngine)


def _exactly(read_end: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(read_end, count - len(data))
        if not piece:
            raise SystemExit(0)
        data += piece
    return data


def _end_with(parent: int) -> None:
    """Exit when the process ``parent`` (the agent) has ended, even during an endless step.

    The kernel's own mechanism (PDEATHSIG) depends on the thread that started this process, and the agent has a new
    one for each round.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def main() -> None:
    parent = os.getppid()
    read_end, write_end = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    wanted = _first(read_end)
    missing = confine(wanted.confinement)

    from pathlib import Path

    from edgefl.errors import EdgeflError
    from edgefl_device.engine import open_engine
    from edgefl_device.host import return_memory_early
    from edgefl_device.sandbox.frames import EnginePipe, widen

    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    return_memory_early()
    widen(write_end)
    line = EnginePipe(read_end, write_end)
    try:
        pages = Path(wanted.pages) if wanted.pages else None
        engine = open_engine(wanted.engine, wanted.threads, pages, wanted.most_threads)
    except EdgeflError as error:
        line.send(msgspec.msgpack.encode(messages.RequestFailed(code=error.exit_code, text=error.message)))
        return
    opened = messages.EngineOpened(
        name=engine.name,
        version=engine.version,
        format=engine.format,
        thread_counts=tuple(engine.thread_counts),
        missing=missing,
    )
    line.send(msgspec.msgpack.encode(opened))
    EngineServer(line, engine).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
