"""Device side: an agent that joins a federation, and a round in this process. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edgefl.errors import ConfigError
from edgefl.system.memory import cores
from edgefl.system.sizes import parse_size
from edgefl.wire import folders
from edgefl.wire.enrolment import parse_token
from edgefl.wire.keys import parse_keys
from edgefl.wire.limits import Limits, check_seed
from edgefl.wire.mirrors import Mirror
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.topics import checked_name
from edgefl.wire.tensors import Array
from edgefl_device.agent import DeviceAgent
from edgefl_device.config import AgentConfig, AgentEvent, DeviceLog, Source
from edgefl_device.data.problems import checked_policy
from edgefl_device.data.samples import LocalData, LocalSource
from edgefl_device.data.sources import load as load_data
from edgefl_device.engine import MOST_THREADS, open_engine
from edgefl_device.engine.base import Engine
from edgefl_device.host import physical_memory
from edgefl_device.policy import OwnerPolicy, read_policy
from edgefl_device.round.autotune import MemoryTuningStore, ProcessorTable
from edgefl_device.round.control import StepProgress
from edgefl_device.round.trainer import RoundResult

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """Limits and settings of training on a device.

    Attributes:
        memory: Memory that the device offers to training, bytes or like ``64MiB``; 0: all that it has.
        engine: ``onnx`` or ``executorch``; "" is ``onnx``, or the one of the bundle's format in
            :func:`edgefl.train_round`.
        threads: Most threads of the engine. 0: as many as this process has processors if threads are tuned (ONNX
            Runtime), else 1.
        tune: True times the variants of graphs, and numbers of threads, in the first round. None takes the
            variant that suits the processor. False takes the graph's own form, so that different devices compute
            the same bits.
        sandbox: Run the engine in a confined process (:mod:`edgefl_device.sandbox`): ``always``, ``never``, or
            ``auto``, which does so if no key of the server signs what it loads.
        bad_rows: ``refuse`` data with rows that cannot be read or do not fit, or ``skip`` and count such rows.
        policy: The owner's rules for training (:mod:`edgefl_device.policy`), or a file of them.
        surroundings_command: Command that prints the device's conditions if the system does not report them
            (:mod:`edgefl_device.policy`).
        mirrors: URLs of the device's own mirrors, such as a gateway's cache, used before those that the server
            names and before the broker (:mod:`edgefl_device.link.mirrors`).
        sizes: Sizes and timeouts of messages.
    """

    memory: str | int = 0
    engine: str = ""
    threads: int = 0
    tune: bool | None = None
    sandbox: str = "auto"
    bad_rows: str = "refuse"
    policy: OwnerPolicy | str | Path | None = None
    surroundings_command: str = ""
    mirrors: Sequence[str] = ()
    sizes: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Trust between a device and the server: keys of the server, and the device's token.

    Attributes:
        server_key: Trust only this key of the server, hexadecimal; several with commas between them. Without one
            the first that is seen is trusted from then on.
        token: One-time token that enrolls this device's key at the server; it contains the server's key.
        ca_file: Certificate of the broker's authority; switches TLS on.
    """

    server_key: str = ""
    token: str = ""
    ca_file: str = ""


