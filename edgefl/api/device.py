"""The device's half: an agent that joins a federation, and a round in this process. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from device_runtime.agent import Agent as _Agent
from device_runtime.config import AgentConfig, AgentEvent, Source
from device_runtime.data.problems import checked_policy
from device_runtime.data.samples import Local, LocalData
from device_runtime.data.sources import load as load_data
from device_runtime.engine.base import Engine
from device_runtime.engine.select import MOST_THREADS, open_engine
from device_runtime.host import physical_memory
from device_runtime.policy import Policy, read_policy
from device_runtime.round.graphs import Step
from device_runtime.round.runner import RoundResult
from device_runtime.round.tuning import KeptHere, SuitedForms
from edgefl.system.cores import cores
from edgefl.system.sizes import parse_size
from edgefl.wire import folders
from edgefl.wire.enrolment import parse_token
from edgefl.wire.errors import ConfigError
from edgefl.wire.keys import parse_keys
from edgefl.wire.limits import Limits, checked_seed
from edgefl.wire.mirrors import Mirror
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.topics import checked_name
from edgefl.wire.tensors import Array

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle


class Agent:
    """One device of a federation. ``run`` serves until the training is done (``until_done``), or :meth:`stop`.

    ``data`` is a file or a folder of samples that stay here (:func:`device_runtime.data.sources.load`), or a function
    that gives them: ``(x, y)``, ``(x, y, others)`` or a mapping. ``bad_rows``: ``refuse`` data with rows that cannot
    be read or do not fit, or ``skip`` and count such rows. ``broker`` is ``host:port``,
    ``user:password@host:port`` or a URL such as ``mqtts://host?cert-file=...``,
    ``federation`` the name of the one to join; ``ca_file``, the certificate of the
    broker's authority, switches TLS on. ``tier`` is the one to ask for; the server decides. ``folder`` keeps what
    outlives the process, by default ``~/.edgefl/FEDERATION/ID``. ``memory`` is what this device offers to training,
    bytes or like ``64MiB`` (0: what it has). ``server_key``: listen to this key of the server only, hexadecimal;
    several with commas between them. Without one the first that is seen is trusted from then on. ``token``: the one-time
    token that brings this device's key onto the server's list of devices; it holds the server's key.
    ``engine`` is ``onnx`` or ``executorch``. ``limits`` are sizes and timeouts. ``tune``: True times the forms of
    graphs in the first round, and how many threads a step gains from; None takes the form that suits the processor; False
    the graph's own, so that unequal devices compute the same bits. ``threads``: the most that the engine may have; 0: as
    many as this process has processors where they are tuned (ONNX Runtime); what is not tuned has 1 then. ``sandbox``:
    whether the engine has a process of its own that may little (:mod:`device_runtime.sandbox`): ``always``, ``never``, or
    ``auto`` for where no ``server_key`` vouches for what it loads.
    ``policy`` is what the owner lets the device do, and when (:mod:`device_runtime.policy`), or a file.
    ``mirrors`` are URLs of this device's own, such as a gateway's cache, asked before those that the server names and before
    the broker (:mod:`device_runtime.link.mirrors`).
    ``surroundings_command`` prints in what conditions this device is, where the system does not say
    (:mod:`device_runtime.conditions`).
    ``report`` is told what happens, from the threads of the agent.

    ConfigError for an argument that cannot be used.
    """

    def __init__(
        self,
        device: str,
        data: str | Path | Source,
        *,
        bad_rows: str = "refuse",
        broker: str | Address = "localhost:1883",
        federation: str = "demo",
        folder: str | Path | None = None,
        tier: str = "",
        memory: str | int = 0,
        engine: str = "onnx",
        threads: int = 0,
        until_done: bool = False,
        server_key: str = "",
        token: str = "",
        ca_file: str = "",
        tune: bool | None = None,
        sandbox: str = "auto",
        policy: Policy | str | Path | None = None,
        mirrors: Sequence[str] = (),
        surroundings_command: str = "",
        limits: Limits = Limits(),
        report: Callable[[AgentEvent], None] = lambda _: None,
    ) -> None:
        given = parse_token(token) if token else None
        vouched = bool(server_key or given)
        boxed = checked_sandbox(sandbox) == "always" or (sandbox == "auto" and not vouched)
        config = AgentConfig(
            federation=checked_name("federation", federation),
            device=checked_name("device", device),
            broker=broker_address(broker, ca_file),
            data=Path(data) if isinstance(data, str) else data,
            bad_rows=checked_policy(bad_rows),
            folder=Path(folder) if folder else folders.store(federation, device),
            tier=tier,
            memory_bytes=memory_bytes(memory),
            server_keys=(*parse_keys(server_key), *((given.server,) if given else ())),
            token=given,
            until_done=until_done,
            threads=threads or 1,
            tune=tune,
            limits=limits,
            mirrors=tuple(Mirror.parse(text) for text in mirrors),
            policy=owner_policy(policy, surroundings_command),
        )
        most = most_threads(threads, tune=tune)
        chosen = (
            boxed_engine(engine, threads or 1, most, config)
            if boxed
            else open_engine(engine, threads or 1, config.folder, most)
        )
        self._agent = _Agent(config, chosen, report)

    def run(self) -> None:
        """Serve. EdgeflError where the device cannot go on: its data cannot be read, its store is another release's."""
        self._agent.run()

    def stop(self) -> None:
        """End :meth:`run` soon, from another thread or a signal handler; what was begun is taken up next time."""
        self._agent.stop()


