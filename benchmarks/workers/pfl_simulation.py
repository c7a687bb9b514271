"""Process that simulates with pfl-research: ``PYTHON -m benchmarks.workers.pfl_simulation FOLDER``.

PYTHON belongs to an environment with pfl (:mod:`benchmarks.peers`).
"""

from __future__ import annotations

import sys
import time
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.workers.simulation import JobFolder, print_result


def main(folder: Path) -> None:
    """Run FedAvg like pfl-research's benchmarks: its simulated backend, SGD on clients, SGD of rate 1 at the center."""
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from torch.nn import functional as F

    from benchmarks.workers.simulation import MODELS

    work = JobFolder(folder)
    job, draw = work.job, np.random.default_rng(0)
    np.random.seed(0)
    torch.manual_seed(0)
    module: Any = MODELS[job.model]()

    def loss(self: Any, x: Any, y: Any, eval: bool = False) -> Any:
        self.eval() if eval else self.train()
        return F.cross_entropy(self(x), y)

    def metrics(self: Any, x: Any, y: Any, eval: bool = True) -> dict[str, object]:
        return {}

    module.loss, module.metrics = (types.MethodType(each, module) for each in (loss, metrics))

    def data_of(user: int) -> Any:
        x, y = work.client(user, draw)
        return Dataset(raw_data=[torch.from_numpy(x), torch.from_numpy(y)], user_id=str(user))

    moments: list[float] = []

    class RoundClock(TrainingProcessCallback):
        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Any]:
            moments.append(time.perf_counter())
            return False, Metrics()

    users = FederatedDataset(data_of, get_user_sampler("random", list(range(job.clients))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,
            train_cohort_size=job.per_round,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0)),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=job.lr, local_num_epochs=1, local_batch_size=job.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[RoundClock()],
    )
    module.eval()
    with torch.no_grad():
        accuracy = work.accuracy(lambda x: module(torch.from_numpy(x)).argmax(1).numpy())
    print_result(moments, accuracy, version("pfl"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
