"""Evaluations of a run's test prompts: between two steps, or beside training.

Beside training, evaluations share the engines with rollouts: at most `evaluation.concurrency` attempts run at once, and their
requests precede those of waiting rollouts. Engines continue to load new versions, so the samples of one evaluation may come
from several versions: from the newest one when it began, to the newest one that sampled a token. Both are recorded. No engine
keeps its version for an evaluation, because it could not serve training meanwhile.
"""

import asyncio
from collections.abc import Mapping, Sequence

from antiphon.core.types import AttemptId, Prompt, Sampling, Trajectory
from antiphon.rollout.evaluation import Evaluation, TaskPlan, evaluate
from antiphon.run.components import Components


async def evaluate_newest(
    parts: Components, prompts: Sequence[Prompt], plans: Mapping[str, TaskPlan], room: asyncio.Semaphore | None = None
) -> Evaluation:
    """Score prompts with engines that hold the newest version or later ones; `room` bounds the attempts that run at once."""
    version = parts.weights.version

    async def run(prompt: Prompt, attempt: AttemptId, sampling: Sampling) -> Trajectory:
        if room is None:
            return await parts.rollouts.evaluate(prompt, attempt, version, sampling)
        async with room:
            return await parts.rollouts.evaluate(prompt, attempt, version, sampling)

    return await evaluate(prompts, plans, run)


class Evaluations:
    """Evaluates the test prompts of a run. Beside training, one evaluation runs at a time."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        self._config = parts.config
        self._blocking = parts.config.evaluation.blocking or parts.config.rollout.deterministic
        self._beside: asyncio.Task[Evaluation] | None = None
        self._step = 0  # after which it began
        self._room = asyncio.Semaphore(0)
        self._tell_changed_prompts()

    async def run(self, step: int) -> Evaluation | None:
        """Evaluate the newest version while training waits; None without test prompts."""
        if not self._parts.tasks.test:
            return None
        await self._parts.weights.update_engines()  # they may be behind when the run ends
        await self._parts.weights.switch_to_generation()
        return await self._evaluate(step, None)

    def is_due(self, step: int) -> bool:
        """Return True if an evaluation begins after a step; the last one is due as the run ends."""
        every = self._config.evaluation.every
        return bool(every and self._parts.tasks.test) and step % every == 0 and step < self._config.steps

    async def after_step(
        self, owner: asyncio.TaskGroup, step: int, before: Sequence[float] | None = None
    ) -> dict[str, float]:
        """Begin the evaluation that is due after a step, or run it if training waits for evaluations.

        After the last step this waits for the one that runs.

        Args:
            owner: Owns the evaluation that begins.
            step: The step.
            before: Accuracy on each test prompt before training, [P]; None or empty if it is not known.

        Returns:
            Metrics of the evaluation that has ended since the last call, if one has.
        """
        began = asyncio.get_running_loop().time()
        evaluation = None
        if self._blocking:
            evaluation = await self.run(step) if self.is_due(step) else None
        elif self._beside is not None and (self._beside.done() or step >= self._config.steps):
            for _ in self._parts.tasks.test:  # nothing else needs the engines any more
                self._room.release()
            evaluation, self._beside = await self._beside, None
        waited = asyncio.get_running_loop().time() - began
        if not self._blocking and self.is_due(step):
            self.begin(owner, step)
        return self._describe(evaluation, waited, before) if evaluation is not None else {}

    def begin(self, owner: asyncio.TaskGroup, step: int) -> None:
        """Begin the evaluation after `step` beside training, unless another one runs."""
        if self._beside is not None:
            message = f"the evaluation after step {step} is left out: the one after step {self._step} still runs"
            self._parts.record.view.message(message)
            return
        self._step, self._room = step, asyncio.Semaphore(self._config.evaluation_attempts)
        self._beside = owner.create_task(self._evaluate(step, self._room), name=f"evaluation after step {step}")

    def resume(self, owner: asyncio.TaskGroup, step: int | None) -> None:
        """Begin the evaluation again that had not ended at the cut of a checkpoint, as `unfinished` told."""
        if step is not None and self._config.evaluation.every and self._parts.tasks.test and not self._blocking:
            self.begin(owner, step)

    def unfinished(self, step: int) -> int | None:
        """Return the step after which an evaluation began, or is about to, whose result is not recorded after `step`."""
        if self._blocking:
            return None
        return self._step if self._beside is not None else step if self.is_due(step) else None

    async def cancel(self) -> None:
        """End the evaluation beside training, without a result."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.wait({self._beside})

    def _tell_changed_prompts(self) -> None:
        """Say that there is no comparison with the accuracy before training if a resume has other test prompts."""
        record, now = self._parts.record, len(self._parts.tasks.test)
        before = record.resumption.state.get("progress", {}).get("before") if record.resumption else None
        if before and now and len(before) != now:
            record.view.message(
                f"there are {now} test prompts, and were {len(before)} before training: gains are not reported"
            )

    async def _evaluate(self, step: int, room: asyncio.Semaphore | None) -> Evaluation:
        parts, events = self._parts, self._parts.record.ledger.events
        events.add("evaluate", step=step, version=parts.weights.version.n)
        found = await evaluate_newest(parts, parts.tasks.test, self._config.plan_evaluation(), room)
        (first, last), accuracy = found.versions, self._accuracy(found)
        events.add("evaluated", step=step, first=first, last=last, accuracy=accuracy)
        return found

    def _accuracy(self, evaluation: Evaluation) -> float:
        """Return the accuracy over the tasks that are trained on, if these have test prompts."""
        return evaluation.without(self._config.only_evaluated).accuracy

    def _describe(self, evaluation: Evaluation, waited: float, before: Sequence[float] | None) -> dict[str, float]:
        """Return the metrics of an evaluation, for which training waited some seconds."""
        first, last = evaluation.versions
        measured = {
            **evaluation.measures,
            **evaluation.curves(before),
            "accuracy": self._accuracy(evaluation),
            "first_version": float(first),
            "last_version": float(last),
            "wait_seconds": waited,
        }
        return {f"evaluation/{name}": value for name, value in measured.items()}
