"""The models of a run in a trainer process on the learner's node (`antiphon.run.trainer_process`).

Models and stages are next to each other there; groups come as metas with references to their payloads.
"""

from collections.abc import Hashable, Mapping, Sequence

from typing_extensions import override

from antiphon.algorithms.rewards import AlgorithmState
from antiphon.core.rpc import Answerer, Client, forwards
from antiphon.core.types import Group
from antiphon.core.workers import WorkerHandle
from antiphon.learning.backend import StepResult, TrainBackend
from antiphon.learning.roles import Ask
from antiphon.learning.step import Wait


@forwards(TrainBackend)
class RemoteTrainer(Client, TrainBackend):
    """Calls a `TrainBackend` in another process. The death of a model there is the death of that process."""

    def __init__(self, handle: WorkerHandle, wait: Wait, roles: Mapping[str, Ask] | None = None) -> None:
        """Call the trainer behind a handle, whose stages ask `roles`."""
        super().__init__(handle, dict[Hashable, Answerer]((roles or {}).items()))
        self._wait = wait  # bounds a step

    @override
    async def learn(
        self, number: int, version: int, groups: Sequence[Group], algorithm_state: AlgorithmState
    ) -> StepResult:
        result: StepResult = await self._wait(self.call("learn", number, version, groups, algorithm_state))
        return result