class Agent:
    """One device of a federation. :meth:`run` takes part until the training is over (``until_done``), or :meth:`stop`.

    Args:
        device: Name of the device.
        data: A file or a folder of samples, which never leave the device
            (:func:`edgefl_device.data.sources.load`), or a function that returns them: ``(x, y)``, ``(x, y,
            others)`` or a mapping.
        broker: ``host:port``, ``user:password@host:port`` or a URL such as ``mqtts://host?cert-file=...``.
        federation: Name of the federation to join.
        tier: Tier to request; the server decides.
        folder: Folder for state that outlives the process; by default ``~/.edgefl/FEDERATION/ID``.
        until_done: Return from :meth:`run` when the training is over.
        trust: The server's key, and the token of this device.
        limits: Limits and settings of training on this device.
        report: Called with each event, from the threads of the agent.

    Raises:
        ConfigError: An argument cannot be used.
    """

    def __init__(
        self,
        device: str,
        data: str | Path | Source,
        *,
        broker: str | Address = "localhost:1883",
        federation: str = "demo",
        tier: str = "",
        folder: str | Path | None = None,
        until_done: bool = False,
        trust: Trust = Trust(),
        limits: DeviceLimits = DeviceLimits(),
        report: Callable[[AgentEvent], None] = lambda _: None,
    ) -> None:
        given = parse_token(trust.token) if trust.token else None
        vouched = bool(trust.server_key or given)
        sandbox = checked_sandbox(limits.sandbox)
        config = AgentConfig(
            federation=checked_name("federation", federation),
            device=checked_name("device", device),
            broker=broker_address(broker, trust.ca_file),
            data=Path(data) if isinstance(data, str) else data,
            bad_rows=checked_policy(limits.bad_rows),
            folder=Path(folder) if folder else folders.store(federation, device),
            tier=tier,
            memory_bytes=memory_bytes(limits.memory),
            server_keys=(*parse_keys(trust.server_key), *((given.server,) if given else ())),
            token=given,
            until_done=until_done,
            threads=limits.threads or 1,
            tune=limits.tune,
            limits=limits.sizes,
            mirrors=tuple(Mirror.parse(text) for text in limits.mirrors),
            policy=owner_policy(limits.policy, limits.surroundings_command),
        )
        in_process = sandbox == "never" or (sandbox == "auto" and vouched)
        self._agent = DeviceAgent(
            config, _open_engine(config, limits, in_process=in_process), DeviceLog(report)
        )

    def run(self) -> None:
        """Take part in rounds until the training is over (``until_done``) or :meth:`stop` is called. Blocks.

        Raises:
            EdgeflError: the device cannot continue: its data cannot be read, its store is another release's.
        """
        self._agent.run()

    def stop(self) -> None:
        """Make :meth:`run` return soon, from another thread or a signal handler. The next start resumes begun work."""
        self._agent.stop()


def _open_engine(config: AgentConfig, limits: DeviceLimits, *, in_process: bool) -> Engine:
    """Return the engine that runs the device's graphs.

    ``in_process`` True: it runs in this process. False: it runs in a child process with few permissions.
    """
    name, most = limits.engine or "onnx", most_threads(limits.threads, tune=limits.tune)
    if in_process:
        return open_engine(name, config.threads, config.folder, most)
    from edgefl_device.sandbox.process import open_sandboxed

    offered = config.memory_bytes or physical_memory()
    pages = config.folder / "engine"
    return open_sandboxed(name, config.threads, most, pages=pages, memory_bytes=offered, limits=config.limits)


def most_threads(threads: int, *, tune: bool | None) -> int:
    """Return the most threads that a graph may use.

    Args:
        threads: number that the user gave; 0: none.
        tune: True if numbers of threads are timed. Then 0 means all processors of this process, up to a limit.
            Otherwise ``threads`` is returned unchanged.
    """
    return min(cores(), MOST_THREADS) if tune and not threads else threads


def owner_policy(policy: OwnerPolicy | str | Path | None, surroundings_command: str = "") -> OwnerPolicy:
    """Return the device owner's rules for training, with the command that reports the device's conditions.

    Args:
        policy: a policy, or its file; None allows everything.
        surroundings_command: command line, split like in a shell; "" keeps that of the policy.

    Raises:
        ConfigError: the policy cannot be used, or one of its commands does not exist.
    """
    import shlex  # for the few that have such a command
    from shutil import which

    given = (
        policy if isinstance(policy, OwnerPolicy) else read_policy(Path(policy)) if policy else OwnerPolicy()
    )
    try:
        command = tuple(shlex.split(surroundings_command))
    except ValueError as error:
        raise ConfigError(
            f"argument `surroundings_command` is no command ({error}): {surroundings_command!r}",
            argument="surroundings_command",
        ) from error
    given = msgspec.structs.replace(given, surroundings=command) if command else given
    for program, *_ in filter(None, (given.surroundings, *given.commands.values())):
        if which(program) is None:
            raise ConfigError(
                f"there is no command {program!r}, which the device should run to find out its conditions: install it, or "
                "correct `surroundings_command` or the policy"
            )
    return given


def checked_sandbox(sandbox: str) -> str:
    """Return ``sandbox`` if it is ``auto``, ``always`` or ``never``.

    Raises:
        ConfigError: it is another word.
    """
    if sandbox not in ("auto", "always", "never"):
        raise ConfigError(
            f"argument `sandbox` is auto, always or never, found {sandbox!r}", argument="sandbox"
        )
    return sandbox


