"""Whole runs in environments of Atropos: rewards are those that its own scoring wrote down, of the tokens that were sampled."""

import asyncio
import json
import sqlite3
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError, SandboxError, UnsupportedError
from antiphon.record.trajectories import read
from antiphon.rollout.atropos.host import GroupCollector, make_environment
from antiphon.rollout.gateway.server import Gateway
from tests.raising import raises_with
from tests.unit.rollout.gateway_support import TEMPLATES, Logger, attempt_inputs, make, model

REASON = "atroposlib is not installed; it is in the extra `atropos`"
pytest.importorskip("atroposlib", reason=REASON)

WORLDS = """
    import importlib.util  # that the package's registry needs, and does not import
    import json, os, random
    from pathlib import Path

    from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
    from atroposlib.envs.reward_fns import registry
    from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
    from pydantic import Field

    HERE = Path(__file__).parent

    def say(role, content):
        return {"role": role, "content": content}

    def digits(text):
        return float(sum(map(str.isdigit, text)))

    class Config(BaseEnvConfig):
        base: int = Field(10, ge=2)

    class Sums(BaseEnv):
        # One turn; the reward is the package's own, and a rank among the siblings; groups without a difference are dropped.
        env_config_cls = Config

        async def setup(self):
            self.number = 0
            self.repetition = registry.create("repetition_penalty", min_words=1)

        async def get_next_item(self):
            self.number += 1
            return f"{self.number % self.config.base}+{self.number // self.config.base}="

        async def evaluate(self):
            raise AssertionError("an evaluation is the run's")

        async def ask(self, managed, messages, n=1):
            found = await managed.chat_completion(messages=messages, n=n, max_tokens=8, temperature=1.0)
            return [choice.message.content for choice in found.choices]

        async def collect_trajectories(self, item):
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                texts = await self.ask(managed, [say("user", item)], self.config.group_size)
                rollouts = [*zip(texts, managed.get_state()["nodes"])]
            random.shuffle(rollouts)
            return self.score(rollouts, item), []

        def score(self, rollouts, item):
            texts = [text for text, _ in rollouts]
            scores = [digits(text) + penalty for text, penalty in zip(texts, self.repetition(texts))]
            order = sorted(scores)
            scores = [score + order.index(score) for score in scores]
            if len(scores) > 1 and (len(set(scores)) == 1 or item.startswith("3")):
                return None
            return self.noted(ScoredDataGroup(
                tokens=[node.tokens for _, node in rollouts],
                masks=[node.masked_tokens for _, node in rollouts],
                scores=scores,
                inference_logprobs=[node.logprobs for _, node in rollouts],
            ))

        def noted(self, group):
            with (HERE / "scores.jsonl").open("a") as file:
                file.write(json.dumps(group) + "\\n")
            return group

    class Turns(Sums):
        # Two turns, by a coroutine of its own for each trajectory.
        async def collect_trajectory(self, item):
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                messages = [say("user", item)]
                messages += [say("assistant", (await self.ask(managed, messages))[0].strip()), say("user", "more=")]
                (last,) = await self.ask(managed, messages)
                (node,) = managed.get_state()["nodes"]
            score = digits(last) + random.random()
            self.noted({"tokens": [node.tokens], "scores": [score], "inference_logprobs": [node.logprobs]})
            return {"tokens": node.tokens, "masks": node.masked_tokens, "scores": score}, []

        collect_trajectories = BaseEnv.collect_trajectories

    class Branches(Sums):
        # Two turns of the whole group, told apart by what was said.
        async def collect_trajectories(self, item):
            first = await self.server.chat_completion(messages=[say("user", item)], n=self.config.group_size)
            group = ScoredDataGroup(tokens=[], masks=[], scores=[])
            for choice in first.choices:
                messages = [say("user", item), choice.message, say("user", "more=")]
                second = await self.server.chat_completion(messages=messages, max_tokens=4)
                messages[1] = say("assistant", choice.message.content)
                messages.append(say("assistant", second.choices[0].message.content))
                found = tokenize_for_trainer(self.tokenizer, messages, finish_reason=second.choices[0].finish_reason)
                group["tokens"].append(found["tokens"])
                group["masks"].append(found["masks"])
                group["scores"].append(digits(messages[1]["content"]) + 0.25 * digits(messages[3]["content"]))
            with (HERE / "scores.jsonl").open("a") as file:
                file.write(json.dumps([item, group["scores"]]) + "\\n")
            return group, []

    class Breaks(Sums):
        # Now and then it raises, or takes its process along.
        async def collect_trajectories(self, item):
            for name, end in (("raise", None), ("exit", 7)):
                if not (HERE / name).exists():
                    (HERE / name).touch()
                    if end:
                        os._exit(end)
                    raise KeyError("no such item")
            return await super().collect_trajectories(item)

    class Texts(Sums):
        # Completes a text, and then that with the completion and more.
        async def collect_trajectories(self, item):
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                first = await managed.completion(prompt=item, n=self.config.group_size, max_tokens=8)
                texts = [item + choice.text + ";more=" for choice in first.choices]
                seconds = [await managed.completion(prompt=text, max_tokens=4) for text in texts]
                nodes = managed.get_state()["nodes"]
            ends = [second.choices[0].text for second in seconds]
            assert [node.full_text.replace("<eos>", "") for node in nodes] == [
                text + end for text, end in zip(texts, ends)
            ]
            return self.score([*zip(ends, nodes)], item), []

    class Logprobs(Sums):
        async def collect_trajectories(self, item):
            try:
                await self.server.get_logprobs(prompt=item)
            finally:
                return None, []  # as if nothing had been the matter

    class Advantages(Sums):
        def score(self, rollouts, item):
            return {"tokens": [node.tokens for _, node in rollouts], "scores": [0.0, 1.0], "advantages": [[0.0], [1.0]]}

    class Backlog(Sums):
        async def collect_trajectories(self, item):
            return (await super().collect_trajectories(item))[0], [item]

    class Asks(Sums):
        async def collect_trajectories(self, item):
            await self.server.chat_completion(messages=[say("user", "which is best?")])
            return await super().collect_trajectories(item)

    class Few(Sums):
        async def get_next_item(self):
            return await super().get_next_item() if self.number < 2 else None

    class Early(Sums):
        async def get_next_item(self):
            await self.server.chat_completion(messages=[say("user", "what do I ask?")])

    class Lost(Sums):
        async def setup(self):
            raise OSError("there are no data")
"""
TASK = {
    "name": "sums",
    "prompts": {"source": "numbered", "shuffle": False, "options": {"size": 100}},
    "reward": "agent_result",
}


