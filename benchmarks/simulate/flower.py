"""The process that simulates with Flower's engine on Ray, ``PYTHON -m benchmarks.simulate.flower FOLDER``, in an
environment of its own: an actor on each core, with one thread each."""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.simulate.work import Work, tell

_FOLDER = "EDGEFL_BENCH_FOLDER"
"""Where actors find the folder."""


@cache
def _work() -> Work:
    return Work(Path(os.environ[_FOLDER]))


@cache
def _module() -> Any:
    """An actor's model, made once."""
    import torch

    from benchmarks.simulate.models import MODELS

    torch.set_num_threads(1)
    return MODELS[_work().job.model]()


def train(message: Any, context: Any) -> Any:
    """A client's round."""
    import numpy as np
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from torch.nn import functional as F

    module, job, client = _module(), _work().job, int(context.node_config["partition-id"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(message.content["config"]["server-round"])
    x, y = map(torch.from_numpy, _work().client(client, np.random.default_rng((number, client))))
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), job.lr)
    for at in range(0, len(y), job.batch):
        optimizer.zero_grad()
        F.cross_entropy(module(x[at : at + job.batch]), y[at : at + job.batch]).backward()
        optimizer.step()
    found = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": _work().examples(client)}),
    }
    return Message(content=RecordDict(found), reply_to=message)


def main(folder: Path) -> None:
    import torch
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    os.environ[_FOLDER] = str(folder)
    job, cores = _work().job, len(os.sched_getaffinity(0))
    moments: list[float] = []
    ended: list[Any] = []

    class Timed(FedAvg):
        def aggregate_train(self, *given: Any, **named: Any) -> Any:
            found = super().aggregate_train(*given, **named)
            moments.append(time.perf_counter())
            return found

    client, server = ClientApp(), ServerApp()
    client.train()(train)

    def run(grid: Any, context: Any) -> None:
        strategy = Timed(
            fraction_train=job.per_round / job.clients,
            min_train_nodes=job.per_round,
            min_available_nodes=job.clients,
            fraction_evaluate=0.0,
        )
        start = ArrayRecord(_module().state_dict())
        ended.append(strategy.start(grid=grid, initial_arrays=start, num_rounds=job.rounds))

    server.main()(run)
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=job.clients,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": cores}},
    )
    module = _module()
    module.load_state_dict(ended[0].arrays.to_torch_state_dict())
    module.eval()
    with torch.no_grad():
        accuracy = _work().accuracy(lambda x: module(torch.from_numpy(x)).argmax(1).numpy())
    tell(moments, accuracy, version("flwr"))


if __name__ == "__main__":
    import_module("benchmarks.simulate.flower").main(
        Path(sys.argv[1])
    )  # by its name: actors look up what they run
