"""The device's half: an agent that joins a federation, and a round in this process. Imports no torch."""

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
from edgefl_device.policy import Policy, read_policy
from edgefl_device.round.autotune import MemoryTuningStore, ProcessorTable
from edgefl_device.round.control import Step
from edgefl_device.round.trainer import RoundResult

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """Limits of what training may take of a device, and its conditions.

    Attributes:
        memory: What the device offers to training, bytes or like ``64MiB``; 0: what it has.
        engine: ``onnx`` or ``executorch``; "" is ``onnx``, or the one of the bundle's format in :func:`edgefl.train_round`.
        threads: The most that the engine may have; 0: as many as this process has processors where they are tuned (ONNX
            Runtime); what is not tuned has 1 then.
        tune: True times the forms of graphs in the first round, and how many threads a step gains from; None takes the form
            that suits the processor; False the graph's own, so that unequal devices compute the same bits.
        sandbox: Whether the engine has a process of its own that may little (:mod:`edgefl_device.sandbox`): ``always``,
            ``never``, or ``auto`` for where no server's key vouches for what it loads.
        bad_rows: ``refuse`` data with rows that cannot be read or do not fit, or ``skip`` and count such rows.
        policy: What the owner lets the device do, and when (:mod:`edgefl_device.policy`), or a file.
        surroundings_command: Prints in what conditions this device is, where the system does not say
            (:mod:`edgefl_device.policy`).
        mirrors: URLs of this device's own, such as a gateway's cache, asked before those that the server names and before
            the broker (:mod:`edgefl_device.link.mirrors`).
        sizes: Sizes and timeouts of messages.
    """

    memory: str | int = 0
    engine: str = ""
    threads: int = 0
    tune: bool | None = None
    sandbox: str = "auto"
    bad_rows: str = "refuse"
    policy: Policy | str | Path | None = None
    surroundings_command: str = ""
    mirrors: Sequence[str] = ()
    sizes: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Keys of the server that a device listens to, and its token.

    Attributes:
        server_key: Listen to this key of the server only, hexadecimal; several with commas between them. Without one the
            first that is seen is trusted from then on.
        token: The one-time token that brings this device's key onto the server's list of devices; it holds the server's key.
        ca_file: The certificate of the broker's authority; switches TLS on.
    """

    server_key: str = ""
    token: str = ""
    ca_file: str = ""


class Agent:
    """One device of a federation. ``run`` serves until the training is done (``until_done``), or :meth:`stop`.

    Args:
        device: Its name.
        data: A file or a folder of samples that stay here (:func:`edgefl_device.data.sources.load`), or a function that
            gives them: ``(x, y)``, ``(x, y, others)`` or a mapping.
        broker: ``host:port``, ``user:password@host:port`` or a URL such as ``mqtts://host?cert-file=...``.
        federation: The name of the one to join.
        tier: The one to ask for; the server decides.
        folder: Keeps what outlives the process; by default ``~/.edgefl/FEDERATION/ID``.
        until_done: End when the training is done.
        trust: The server's key, and the token of this device.
        limits: What training may take of the device.
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
        """Serve until the training is done or :meth:`stop` is called.

        Raises:
            EdgeflError: the device cannot continue: its data cannot be read, its store is another release's.
        """
        self._agent.run()

    def stop(self) -> None:
        """End :meth:`run` soon, from another thread or a signal handler; what was begun is taken up next time."""
        self._agent.stop()


def _open_engine(config: AgentConfig, limits: DeviceLimits, *, in_process: bool) -> Engine:
    """Open the engine in this process, or in one of its own with few permissions."""
    name, most = limits.engine or "onnx", most_threads(limits.threads, tune=limits.tune)
    if in_process:
        return open_engine(name, config.threads, config.folder, most)
    from edgefl_device.sandbox.process import open_sandboxed

    offered = config.memory_bytes or physical_memory()
    pages = config.folder / "engine"
    return open_sandboxed(name, config.threads, most, pages=pages, memory_bytes=offered, limits=config.limits)


def most_threads(threads: int, *, tune: bool | None) -> int:
    """Return the most threads of a graph: all processors of this process if threads are tuned and no number is given."""
    return min(cores(), MOST_THREADS) if tune and not threads else threads


def owner_policy(policy: Policy | str | Path | None, surroundings_command: str = "") -> Policy:
    """Return a policy, or that of a file, with a command of its own, as a shell would read it.

    Raises:
        ConfigError: the policy cannot be used, or one of its commands does not exist.
    """
    import shlex  # for the few that have such a command
    from shutil import which

    given = policy if isinstance(policy, Policy) else read_policy(Path(policy)) if policy else Policy()
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
    """``sandbox`` if it is one of the words there are, else ConfigError."""
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
    watch: Callable[[Step], None] = lambda _: None,
) -> RoundResult:
    """One round of a bundle in this process, without a broker: the same steps as a device of a federation makes.

    A graph runs in the form that suits the processor; forms differ in the last bits.

    Args:
        bundle: a bundle, or its file.
        weights: the model's, float arrays by global name, or what the server cuts out for the tier
            (:meth:`edgefl.Bundle.share`); or a file of them.
        x: samples (n, *sample): integers to be scaled as the bundle says, or floats in its dtype; where a model reads more,
            those inputs by name beside ``x``: ``{"x": x, "age": age}``. Without ``y``, what :class:`Agent` takes as
            ``data``: a file, a folder or a function.
        y: labels (n, *label): class numbers, or floats where the loss takes targets.
        seed: decides batches and noise.
        hyper: scalars that a server would announce, such as ``lr``; by default the bundle's.
        carry: what the last round left (``RoundResult.carry``), where the algorithm keeps something.
        samples: most rows to use; 0: all.
        limits: ``bad_rows``, ``engine`` and ``threads``; by default the engine of the bundle's format, with one thread.
        watch: called with each step.

    Returns:
        ``update`` by name as it would travel, ``carry``, ``metrics`` (means over the steps: ``loss``, and ``correct``, the
        right answers in a batch) and ``samples``.

    Raises:
        DataError: if the data do not fit the model, or hold NaN.
        BundleError: if graphs, weights and ports disagree.
        ConfigError: if the engine is not installed.
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
    """``host:port``, ``user:password@host:port`` or a URL as an address; ``ca_file`` switches TLS on.

    BrokerError for another text."""
    if isinstance(broker, Address):
        return replace(broker, ca_file=ca_file) if ca_file else broker
    return replace(Address.parse(broker), ca_file=ca_file) if ca_file else Address.parse(broker)


def memory_bytes(memory: str | int) -> int:
    """Bytes of ``64MiB``, or a number of them; ConfigError for what is no size."""
    try:
        return memory if isinstance(memory, int) else parse_size(memory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
