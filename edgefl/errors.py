"""Error hierarchy of edgefl.

A message says what was expected, what was found and what to do. Each class has an exit code for the command line
(``exit_code``). The values in a message are attributes too, so that a program can react without parsing text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


class EdgeflError(Exception):
    """Base of every error that edgefl raises on purpose.

    ``message`` is the text. ``details`` has the values in it, by name. A command that fails with the error ends with the
    status ``exit_code``.
    """

    exit_code = 1

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Callable[..., EdgeflError], tuple[type[EdgeflError], dict[str, object]]]:
        return rebuild_error, (type(self), vars(self))


def rebuild_error(kind: type[EdgeflError], attributes: Mapping[str, object]) -> EdgeflError:
    """Return an error of the class ``kind``, for unpickling. Does not call the constructor of ``kind``.

    Args:
        kind: Class of the error.
        attributes: All attributes of the pickled error, by name; ``message`` among them.
    """
    made = kind.__new__(kind)
    EdgeflError.__init__(made, str(attributes["message"]))
    vars(made).update(attributes)
    return made


class ConfigError(EdgeflError):
    """A configuration key, an argument or a command-line value that cannot be used.

    For a file, the text lists all problems.
    """

    exit_code = 2


def not_on_windows(feature: str) -> ConfigError:
    """Return the error for a ``feature`` that Windows has no calls for."""
    return ConfigError(
        f"{feature} needs Linux or macOS, found Windows: use it there, or in the Windows Subsystem for Linux",
        feature=feature,
    )


class DataError(EdgeflError):
    """Data that are missing, damaged, or do not fit the model or the manifest of a bundle."""

    exit_code = 3


class ModelError(EdgeflError):
    """A model that is unknown, that cannot be traced, cut or trained as asked, or whose loss does not fit."""

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
    """Base of the errors with an attribute ``reason``, a short code such as one in a message of the protocol."""

    def __init__(self, reason: str, message: str, **details: object) -> None:
        super().__init__(message, **details)
        self.reason = reason


class IdentityError(ReasonedError, ProtocolError):
    """A message whose signature is refused: missing, by an unknown or revoked key, or of a message that was received
    before.

    ``reason`` is a short code.
    """


class UpdateRejected(ReasonedError):
    """An update that the aggregator refuses: wrong shapes, NaN, wrong tier, closed round. ``reason`` is a short code."""

    exit_code = 9


class StaleRecordError(EdgeflError):
    """Boundary activations, stored on a device for its frozen units, that were computed with weights of another model
    version.
    """

    exit_code = 10


class StoreError(EdgeflError):
    """The local store is full, unreadable, or in use by another process."""

    exit_code = 11


class RoundAborted(EdgeflError):
    """The end of the round that a device works on. No fault occurred; the device drops its work."""

    exit_code = 12


class ParticipationError(EdgeflError):
    """End of a run whose algorithm needs every device, because one is missing or has lost the state it kept between
    rounds.
    """

    exit_code = 13


class RoundDeclined(ReasonedError):
    """A task that this device cannot perform, such as one that needs too much memory.

    ``reason`` is a short code. The round itself has no fault.
    """

    exit_code = 14


class ServerStepError(EdgeflError):
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
    """The process that computes with torch models for a server crashed in each attempt at a request, or is closed."""

    exit_code = 17
