"""A usual Flower client with torch, and the server that it connects to.

``python -m benchmarks.workers.flower_client server PORT`` says ``listening`` and ``connected`` when it does and one is;
``... client PORT`` builds torch's usual small CNN, then connects and waits. One process, torch imported, no round run.
"""

from __future__ import annotations

import sys
import threading
import time

HOST = "127.0.0.1"


def server(port: str) -> None:
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerConfig, SimpleClientManager, start_server
    from flwr.server.strategy import FedAvg

    manager = SimpleClientManager()

    def watch() -> None:
        while manager.num_available() == 0:
            time.sleep(0.002)
        print("connected", flush=True)

    threading.Thread(target=watch, daemon=True).start()
    strategy = FedAvg(min_available_clients=2, initial_parameters=ndarrays_to_parameters([]))
    start_server(
        server_address=f"{HOST}:{port}",
        config=ServerConfig(num_rounds=1),
        strategy=strategy,
        client_manager=manager,
    )


def client(port: str) -> None:
    import torch
    from flwr.client import NumPyClient, start_client
    from torch import nn

    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 10),
    )

    class TorchClient(NumPyClient):
        model = net

    start_client(server_address=f"{HOST}:{port}", client=TorchClient().to_client())


if __name__ == "__main__":
    {"server": server, "client": client}[sys.argv[1]](sys.argv[2])