@pytest.fixture
def worlds(project):
    (project.folder / "worlds.py").write_text(textwrap.dedent(WORLDS))
    return project


def configure(project, world, options=None, **sections):
    agent = {"atropos": f"worlds:{world}", "seconds": 120, "options": options or {}}
    task = TASK | {"agent": agent} | sections.pop("task", {})
    return project.config(tasks=[task], **sections)


def train(project, world, options=None, **sections):
    done = project.run("train", configure(project, world, options, **sections))
    assert done.returncode == 0, done.stdout + done.stderr
    audit = project.run("audit", project.folder / "runs" / "run")
    assert audit.returncode == 0, audit.stdout
    return done


def read_trained(project):
    """Return the trajectories that were trained on, by the number of their group."""
    directory = project.folder / "runs" / "run"
    with sqlite3.connect(directory / "ledger.db") as ledger:
        trained = {*ledger.execute("SELECT grp, sibling, try FROM attempts WHERE status = 'trained'")}
    groups = {}
    for file in (directory / "rollouts").glob("*.parquet"):
        for trajectory in read(file).values():
            if (*trajectory.meta.id,) in trained:
                groups.setdefault(trajectory.meta.id.group, []).append(trajectory)
    assert sum(map(len, groups.values())) == len(trained)
    return groups


