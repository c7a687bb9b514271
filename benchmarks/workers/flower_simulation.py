"""Process that simulates with Flower's engine on Ray: ``PYTHON -m benchmarks.workers.flower_simulation FOLDER``.

PYTHON belongs to an environment with Flower (:mod:`benchmarks.peers`). Each core has an actor with one thread.
"""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.workers.simulation import JobFolder, print_result

_FOLDER = "EDGEFL_BENCH_FOLDER"
"""Variable by which actors find the folder."""


@cache
def _job_folder() -> JobFolder:
    return JobFolder(Path(os.environ[_FOLDER]))


@cache
def _module() -> Any:
    """Return an actor's model, built once."""
    import torch

    from benchmarks.workers.simulation import MODELS

    torch.set_num_threads(1)
    return MODELS[_job_folder().job.model]()


def train(message: Any, context: Any) -> Any:
    """Train one client for a round."""
    import numpy as np
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from torch.nn import functional as F

    module, job, client = _module(), _job_folder().job, int(context.node_config["partition-id"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(message.content["config"]["server-round"])
    x, y = map(torch.from_numpy, _job_folder().client(client, np.random.default_rng((number, client))))
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), job.lr)
    for at in range(0, len(y), job.batch):
        optimizer.zero_grad()
        F.cross_entropy(module(x[at : at + job.batch]), y[at : at + job.batch]).backward()
        optimizer.step()
    found = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": _job_folder().examples(client)}),
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
    job, cores = _job_folder().job, len(os.sched_getaffinity(0))
    moments: list[float] = []
    ended: list[Any] = []

    class TimedFedAvg(FedAvg):
        def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
            aggregated = super().aggregate_train(*args, **kwargs)
            moments.append(time.perf_counter())
            return aggregated

    client, server = ClientApp(), ServerApp()
    client.train()(train)

    def run(grid: Any, context: Any) -> None:
        strategy = TimedFedAvg(
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
        accuracy = _job_folder().accuracy(lambda x: module(torch.from_numpy(x)).argmax(1).numpy())
    print_result(moments, accuracy, version("flwr"))


if __name__ == "__main__":
    import_module("benchmarks.workers.flower_simulation").main(
        Path(sys.argv[1])
    )  # by its name: actors look up what they run