def train_round(
    bundle: Bundle | str | Path,
    weights: Mapping[str, Array] | str | Path,
    x: Array | Mapping[str, Array] | str | Path | Source,
    y: Array | None = None,
    *,
    seed: int = 0,
    hyper: Mapping[str, float] | None = None,
    carry: Mapping[str, Array] | None = None,
    samples: int = 0,
    limits: DeviceLimits | None = None,
    watch: Callable[[StepProgress], None] = lambda _: None,
) -> RoundResult:
    """Run one round of a bundle in this process, without a broker, with the same steps as on a device of a federation.

    A graph runs in the variant that suits the processor; variants differ in the last bits.

    Args:
        bundle: a bundle, or its file.
        weights: the model's weights, float arrays by global name, or the tier's part of them
            (:meth:`edgefl.Bundle.share`); or a file of them.
        x: samples (n, *sample): integers, which the bundle scales, or floats in its dtype. If the model reads
            further inputs, a mapping with these beside ``x``: ``{"x": x, "age": age}``. Without ``y``, the
            ``data`` of :class:`Agent`: a file, a folder or a function.
        y: labels (n, *label): class numbers, or floats where the loss takes targets.
        seed: seed of batches and noise.
        hyper: scalars that a server would announce, such as ``lr``; by default the bundle's.
        carry: ``RoundResult.carry`` of the previous round, for algorithms that keep state on the device between
            rounds; None: zeros.
        samples: most rows to use; 0: all.
        limits: ``bad_rows``, ``engine`` and ``threads``; by default the engine of the bundle's format, with one
            thread.
        watch: called with each step.

    Returns:
        ``update``: arrays by name as they would be sent. ``carry``: state for the next round. ``metrics``: means over
        the steps of ``loss`` and of ``correct``, the right answers in a batch. ``samples``: number of rows used.

    Raises:
        DataError: if the data do not fit the model, or hold NaN.
        BundleError: if graphs, weights and ports disagree.
        ConfigError: if the engine is not installed, or ``y`` is missing.
    """
    # Here, because an agent needs neither.
    from edgefl.api.bundle import Bundle
    from edgefl_device.round import offline

    read = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    held = weights if isinstance(weights, Mapping) else offline.read_weights(Path(weights))
    return offline.train_round(
        read.contents,
        held,
        _local(x, y, limits.bad_rows if limits else "refuse"),
        open_engine((limits.engine if limits else "") or read.format, limits.threads or 1 if limits else 1),
        seed=check_seed(seed),
        hyper=hyper,
        carry=carry,
        samples=samples,
        watch=watch,
        tuner=ProcessorTable(_TUNING_RESULTS, memory_bytes=sys.maxsize),
    )


_TUNING_RESULTS = MemoryTuningStore()


def _local(
    x: Array | Mapping[str, Array] | str | Path | Source, y: Array | None, bad_rows: str
) -> LocalSource:
    policy = checked_policy(bad_rows)
    if isinstance(x, str | Path) or callable(x):
        if y is not None:
            raise ConfigError("argument `x` names samples and their labels: leave `y` out")
        return load_data(Path(x) if isinstance(x, str) else x, policy)
    if y is None:
        raise ConfigError("argument `y` is missing: the labels of the samples `x`", argument="y")
    inputs = (
        {name: np.asarray(rows) for name, rows in x.items()}
        if isinstance(x, Mapping)
        else {"x": np.asarray(x)}
    )
    if "x" not in inputs:
        raise ConfigError(
            f"argument `x` has no input 'x'; it has {', '.join(inputs) or 'none'}", argument="x"
        )
    data = LocalData(inputs.pop("x"), np.asarray(y), "the data", inputs, policy)
    data.check()
    return data


def broker_address(broker: str | Address, ca_file: str = "") -> Address:
    """Return ``broker`` as an address.

    Args:
        broker: ``host:port``, ``user:password@host:port``, a URL such as ``mqtts://host``, or an address.
        ca_file: certificate of the broker's authority, which replaces that of ``broker`` and switches TLS on; "" keeps
            it.

    Raises:
        BrokerError: the text is no address.
    """
    if isinstance(broker, Address):
        return replace(broker, ca_file=ca_file) if ca_file else broker
    return replace(Address.parse(broker), ca_file=ca_file) if ca_file else Address.parse(broker)


def memory_bytes(memory: str | int) -> int:
    """Return an amount of memory in bytes: ``memory`` itself if it is a number, else the size that a text like
    ``64MiB`` names.

    Raises:
        ConfigError: the text is no size.
    """
    try:
        return memory if isinstance(memory, int) else parse_size(memory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