def read_log(project):
    return [json.loads(line) for line in (project.folder / "scores.jsonl").read_text().splitlines()]


def summarize(tokens, scores, logprobs):
    """Return how often a group has each sequence of tokens with its score and its rounded log-probs."""
    return Counter(
        (tuple(each), round(score, 6), tuple(round(value, 4) for value in values))
        for each, score, values in zip(tokens, scores, logprobs, strict=True)
    )


def summarize_recorded(group):
    """Return the same of recorded trajectories. Atropos writes 1 for the log-prob of a token that was not sampled."""
    segments = [trajectory.segments[0] for trajectory in group]
    return summarize(
        [segment.tokens.tolist() for segment in segments],
        [trajectory.meta.score.value for trajectory in group],
        [
            [value if sampled else 1.0 for value, sampled in zip(s.logprobs.tolist(), s.loss_mask, strict=True)]
            for s in segments
        ],
    )


@pytest.mark.parametrize("world", ["Sums", "Turns", "Texts"])
def test_rewards_are_those_of_atropos(worlds, world):
    train(worlds, world, {"base": 7}, steps=6)
    noted = [summarize(each["tokens"], each["scores"], each["inference_logprobs"]) for each in read_log(worlds)]
    groups = read_trained(worlds)
    assert len(groups) == 12
    for group in groups.values():
        if world == "Turns":  # it notes single trajectories
            assert all(summarize_recorded([trajectory]) in noted for trajectory in group)
        else:
            assert summarize_recorded(group) in noted
        assert {len(trajectory.segments) for trajectory in group} == {1}
        assert {trajectory.meta.turns for trajectory in group} == {1 if world == "Sums" else 2}
    with sqlite3.connect(worlds.folder / "runs" / "run" / "ledger.db") as ledger:
        failures = ledger.execute("SELECT count(*) FROM attempts WHERE failure IS NOT NULL").fetchone()[0]
        dropped = ledger.execute("SELECT DISTINCT score FROM attempts WHERE status = 'filtered'").fetchall()
    assert not failures
    assert dropped == ([] if world == "Turns" else [(None,)])  # items that begin with 3: never worth 0


def test_conversations_are_told_apart_by_what_was_said(worlds):
    recipe = Path(__file__).parents[2] / "recipes" / "agent_framework" / "model.py"
    (worlds.folder / "model.py").write_text(
        recipe.read_text()
    )  # it has a chat template, which tokenize_for_trainer needs
    train(worlds, "Branches", model={"path": "model:build"}, steps=2)
    noted = [Counter(scores) for _, scores in read_log(worlds)]
    groups = read_trained(worlds)
    for group in groups.values():
        assert Counter(trajectory.meta.score.value for trajectory in group) in noted
        assert {trajectory.meta.turns for trajectory in group} == {2}
        for trajectory in group:
            (segment,) = trajectory.segments
            first, second = (segment.tokens[turn.start : turn.stop].tolist() for turn in segment.turns)
            ten = range(9, 19)  # the digits, the first of the characters
            assert trajectory.meta.score.value == sum(t in ten for t in first) + 0.25 * sum(t in ten for t in second)


def test_an_evaluation_leaves_the_groups_alone(worlds):
    test = {"source": "numbered", "options": {"start": 90, "size": 4}}
    train(worlds, "Sums", task={"test": test, "evaluation": {"success_at": 0.5}}, steps=1)
    measures = worlds.summary()["measures_after"]
    assert measures["sums/turns"] == 1.0
    sizes = Counter(len(each["tokens"]) for each in read_log(worlds))
    assert sizes[1] == 8 and sizes[4] >= 2  # before and after training


