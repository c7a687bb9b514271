"""What goes between a server and its torch process arrives as it was sent."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from edgefl import errors
from edgefl.errors import ConfigError, EdgeflError, IdentityError, StoreError
from edgefl_server.storage.retry import ActionFailed
from edgefl_server.torch_process.connection import ConnectionEnded, PickleConnection
from edgefl_server.torch_process.messages import Failed, OptimizeRequest, WorkFailed, portable


@pytest.fixture
def ends() -> Iterator[tuple[PickleConnection, PickleConnection]]:
    here, there = map(PickleConnection, socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_arrays_arrive_in_memory_of_their_own(ends: tuple[PickleConnection, PickleConnection]) -> None:
    here, there = ends
    sent = {
        "nan": np.array([np.nan, -0.0, np.float32(1e-45)], np.float32),
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "none": np.zeros((0, 3), np.float32),
        "one": np.array(7, np.int64),
        "every-other": np.arange(10, dtype=np.uint8)[::2],
    }
    here.send(OptimizeRequest(1, sent, sent, {"lr": 0.1}))
    got = there.receive()
    assert got.exchange == 1 and got.hyper == {"lr": 0.1} and list(got.before) == list(sent)
    for name, array in sent.items():
        assert got.before[name].tobytes() == array.tobytes() and got.before[name].dtype == array.dtype
        assert got.before[name].shape == array.shape and got.before[name].flags.writeable
        assert got.before[name] is got.mean[name], "what is sent twice goes over once"


def test_names_mean_the_same_on_both_sides(ends: tuple[PickleConnection, PickleConnection]) -> None:
    here, there = ends

    def function() -> None:
        """Cannot be pickled."""

    here.send({"call": function, "other": 1}, {id(function): "function"})
    assert there.receive(Printing()) == {"call": print, "other": 1}
    here.send(function, {id(function): "function"})
    with pytest.raises(Exception, match="a name came where none is known"):
        there.receive()


class Printing:
    """Resolver of one placeholder."""

    def resolve(self, name: object) -> object:
        return {"function": print}[name]  # type: ignore[index]


def test_a_line_says_that_the_other_side_is_gone(ends: tuple[PickleConnection, PickleConnection]) -> None:
    here, there = ends
    there.close()
    with pytest.raises(ConnectionEnded):
        here.receive()
    with pytest.raises(ConnectionEnded):
        here.send("anybody?")


def test_a_line_that_others_hold_open_ends_with_the_process_at_its_end() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs, pytest.raises(ConnectionEnded):
        PickleConnection(mine, subprocess.Popen(["true"])).receive()


def crossed(error: Exception, ends: tuple[PickleConnection, PickleConnection]) -> Exception:
    """The error as it is on the other side."""
    ends[0].send(Failed(portable(error)))
    failed: Failed = ends[1].receive()
    return failed.error


def test_our_errors_cross_with_their_details(ends: tuple[PickleConnection, PickleConnection]) -> None:
    kinds = [
        each for each in vars(errors).values() if isinstance(each, type) and each.__mro__[1] is EdgeflError
    ]
    assert len(kinds) > 10
    for kind in kinds:
        made = kind.__new__(kind)
        EdgeflError.__init__(made, "what to do", key="round.min", found=(1, 2.5))
        got = crossed(made, ends)
        assert type(got) is kind and str(got) == "what to do" and isinstance(got, EdgeflError)
        assert (got.details, got.message) == ({"key": "round.min", "found": (1, 2.5)}, "what to do")
    signed = crossed(IdentityError("unsigned", "no key"), ends)
    assert isinstance(signed, IdentityError) and (signed.reason, signed.message) == ("unsigned", "no key")
    above = crossed(ActionFailed("the disk", path="x"), ends)
    assert type(above) is StoreError and above.details == {"path": "x"}
    odd = crossed(ConfigError("odd", value={1: object}), ends)
    assert isinstance(odd, ConfigError) and "object" in str(odd.details["value"])


def test_other_errors_are_told_as_such(ends: tuple[PickleConnection, PickleConnection]) -> None:
    class OfTorch(RuntimeError):
        """Nobody else has it."""

    missing = crossed(ModuleNotFoundError("No module named 'torch'", name="torch"), ends)
    assert isinstance(missing, ModuleNotFoundError) and missing.name == "torch"
    full = crossed(OSError(28, "No space left on device", "/x"), ends)
    assert isinstance(full, OSError) and (full.errno, full.filename) == (28, "/x")
    own = crossed(OfTorch("out of memory"), ends)
    assert isinstance(own, WorkFailed) and str(own) == "OfTorch: out of memory"
    assert "OfTorch: out of memory" in own.__notes__[0]
