"""Error hierarchy of edgefl.

A message says what was expected, what was found and what to do. Each class has an exit code for the command line
(``exit_code``). The values in a message are attributes too, so that a program can react without parsing text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


class EdgeflError(Exception):
    """Base of every error that edgefl raises on purpose. ``details`` holds the values the message names."""

    exit_code = 1

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Callable[..., EdgeflError], tuple[type[EdgeflError], dict[str, object]]]:
        return remade, (type(self), vars(self))


def remade(kind: type[EdgeflError], attributes: Mapping[str, object]) -> EdgeflError:
    """Return an error of the class ``kind`` with these attributes, without calling its constructor."""
    made = kind.__new__(kind)
    EdgeflError.__init__(made, str(attributes["message"]))
    vars(made).update(attributes)
    return made


class ConfigError(EdgeflError):
    """A configuration key or a command-line value that cannot be used. Collects all problems of one file."""

    exit_code = 2


class DataError(EdgeflError):
    """Data that is missing, damaged, or does not fit the manifest."""

    exit_code = 3


class ModelError(EdgeflError):
    """A model that is unknown or cannot be cut as asked."""

    exit_code = 4


class ExportError(EdgeflError):
    """A function that cannot be exported, or whose exported graph disagrees with torch."""

    exit_code = 5


class BundleError(EdgeflError):
    """A bundle, manifest or blob that is corrupt, truncated, or made for another version."""

    exit_code = 6


class BrokerError(EdgeflError):
    """The broker cannot be reached, or its port is taken."""

    exit_code = 7


class ProtocolError(EdgeflError):
    """A message that does not follow the protocol: wrong version, wrong type, wrong field."""

    exit_code = 8


class ReasonedError(EdgeflError):
    """Base of the errors whose ``reason`` is a short code."""

    def __init__(self, reason: str, message: str, **details: object) -> None:
        super().__init__(message, **details)
        self.reason = reason


class IdentityError(ReasonedError, ProtocolError):
    """A message that is not signed as it has to be: no, an unknown or a revoked key, an old message sent again.
    ``reason`` is a short code."""


class UpdateRejected(ReasonedError):
    """An update the aggregator refuses: wrong shapes, NaN, wrong tier, closed round. ``reason`` is a short code."""

    exit_code = 9


class StaleRecordError(EdgeflError):
    """A record of boundary activations used with weights of another model version."""

    exit_code = 10


class StoreError(EdgeflError):
    """The local store is full or unreadable."""

    exit_code = 11


class RoundAborted(EdgeflError):
    """The round a device works on is over; nothing is wrong, the work is dropped."""

    exit_code = 12


class ParticipationError(EdgeflError):
    """A run that ends because its algorithm needs every device, and one is missing or has lost what it kept."""

    exit_code = 13


class RoundDeclined(ReasonedError):
    """A task that this device cannot take; nothing is wrong with the round. ``reason`` is a short code."""

    exit_code = 14


class StepError(EdgeflError):
    """A server step of an algorithm that failed, or returned a model that is not finite."""

    exit_code = 15


class MirrorError(EdgeflError):
    """A mirror that cannot be served, or that does not return the requested bytes."""

    exit_code = 16


class DivergedError(EdgeflError):
    """A run that ends because training diverged: the updates of its devices are not finite."""

    exit_code = 18


DIVERGED = "training diverged on this device"
"""Part of the text with which the server rejects a diverged update."""


class TorchProcessError(EdgeflError):
    """The process beside a server that computes with models ends again and again."""

    exit_code = 17
