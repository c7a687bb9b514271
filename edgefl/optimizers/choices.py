"""Optimizers of the server as objects, with their options: ``FedAdam(lr=0.01)``."""

from __future__ import annotations

from edgefl.contract.choice import OptimizerChoice, built_alone
from edgefl.optimizers import adaptive as server_adaptive
from edgefl.optimizers.momentum import server_momentum

FedAdam = built_alone(OptimizerChoice, "fedadam", "FedAdam", server_adaptive.fedadam)
FedYogi = built_alone(OptimizerChoice, "fedyogi", "FedYogi", server_adaptive.fedyogi)
FedAdagrad = built_alone(OptimizerChoice, "fedadagrad", "FedAdagrad", server_adaptive.fedadagrad)
FedAMS = built_alone(OptimizerChoice, "fedams", "FedAMS", server_adaptive.fedams)
ServerMomentum = built_alone(OptimizerChoice, "server_momentum", "ServerMomentum", server_momentum)
