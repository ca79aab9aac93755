"""Mini-SWE as it is stored, and as a run plays it."""

import asyncio
import random

import msgspec
import numpy as np
import pytest

from antiphon.core.types import (
    MIXED_CACHE,
    AttemptId,
    AttemptStatus,
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Streams,
)
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.episode_loop import EpisodeContext
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.tasks.environments import environment_factory
from antiphon.tasks.rewards.environment_return import environment_return
from antiphon_envs.mini_swe.build import check
from antiphon_envs.mini_swe.packages import package_of, read_instances

INSTANCES = read_instances()
SAMPLE = 3  # of each package; `mini_swe_build --check` takes all


def spoken(text):
    """A completion that says a text, in the tokens of `Letters`."""
    tokens = np.array([*map(ord, text), 0], np.int32)
    return Completion(
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish=FinishReason.STOP,
        streams=Streams({MIXED_CACHE: np.zeros(len(tokens), np.bool_)}),
    )


class Letters:
    """A tokenizer of one token a character; 0 ends a turn."""

    eos_ids = (0,)

    def encode_prompt(self, messages):
        return np.array([ord(c) for message in messages for c in message.content], np.int32)

    def encode_observation(self, messages, observation, *, closed=True):
        return np.array([ord(c) for c in observation.content], np.int32)

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens if token)


pytestmark = pytest.mark.commands("bwrap")


@pytest.mark.parametrize("package", ["networkx", "mpmath"])
def test_instances_are_solved_only_by_their_original(package):
    some = [instance for instance in INSTANCES if instance.package == package]
    assert asyncio.run(check(random.Random(0).sample(some, SAMPLE))) == []


def test_a_scripted_agent_solves_one_in_an_episode():
    """It knows where the fault is, and has the shell do the rest."""
    instance = next(i for i in INSTANCES if i.package == "mpmath" and "\n" not in i.text)
    package = package_of(instance)
    line = package.files[instance.path].count(b"\n", 0, instance.start) + 1
    right = package.files[instance.path].splitlines()[line - 1].decode()
    script = [
        "ls",
        f"cd {instance.package} && python -m pytest -q tests/test_mpmath.py > /tmp/out; tail -1 /tmp/out",
        f"cd .. && sed -n {line}p {instance.path}",
        f"cat > /tmp/line <<'END'\n{right}\nEND",
        f"sed -i -e '{line}r /tmp/line' -e {line}d {instance.path} && sed -n {line}p {instance.path}",
        f"pytest -q {' '.join(instance.tests)} | tail -1",
        "submit",
    ]

    async def generate(request):
        return spoken(f"```bash\n{script[int(request.id.rpartition('/')[2])]}\n```")

    async def grade(prompt, transcript):
        said.extend(message.content for message in transcript.messages)
        return environment_return(prompt, transcript)

    said = []
    episodes = EpisodeRunner(
        EpisodeContext(
            encoder=PromptEncoder(Letters()),
            generate=generate,
            config=RolloutConfig(groups_per_step=1, max_turns=30, sampling={"max_tokens": 1000}),
            max_length=100_000,
            seed=0,
        ),
        grade=grade,
        environments={"t": environment_factory("mini_swe", {})},
    )
    payload = {"instance": msgspec.to_builtins(instance)}
    prompt = Prompt(id="p", task="t", messages=(Message("user", "Mend it."),), payload=payload)
    trajectory = asyncio.run(episodes.run(prompt, AttemptId(0, 0, 0), PolicyVersion(0, 0)))
    assert trajectory.meta.status is AttemptStatus.FINISHED
    assert (trajectory.meta.score.value, trajectory.meta.turns) == (1.0, len(script))
    assert instance.fail_to_pass[0] in said[1] and f"{instance.package}\n" in said[3]
    assert right in said[11] and "passed" in said[13] and "failed" not in said[13]
