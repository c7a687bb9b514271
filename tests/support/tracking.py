"""Contents of TensorBoard and MLflow, read by their own clients, and a small MLflow server."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self


def scalars_of(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    """Return step and value of each scalar in the folder of a run, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def texts_of(folder: Path) -> Mapping[str, str]:
    """Return the texts in the folder of a run by name, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    found = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    return {tag.removesuffix("/text_summary"): text for tag, text in found.items()}


def run_of(store: str, experiment: str) -> Any:
    """Return the only run of an experiment, as MLflow's client reads it."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def metrics_of(store: str, experiment: str, name: str) -> list[tuple[int, float]]:
    """Return step and value of each point of a metric of the only run."""
    from mlflow import MlflowClient

    history = MlflowClient(store).get_metric_history(run_of(store, experiment).info.run_id, name)
    return sorted((metric.step, metric.value) for metric in history)


def artifacts_of(store: str, experiment: str) -> set[str]:
    """Return the names of the artifacts of the only run."""
    from mlflow import MlflowClient

    client, run = MlflowClient(store), run_of(store, experiment).info.run_id
    groups = [each.path for each in client.list_artifacts(run)]
    return {each.path for group in groups for each in client.list_artifacts(run, group)}


class MlflowServer:
    """HTTP server that answers as MLflow does to a client with one run.

    Attributes:
        files: SHA-256 digest of each uploaded artifact, by name.
    """

    ANSWERS: ClassVar[Mapping[str, object]] = {
        "experiments/create": {"experiment_id": "1"},
        "runs/create": {
            "run": {"info": {"run_id": "r", "experiment_id": "1", "status": "RUNNING"}, "data": {}}
        },
        "runs/set-tag": {},
        "runs/update": {"run_info": {"run_id": "r", "experiment_id": "1", "status": "FINISHED"}},
        "runs/log-batch": {},
    }

    def __init__(self) -> None:
        bodies: list[tuple[str, Any]] = []
        files: dict[str, str] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                call = self.path.partition("/mlflow/")[2].partition("?")[0]
                bodies.append((call, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self._answer(200, MlflowServer.ANSWERS[call])

            def do_PUT(self) -> None:
                name = self.path.partition("/mlflow-artifacts/artifacts/")[2]
                digest, left = hashlib.sha256(), int(self.headers["Content-Length"])
                while left:
                    block = self.rfile.read(min(left, 1 << 20))
                    digest.update(block)
                    left -= len(block)
                files[name] = digest.hexdigest()
                self._answer(200, {})

            def do_GET(self) -> None:
                if "runs/get" in self.path:
                    info = {"run_id": "r", "experiment_id": "1", "status": "RUNNING"}
                    where = {"artifact_uri": "mlflow-artifacts:/"}
                    self._answer(200, {"run": {"info": info | where, "data": {}}})
                    return
                self._answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"})

            def _answer(self, code: int, answer: object) -> None:
                body = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._bodies = bodies
        self.files = files
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def posted(self, call: str) -> list[Any]:
        return [body for name, body in self._bodies if name == call]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
