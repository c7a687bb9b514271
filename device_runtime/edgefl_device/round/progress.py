"""What a device tells of a round while it works on it: for people who watch, and nothing depends on it."""

from __future__ import annotations

import time

from edgefl.wire.mqtt.envelope import Seal
from edgefl.wire.mqtt.messages import FAILED, Progress
from edgefl.wire.mqtt.reasons import failure_code
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import DeviceTopics
from edgefl_device.link.fetch import Fetcher
from edgefl_device.memory import anonymous_bytes
from edgefl_device.round.graphs import Step
from edgefl_device.round.job import Job

_PERIOD_S = 0.2


class ProgressMessages:
    """Publishes the steps of rounds, at most five a second or as the task says, and attempts that failed."""

    def __init__(self, session: Session, topics: DeviceTopics, fetcher: Fetcher, seal: Seal) -> None:
        self._session = session
        self._topic = topics.progress
        self._seal = seal
        self._fetcher = fetcher
        self._last = 0.0

    def watch(self, job: Job, step: Step) -> None:
        """A step was made. The last one of a stage is told, unless the server wants to hear less."""
        now = time.monotonic()
        paced = job.progress_s > _PERIOD_S  # by the server, which hears many
        if now - self._last >= max(_PERIOD_S, job.progress_s) or (step.step >= step.steps and not paced):
            self._last = now
            self._publish(job.round, job.tier, step)

    def failed(self, round: int, tier: str, error: Exception) -> None:
        """Report a failed attempt by its code; there will be another while the round is open."""
        self._publish(round, tier, Step(f"{FAILED}{failure_code(error)}", 0, 0, float("nan"), 0.0))

    def _publish(self, round: int, tier: str, step: Step) -> None:
        progress = Progress(
            round=round,
            tier=tier,
            stage=step.stage,
            step=step.step,
            steps=step.steps,
            loss=step.loss,
            step_ms=step.step_ms,
            peak_bytes=anonymous_bytes(),
            down_bytes=self._fetcher.received_bytes + self._fetcher.mirrors.fresh_bytes,
            up_bytes=0,
        )
        self._session.publish(self._topic, self._seal(self._topic, progress), qos=0)