def opened(engine: str, threads: int, pages: Path | None = None, *, tune: bool) -> Engine:
    """An engine with so many threads; with 0 one, and for what is tuned up to as many as this process has processors."""
    return open_engine(engine, threads or 1, pages, most_threads(threads, tune=tune))


def most_threads(threads: int, *, tune: bool | None) -> int:
    """Those that a graph may have: as many as this process has processors, where they are tuned and no number is named."""
    return min(cores(), MOST_THREADS) if tune and not threads else threads


def boxed_engine(engine: str, threads: int, most: int, config: AgentConfig) -> Engine:
    """An engine in a process that is confined to what ``config`` offers; without a number, to what the machine has."""
    from device_runtime.sandbox.choose import open_sandboxed

    return open_sandboxed(
        engine,
        threads,
        most,
        pages=config.folder / "engine",
        memory_bytes=config.memory_bytes or physical_memory(),
        limits=config.limits,
    )


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
    x: Array | str | Path | Source,
    y: Array | None = None,
    *,
    others: Mapping[str, Array] | None = None,
    bad_rows: str = "refuse",
    seed: int = 0,
    hyper: Mapping[str, float] | None = None,
    carry: Mapping[str, Array] | None = None,
    samples: int = 0,
    engine: str = "",
    threads: int = 1,
    watch: Callable[[Step], None] = lambda _: None,
) -> RoundResult:
    """One round of a bundle in this process, without a broker: the same steps as a device of a federation makes.

    A graph runs in the form that suits the processor; forms differ in the last bits.

    Args:
        bundle: a bundle, or its file.
        weights: the model's, float arrays by global name, or what the server cuts out for the tier
            (:meth:`edgefl.Bundle.share`); or a file of them.
        x: samples (n, *sample): integers to be scaled as the bundle says, or floats in its dtype. Without ``y``, what
            :class:`Agent` takes as ``data``: a file, a folder or a function.
        y: labels (n, *label): class numbers, or floats where the loss takes targets.
        others: inputs beside x by name, (n, *their shape), where the model reads some.
        bad_rows: ``refuse`` data with rows that cannot be read or do not fit, or ``skip`` such rows.
        seed: decides batches and noise.
        hyper: scalars that a server would announce, such as ``lr``; by default the bundle's.
        carry: what the last round left (``RoundResult.carry``), where the program keeps something.
        samples: most rows to use; 0: all.
        engine: by default the one of the bundle's format.
        threads: of the engine.
        watch: is told each step.

    Returns:
        ``update`` by name as it would travel, ``carry``, ``metrics`` (means over the steps: ``loss``, and ``correct``, the
        right answers in a batch) and ``samples``.

    Raises:
        DataError: if the data do not fit the model, or hold NaN.
        BundleError: if graphs, weights and ports disagree.
        ConfigError: if the engine is not installed.
    """
    # Here, because an agent needs neither.
    from device_runtime.round import offline
    from edgefl.api.bundle import Bundle

    read = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    held = weights if isinstance(weights, Mapping) else offline.read_weights(Path(weights))
    return offline.train_round(
        read.contents,
        held,
        _local(x, y, others, bad_rows),
        open_engine(engine or read.format, threads),
        seed=checked_seed(seed),
        hyper=hyper,
        carry=carry,
        samples=samples,
        watch=watch,
        tuning=SuitedForms(_CHOICES, memory_bytes=sys.maxsize),
    )


_CHOICES = KeptHere()


def _local(
    x: Array | str | Path | Source, y: Array | None, others: Mapping[str, Array] | None, bad_rows: str
) -> Local:
    policy = checked_policy(bad_rows)
    if isinstance(x, str | Path) or callable(x):
        if y is not None or others is not None:
            raise ConfigError("argument `x` names samples and their labels: leave `y` and `others` out")
        return load_data(Path(x) if isinstance(x, str) else x, policy)
    if y is None:
        raise ConfigError("argument `y` is missing: the labels of the samples `x`", argument="y")
    data = LocalData(
        np.asarray(x),
        np.asarray(y),
        "the data",
        {name: np.asarray(rows) for name, rows in (others or {}).items()},
        policy,
    )
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
