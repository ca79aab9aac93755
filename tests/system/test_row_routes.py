"""One data set whose rows name their tasks: five rewards and three environments, each row judged as in its task alone."""

import asyncio
import json

import pytest

from antiphon.core.config import add_import_folder, load
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.rng import derive
from antiphon.core.types import Message
from antiphon.inspect.audit import audit
from antiphon.inspect.replay import replay
from antiphon.inspect.samples import iterate_samples
from antiphon.run import commands
from antiphon.run.config import RunConfig
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig, PromptsConfig, TaskConfig
from antiphon.tasks.environments import environment_factory
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.prompts import load_prompts

PARTS = {
    "short": {"reward": "length", "weight": 0.7, "options": {"high": 2, "fade": 6, "unit": "characters"}},
    "varied": {"reward": "repetition", "weight": 0.3, "options": {"ngram": 1, "unit": "characters"}},
}
REWARDS = {
    "letters": {"reward": "regex", "reward_options": {"whole": False, "pattern": "[a-m]"}},
    "first": {"reward": "exact_match", "reward_options": {"pattern": "([0-4]|[a-z])"}},
    "digits": {"reward": "mytask:digits", "sampling": {"max_tokens": 3, "temperature": 0.8}},
    "brief": {"reward": "composed", "reward_options": {"parts": PARTS}},
    "commas": {"reward": "instruction_following", "system": "no commas"},
}
WORLDS = {
    "lengths": {"environment": "mytask:Lengths"},
    "lake": {"environment": "frozen_lake", "environment_options": {"size": 4, "turns": 6}},
    "guess": {"environment": "guess_number", "environment_options": {"highest": 9, "guesses": 2}},
}
TASKS = REWARDS | {name: {**world, "reward": "environment_return"} for name, world in WORLDS.items()}
COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def rows():
    """Yield rows of all tasks in turn."""
    for number in range(3):
        for name in TASKS:
            yield {
                "id": f"{name}-{number}",
                "prompt": f"{name} {number}=",
                "answer": "abc"[number],
                "kind": name,
            } | COMMA


def configure(project, written, route="kind", **mixed):
    path = project.folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in written))
    prompts = {"source": "jsonl", "path": str(path), "shuffle": False}
    tasks = [{"name": "mixed", "prompts": prompts, "route": route, **mixed}]
    rollout = {"groups_per_step": 12, "group_size": 2, "max_turns": 6, "timeout": 180, "sampling": {"max_tokens": 8}}
    config = project.config(
        tasks=tasks + [{"name": name} | task for name, task in TASKS.items()], rollout=rollout, steps=2
    )
    add_import_folder(config)
    return load(config, ("cluster.debug=true", "record.live=off", "check.prompts=0"), model=RunConfig)


def test_each_row_is_judged_as_in_its_task_alone(project):
    config = configure(project, rows())
    assert commands.train(config) == 0
    run = project.folder / "runs" / "run"
    assert audit(run).violations == []
    samples = list(iterate_samples(run, model=project.model))
    assert {sample.row.prompt.task for sample in samples} == set(TASKS)
    for name in TASKS:
        own = [sample for sample in samples if sample.row.prompt.task == name]
        assert len(own) >= 6
        asyncio.run(check_alone(project, name, own))
    assert len({sample.row.score for sample in samples}) > 5  # else nothing was compared
    assert replay(run, config) == 2


async def check_alone(project, name, samples):
    """Check samples against the environment and the grader of their task in a configuration of its own."""
    path = project.folder / f"{name}.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows() if row["kind"] == name))
    prompts = PromptsConfig(source="jsonl", path=str(path))
    task = TaskConfig(name=name, prompts=prompts, **TASKS[name])
    alone = {prompt.id.split("/", 1)[1]: prompt for prompt in load_prompts(task, prompts, seed=0)}
    async with RewardRouter([task], GradingConfig(), Deadlines()) as graders:
        for sample in samples:
            prompt = alone[sample.row.prompt.id.split("/", 1)[1]]
            turns = [turn for segment in sample.trajectory.segments for turn in segment.turns]
            limit = task.sampling.max_tokens or 8
            assert all(turn.sampling.max_tokens == limit for turn in turns)
            assert all(turn.sampling.temperature == (task.sampling.temperature or 1.0) for turn in turns)
            if task.environment:
                assert sample.row.score == await play(task, prompt, sample)
                continue
            (_, text), (_, response) = sample.parts
            assert text == "".join(message.content for message in prompt.messages)
            score = await graders.score(prompt, Transcript([*prompt.messages, Message("assistant", response)]))
            assert sample.row.score == score.value


async def play(task, prompt, sample):
    """Return the return of the recorded actions in the task's environment; its observations must be the recorded ones."""
    world = environment_factory(task.environment, task.environment_options)(prompt)
    observation, _ = await settle(
        world.reset(derive(derive(prompt.seed, "epoch", sample.row.prompt.epoch), "environment"))
    )
    observations, total = [prompt.messages[-1].content + observation], 0.0
    for kind, text in sample.parts:
        if kind == "response":
            observation, reward, *_ = await settle(world.step(text))
            observations.append(observation)
            total += reward
    recorded = [text for kind, text in sample.parts if kind != "response"]
    assert recorded == observations[: len(recorded)]
    return pytest.approx(total)


async def settle(result):
    return await result if asyncio.iscoroutine(result) else result


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"kind": "lak"},
            "row 3, column 'kind': names 'lak': did you mean 'lake'? a row can name letters, first",
        ),
        ({"kind": "mixed"}, "row 3, column 'kind': names 'mixed': a row can name letters, first"),
        ({"kind": ["lake"]}, "row 3, column 'kind': names ['lake']: did you mean 'lake'? a row can name letters"),
    ],
)
def test_a_row_that_names_no_task_is_refused_before_the_run(project, change, said):
    wrong = [row | (change if number == 2 else {}) for number, row in enumerate(rows())]
    with pytest.raises(DataError) as raised:
        commands.train(configure(project, wrong))
    assert said in str(raised.value) and raised.value.row == 3
    assert not (project.folder / "runs" / "run").exists()


def test_a_row_without_the_column_is_refused_before_the_run(project):
    with pytest.raises(
        DataError, match=r"row 1, column 'knd': it is missing \(route names it\): did you mean 'kind'\?"
    ):
        commands.train(configure(project, rows(), route="knd"))
    assert not (project.folder / "runs" / "run").exists()


@pytest.mark.parametrize(
    ("setting", "value"), [("reward", "numeric"), ("system", "be brief"), ("sampling", {"top_k": 0})]
)
def test_a_task_with_a_route_has_no_settings_of_its_own(project, setting, value):
    with pytest.raises(ConfigError, match=rf"tasks\.0\.{setting}: is not used: .* 'kind' names \(route\)"):
        configure(project, rows(), **{setting: value})