def test_an_environment_that_breaks_is_tried_again(worlds):
    train(worlds, "Breaks", steps=2, rollout={"async_ratio": 0, "max_attempts": 5})
    with sqlite3.connect(worlds.folder / "runs" / "run" / "ledger.db") as ledger:
        failures = [row[0] for row in ledger.execute("SELECT failure FROM attempts WHERE failure IS NOT NULL")]
    assert all(failure.startswith("environment: ") for failure in failures)
    assert sum("no such item" in failure for failure in failures) == 4  # of one group
    assert sum("process of the environment ended" in failure for failure in failures) in (4, 8)


def test_an_environment_that_cannot_begin_ends_the_run(worlds):
    done = worlds.run("train", configure(worlds, "Lost"))
    assert done.returncode != 0 and "there are no data" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_request_that_cannot_be_answered_ends_the_run(worlds):
    done = worlds.run("train", configure(worlds, "Logprobs"))
    assert done.returncode != 0 and "tasks.agent.atropos" in done.stderr and "Traceback" not in done.stderr, done.stderr


# --- in this process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def renderer(tmp_path):
    return make(tmp_path / "model", TEMPLATES["plain"])


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name of a module with the environments."""
    name = "worlds_in_process"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(WORLDS))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def make_world(renderer, name, options=None):
    return make_environment(name, options or {}, {"tokenizer_name": str(renderer.directory), "group_size": 2})


def collect(renderer, environment, index=1):
    """Have an environment collect a group of two at a real gateway."""

    async def run():
        gateway = Gateway(model(renderer, Logger(renderer)))
        keys = [gateway.open_attempt(attempt_inputs()) for _ in range(2)]
        await environment.setup()
        return await GroupCollector(environment, gateway.answer).collect(index, keys)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("world", "error", "key"),
    [
        ("Logprobs", UnsupportedError, "tasks.agent.atropos"),
        ("Advantages", UnsupportedError, "tasks.agent.atropos"),
        ("Backlog", UnsupportedError, "tasks.agent.atropos"),
        ("Asks", UnsupportedError, "tasks.agent.atropos"),
        ("Early", UnsupportedError, "tasks.agent.atropos"),
        ("Few", ConfigError, "tasks.prompts.options"),
    ],
)
def test_what_cannot_be_trained_on_is_an_error(renderer, module, world, error, key):
    with raises_with(error, key=key):
        collect(renderer, make_world(renderer, f"{module}:{world}"), index=2 if world == "Few" else 1)


def test_what_an_environment_raises_fails_the_group(renderer, module):
    with pytest.raises(SandboxError, match="no such item"):
        collect(renderer, make_world(renderer, f"{module}:Breaks"))


@pytest.mark.parametrize(
    ("options", "key"),
    [({"bas": 3}, "bas"), ({"base": 1}, "base"), ({"base": "many"}, "base"), ({"group_size": 8}, "group_size")],
)
def test_a_wrong_option_is_named(renderer, module, options, key):
    with raises_with(ConfigError, key=f"tasks.agent.options.{key}", value=options[key]):
        make_world(renderer, f"{module}:Sums", options)
    assert make_world(renderer, f"{module}:Sums", {"base": 3}).config.base == 3


@pytest.mark.parametrize("name", ["BaseEnvConfig", "digits", "HERE"])
def test_only_environments_of_atropos_are_taken(renderer, module, name):
    with raises_with(ConfigError, key="tasks.agent.atropos", value=f"{module}:{name}"):
        make_world(renderer, f"{module}:{name}")


def test_items_are_drawn_once_and_in_order(renderer, module):
    class Items:
        config = type("Config", (), {"group_size": 2})

        def __init__(self):
            self.drawn, self.seen = 0, []

        async def get_next_item(self):
            self.drawn += 1
            return self.drawn - 1

        async def collect_trajectories(self, item):
            self.seen.append(item)
            return None, []

        async def cleanup(self):
            pass

    async def run():
        items = Items()
        collector = GroupCollector(items, None)
        await asyncio.gather(*(collector.collect(index, ["a", "b"]) for index in (3, 1, 3, 0)))
        return items

    items = asyncio.run(run())
    assert items.drawn == 4 and sorted(items.seen) == [0, 1, 3, 3]
