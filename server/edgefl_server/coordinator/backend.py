"""Execution of the coordinator's actions. The server and the simulator implement the same backend."""

from __future__ import annotations

from typing import Protocol

from edgefl.errors import EdgeflError
from edgefl_server.coordinator import states
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import Actions, OpenRound


class RoundBackend(Protocol):
    """Environment that performs the coordinator's actions: the server, or the simulator."""

    def open_round(self, opened: OpenRound) -> None:
        """Begin a round: publish its model and send its devices their tasks."""

    def send_task(self, assignment: Assignment) -> None:
        """Send a device the task ``assignment`` again."""

    def reassign(self, over: tuple[Assignment, ...], tasks: tuple[Assignment, ...]) -> None:
        """End the tasks ``over``, whose updates are refused from now on, and send the new ``tasks`` to their devices."""

    def close_round(self, ended: OpenRound) -> None:
        """Compute the new model from the accepted updates of ``ended``, then report ``ModelReady`` to the coordinator."""

    def abandon_round(self, ended: OpenRound, text: str, *, restart: bool) -> None:
        """End a round without a new model. ``text`` is the reason for people.

        ``restart`` is True if the algorithm begins again with its first round.
        """

    def finish(self) -> None:
        """End the run successfully after its last round."""

    def refuse(self, error: EdgeflError) -> None:
        """End the run early because of ``error``, which the caller of the run receives."""

    def warn(self, text: str) -> None:
        """Report a warning to people."""


def perform(actions: Actions, backend: RoundBackend) -> None:
    """Perform the coordinator's actions in their order.

    Args:
        actions: Actions that :func:`edgefl_server.coordinator.machine.step` returned.
        backend: Environment to perform them in.
    """
    for action in actions:
        match action:
            case states.StartRound(round=opened):
                backend.open_round(opened)
            case states.SendTask(assignment=assignment):
                backend.send_task(assignment)
            case states.ReassignTasks(over=over, tasks=tasks):
                backend.reassign(over, tasks)
            case states.CloseRound(round=ended):
                backend.close_round(ended)
            case states.AbandonRound(round=ended, text=text, restart=restart):
                backend.abandon_round(ended, text, restart=restart)
            case states.Warn(text=text):
                backend.warn(text)
            case states.RefuseRun():
                backend.refuse(action.error)
            case states.FinishRun():
                backend.finish()
