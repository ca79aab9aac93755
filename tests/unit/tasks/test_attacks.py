"""The catalogue of reward hacks: it finds holes that were planted, and is silent on sound rewards."""

import asyncio

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.types import Message, Prompt
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig, PromptsConfig, TaskConfig
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.reward_checks.attacks import generate_attacks, has_tests
from antiphon.tasks.reward_checks.checks import check_reward, oracles
from benchmarks.check_rewards import CHOICES, HOLES, SOUND, SQUARES, SUMS, try_reward


@pytest.mark.parametrize("name", HOLES)
def test_a_planted_hole_is_found(name):
    found = try_reward(*HOLES[name])
    assert found.problems or found.holes


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_reward_raises_no_alarm(name):
    found = try_reward(*SOUND[name])
    assert (found.problems, found.holes) == ((), ()) and found.attacks > 20


@pytest.mark.parametrize("rows", [SUMS, CHOICES, SQUARES], ids=["sums", "choices", "squares"])
def test_no_attack_is_the_right_answer(rows):
    for payload, question in rows:
        prompt = Prompt(id="p", task="t", messages=(Message("user", question),), payload=payload)
        found = list(generate_attacks(prompt))
        assert len({attack.cause for attack in found}) == len(found)
        assert not {attack.response.strip() for attack in found} & set(oracles(prompt))
        assert has_tests(prompt) == any(attack.cause.startswith("code:") for attack in found)


def test_a_pattern_that_backtracks_is_found_and_its_gradings_end():
    config = GradingConfig(workers=1, deadline=1.9)
    task = TaskConfig(
        name="t", prompts=PromptsConfig(source="jsonl"), reward="regex", reward_options={"pattern": "(a|a)+b|c"}
    )
    prompt = Prompt(id="p", task="t", messages=(Message("user", "Write c."),), payload={})

    async def check():
        async with RewardRouter([task], config, Deadlines()) as router:

            async def grade(response):
                return await router.score(prompt, Transcript([Message("assistant", response)]))

            scores = [await grade(response) for response in ("c", "a" * 40 + "!", "c")]
            return scores, await check_reward(task, [prompt], router.score, config, attack=True)

    (right, hung, again), found = asyncio.run(check())
    assert (right.value, again.value) == (1.0, 1.0)
    assert hung.value in (0.0, None), "the pattern ends after 1 s, or on a busy machine the grading at its deadline"
    assert [hole for hole in found.holes if hole.startswith("bomb: backtracking letters: takes")]


def test_check_names_the_hacks_that_are_paid(project):
    (project.folder / "careless.py").write_text(
        "def mentions(prompt, transcript):\n    return float(prompt.payload['answer'] in transcript.response)\n"
    )
    task = {"name": "sums", "prompts": {"source": "mytask:problems"}, "reward": "careless:mentions"}
    checked = project.run("check", project.config(tasks=[task]), "--prompts", "2")
    assert checked.returncode == 1
    assert "reward hack: several answers" in checked.stdout
