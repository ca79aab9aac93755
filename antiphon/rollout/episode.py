"""Running attempts: from a prompt to a scored trajectory, by turns with an environment or by an agent.

Tokens are appended and never rendered again: what was sampled is what is trained.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from antiphon.core.errors import REFUSALS
from antiphon.core.types import AttemptId, Failure, PolicyVersion, Prompt, Sampling, Score, Timing, Trajectory
from antiphon.rollout.agents import Outcome
from antiphon.rollout.attempt import AttemptInputs, UnscoredAttempt, find_bad_logprob
from antiphon.rollout.environment_call import EnvironmentCallError
from antiphon.rollout.episode_loop import EnvironmentFactory, EpisodeContext, EpisodeLoop
from antiphon.rollout.prompt_encoding import PromptError
from antiphon.tasks.base import Transcript

ScoreTranscript = Callable[[Prompt, Transcript], Awaitable[Score]]
RunAgent = Callable[[AttemptInputs], Awaitable[Outcome]]  # `agents.run_agent` with its agent and gateway


class EpisodeRunner:
    """Runs attempts; each call of `run` is one. Cancelling it aborts whatever it waits for."""

    def __init__(
        self,
        context: EpisodeContext,
        *,
        grade: ScoreTranscript,
        environments: Mapping[str, EnvironmentFactory],
        agents: Mapping[str, RunAgent] | None = None,
        sampling: Mapping[str, Sampling] | None = None,
    ) -> None:
        """Create a runner.

        Args:
            context: What all episodes share.
            grade: Scores a transcript.
            environments: Factory by task, for tasks that have an environment.
            agents: Function that runs an attempt by task, for tasks that have an agent.
            sampling: How tokens are sampled by task, for tasks with a way of their own.
        """
        self._context = context
        self._grade = grade
        self._environments = environments
        self._agents = agents or {}
        self._samplings = sampling or {}
        self._sampling = context.config.sampling.sampling()

    async def run(
        self,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling | None = None,
        priority: int = 0,
    ) -> Trajectory:
        """Run one attempt and score it. A failure of the environment or the grader is in the result, not raised.

        Args:
            prompt: The prompt.
            attempt: Id of the attempt.
            started: Version of the policy at which it starts.
            sampling: Sampling parameters; by default those of the configuration.
            priority: Requests with lower values go first.
        """
        return await self.score(await self.generate(prompt, attempt, started, sampling, priority))

    async def generate(
        self,
        prompt: Prompt,
        attempt: AttemptId,
        started: PolicyVersion,
        sampling: Sampling | None = None,
        priority: int = 0,
    ) -> UnscoredAttempt:
        """Run one attempt without scoring it. For the arguments see `run`."""
        sampling = sampling or self._samplings.get(prompt.task, self._sampling)
        inputs = AttemptInputs(prompt=prompt, attempt=attempt, started=started, sampling=sampling, priority=priority)
        if prompt.task in self._agents:
            return await self._run_agent(inputs)
        return await self._run_episode(inputs)

    async def score(self, unscored: UnscoredAttempt) -> Trajectory:
        """Score an attempt, unless it has failed."""
        return await score_attempt(unscored, self._grade)

    async def _run_agent(self, inputs: AttemptInputs) -> UnscoredAttempt:
        began = asyncio.get_running_loop().time()
        run = self._agents[inputs.prompt.task]
        outcome = await run(inputs)
        segments = outcome.captured.segments
        return UnscoredAttempt(
            attempt=inputs.attempt,
            prompt=inputs.prompt,
            started=inputs.started,
            transcript=outcome.transcript,
            segments=segments,
            measures=outcome.measures,
            prompt_tokens=segments[0].turns[0].start if segments else 0,
            failure=outcome.failure or find_bad_logprob(segments),
            timing=_timing_since(began),
        )

    async def _run_episode(self, inputs: AttemptInputs) -> UnscoredAttempt:
        began = asyncio.get_running_loop().time()
        task = inputs.prompt.task
        episode = EpisodeLoop(self._context, inputs, self._environments.get(task))
        failure = await _run_to_failure(episode)
        recording = episode.recording
        segments = recording.segments()
        if not segments and failure is None:
            length, limit = recording.current.length, self._context.max_length
            message = f"a prompt of {length} tokens leaves no room in {limit}"
            failure = Failure(source="episode", message=message)
        turns = [turn for segment in segments for turn in segment.turns]
        return UnscoredAttempt(
            attempt=inputs.attempt,
            prompt=inputs.prompt,
            started=inputs.started,
            transcript=Transcript(recording.messages, turns, recording.truncated),
            segments=segments,
            measures=recording.measures() if task in self._environments else {},
            prompt_tokens=len(recording.builders[0].tokens[0]) if recording.builders else 0,
            failure=failure or find_bad_logprob(segments),
            timing=_timing_since(began),
        )


async def score_attempt(unscored: UnscoredAttempt, grade: ScoreTranscript) -> Trajectory:
    """Score an attempt, unless it has failed."""
    if unscored.failure is None:
        score = await grade(unscored.prompt, unscored.transcript)
        score = replace(score, parts={**unscored.measures, **score.parts})
    else:
        score = Score.ungraded("the attempt failed")
    return unscored.to_trajectory(score, asyncio.get_running_loop().time())


async def _run_to_failure(episode: EpisodeLoop) -> Failure | None:
    """Run an episode; return what failed, or None."""
    try:
        await episode.run()
    except EnvironmentCallError as error:
        return Failure(source="environment", message=str(error))
    except PromptError as error:
        return Failure(source="episode", message=str(error))
    except REFUSALS as error:
        return Failure(source="engine", message=str(error))
    return None


def _timing_since(began: float) -> Timing:
    return Timing(queued=began, started=began, finished=asyncio.get_running_loop().time())
