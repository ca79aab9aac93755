"""Sampling of a data set with any model, with rewards: `antiphon generate`, and data for supervised fine-tuning made of it."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.core.blocking import run_blocking
from antiphon.core.errors import ConfigError
from antiphon.core.types import AttemptId, Message, PolicyVersion, Prompt, Trajectory
from antiphon.core.types.completions import data_url
from antiphon.record.run_dir import atomic_write
from antiphon.rollout.attempt import UnscoredAttempt
from antiphon.rollout.evaluation import TaskPlan
from antiphon.run.chat_api import ChatAPI
from antiphon.run.commands import keep_used, open_rollouts
from antiphon.run.config import RunConfig
from antiphon.run.supervision import run_supervised
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.prompts import load_prompts

SOURCES = {".jsonl": "jsonl", ".parquet": "parquet"}
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample", pa.int64()),
        ("task", pa.string()),
        ("prompt", MESSAGES),
        ("messages", MESSAGES),  # the whole conversation
        ("response", pa.string()),
        ("score", pa.float64()),
        ("success", pa.bool_()),
        ("parts", pa.string()),
        ("status", pa.string()),
        ("detail", pa.string()),
        ("truncated", pa.bool_()),
        ("completion_tokens", pa.int64()),
        ("row", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """One attempt at a prompt of the data set."""

    prompt: Prompt
    number: int
    attempt: UnscoredAttempt
    trajectory: Trajectory
    success: bool

    @property
    def score(self) -> float | None:
        """The score; None if there is none."""
        return self.trajectory.meta.score.value

    def row(self) -> dict[str, Any]:
        """Return the row of `SCHEMA`."""
        meta, transcript = self.trajectory.meta, self.attempt.transcript
        failure = meta.failure.message if meta.failure else ""
        return {
            "prompt_id": self.prompt.id,
            "sample": self.number,
            "task": self.prompt.task,
            "prompt": _plain(self.prompt.messages),
            "messages": _plain(transcript.messages),
            "response": transcript.response,
            "score": self.score,
            "success": self.success,
            "parts": json.dumps(dict(meta.score.parts)),
            "status": str(meta.score.status),
            "detail": failure or meta.score.detail,
            "truncated": meta.truncated,
            "completion_tokens": meta.completion_tokens if self.trajectory.payload else None,  # an API gives no tokens
            "row": json.dumps(self.prompt.payload, default=str),
        }

    def example(self) -> dict[str, Any]:
        """Return a row of data for supervised fine-tuning."""
        response, messages = self.attempt.transcript.response, self.prompt.messages
        images = [data_url(image) for message in messages for image in message.images]
        shown = {"images": images} if images else {}
        return {"id": self.prompt.id, "prompt": _plain(messages), **shown, "response": response, "score": self.score}


def load_data(config: RunConfig, data: Path, task: str = "", limit: int = 0) -> list[Prompt]:
    """Load a data set as prompts of a task of the configuration.

    Args:
        config: The tasks.
        data: A JSONL or Parquet file.
        task: Name of the task; by default the only one, or the only one with a route.
        limit: Number of rows to use, from the first; 0 uses all.
    """
    if data.suffix not in SOURCES:
        raise ConfigError(f"{str(data)!r} must be a file that ends in {' or '.join(SOURCES)}", key="--data")
    chosen = _choose_task(config, task)
    known = chosen.prompts or chosen.test
    column = {"prompt_column": known.prompt_column, "image_column": known.image_column} if known else {}
    prompts = PromptsConfig(source=SOURCES[data.suffix], path=str(data), limit=limit, **column)
    return load_prompts(chosen, prompts, config.seed, config.tasks)


def _choose_task(config: RunConfig, name: str) -> TaskConfig:
    routed = [task for task in config.tasks if task.route]
    found = [task for task in config.tasks if task.name == name] if name else routed or list(config.tasks)
    if len(found) != 1:
        names = [task.name for task in config.tasks]
        said = f"there is no task {name!r}" if name else "the data may belong to several tasks: name one"
        raise ConfigError(f"{said}; tasks are {', '.join(names)}", key="--task", value=name, valid=names)
    return found[0]


def generate(
    model: str,
    config: RunConfig,
    prompts: Sequence[Prompt],
    plans: Mapping[str, TaskPlan],
    api: ChatAPI | None = None,
) -> list[GeneratedSample]:
    """Sample each prompt as the plan of its task says, and score the samples; in the order of the prompts.

    Args:
        model: Directory of the model, or the name of the model that `api` has.
        config: The tasks, engines and graders.
        prompts: The prompts.
        plans: How each task is sampled, and what counts as a success.
        api: Asked instead of the engines.
    """
    alone = tuple(task.model_copy(update={"group_reward": None}) for task in config.tasks)
    return run_blocking(_generate(model, config.model_copy(update={"tasks": alone}), prompts, plans, api))


async def _generate(
    model: str, config: RunConfig, prompts: Sequence[Prompt], plans: Mapping[str, TaskPlan], api: ChatAPI | None
) -> list[GeneratedSample]:
    slots = sum(engine.slots for engine in config.engine.engine_kinds)
    seats = asyncio.Semaphore(api.concurrency if api else 2 * slots)  # engines never wait
    async with open_rollouts(model, config, api, keep_used(plans, prompts)) as rollouts:

        async def sample(index: int, number: int) -> GeneratedSample:
            prompt = prompts[index]
            plan = plans[prompt.task]
            async with seats:
                attempt = AttemptId(-1 - index, number, 0)
                unscored = await rollouts.generate(prompt, attempt, PolicyVersion(0, 0), plan.sampling)
                trajectory = await rollouts.score(unscored)
            return GeneratedSample(prompt, number, unscored, trajectory, plan.is_success(trajectory.meta))

        async def sample_all(owner: asyncio.TaskGroup) -> list[GeneratedSample]:
            numbers = [
                (index, number) for index, prompt in enumerate(prompts) for number in range(plans[prompt.task].samples)
            ]
            tasks = [owner.create_task(sample(*each)) for each in numbers]
            return await asyncio.gather(*tasks)

        return await run_supervised([rollouts.watch()], sample_all)


def write_samples(path: Path, samples: Iterable[GeneratedSample]) -> None:
    """Write samples to a Parquet file with the columns of `SCHEMA`."""
    with atomic_write(path) as file:
        pq.write_table(pa.Table.from_pylist([sample.row() for sample in samples], schema=SCHEMA), file)


def write_examples(path: Path, samples: Iterable[GeneratedSample]) -> int:
    """Write samples as JSONL that `antiphon sft` reads; return their number."""
    lines = [json.dumps(sample.example(), ensure_ascii=False) + "\n" for sample in samples]
    with atomic_write(path) as file:
        file.write("".join(lines).encode())
    return len(lines)


def best(samples: Iterable[GeneratedSample]) -> Iterator[GeneratedSample]:
    """Yield the sample with the highest score of each prompt; the first of equals. Prompts without a score have none."""
    found: dict[str, GeneratedSample] = {}
    for sample in samples:
        if sample.score is not None and sample.score > _score_of(found.get(sample.prompt.id)):
            found[sample.prompt.id] = sample
    yield from found.values()


def passed(samples: Iterable[GeneratedSample]) -> Iterator[GeneratedSample]:
    """Yield different successful responses to each prompt; the first of equal ones."""
    seen = set[tuple[str, str]]()
    for sample in samples:
        key = sample.prompt.id, sample.attempt.transcript.response
        if sample.success and key not in seen:
            seen.add(key)
            yield sample


def check_single_turn(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raise `ConfigError` for tasks whose conversations have several turns, which are no examples of one response."""
    used = {prompt.task for prompt in prompts}
    several = [task.name for task in config.tasks if task.name in used and (task.environment or task.agent)]
    if several:
        message = f"needs tasks of one turn; {', '.join(several)} has an environment or an agent"
        raise ConfigError(message, key="--best, --passed")


def _score_of(sample: GeneratedSample | None) -> float:
    return float("-inf") if sample is None or sample.score is None else sample.score


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
