"""Environments of other libraries. What is not installed is skipped."""

import asyncio
import random
import re
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from antiphon.core.errors import ConfigError
from antiphon.core.optional_packages import how_to_install
from antiphon.core.types import Prompt
from antiphon.tasks.environments import ENVIRONMENTS, environment_factory, required_options
from antiphon.tasks.environments.adapters.gem import Gem
from antiphon.tasks.environments.adapters.global_random import GlobalRandom
from antiphon.tasks.environments.adapters.gymnasium import Gymnasium
from antiphon.tasks.environments.adapters.openenv import OpenEnv
from antiphon.tasks.environments.adapters.reasoning_gym import ReasoningGym
from antiphon.tasks.environments.adapters.textarena import TextArena
from antiphon.tasks.environments.base import OptionError
from antiphon.tasks.environments.frozen_lake import FrozenLake
from tests.raising import raises_with
from tests.servers import served
from tests.unit.tasks.worlds import at_random, expert, follow, play, success_rate

# The libraries' own: what they say at import and of old versions.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["Left", "Down", "Right", "Up"]
HARD_ICE = {"desc": ["SFFF", "FHFH", "FFFH", "HFFG"], "is_slippery": False}


@pytest.mark.parametrize(
    ("name", "options", "package"),
    [
        ("gem", {"id": "x"}, "gem-llm"),
        ("gymnasium", {"id": "x"}, "gymnasium"),
        ("openenv", {"url": "http://localhost:1"}, "websockets"),
        ("reasoning_gym", {"name": "leg_counting"}, "reasoning-gym"),
        ("textarena", {"id": "x"}, "textarena"),
    ],
)
def test_a_library_that_is_not_installed_is_named(name, options, package, monkeypatch):
    for module in [each for each in sys.modules if each.split(".")[0] in ("gem", "websockets", name)]:
        monkeypatch.delitem(sys.modules, module)
    found = sys.meta_path

    class NotInstalled:
        @staticmethod
        def find_spec(module, path=None, target=None):
            if module.split(".")[0] in ("gem", "websockets", name):
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *found])
    with raises_with(ConfigError, match=f"{name!r} .*{re.escape(how_to_install(package))}", value=package):
        environment_factory(name, options)(Prompt(id="p", task="t", messages=()))
    assert required_options(name) == tuple(options)


def test_what_environments_cannot_be_made_without():
    assert required_options("mini_swe") == ("prompt",)
    assert required_options("frozen_lake") == required_options("guess_number") == ()
    assert all(isinstance(required_options(name), tuple) for name in ENVIRONMENTS.known)


def test_global_generators_are_kept_apart():
    ours, theirs = GlobalRandom(1), GlobalRandom(2)

    def draw(world):
        with world():
            return random.random(), np.random.random()

    random.seed(0)
    before = random.getstate()
    mixed = [draw(world) for world in (ours, theirs, ours, theirs)]
    assert random.getstate() == before
    alone = [[draw(world) for _ in range(2)] for world in (GlobalRandom(1), GlobalRandom(2))]
    assert [mixed[::2], mixed[1::2]] == alone


def test_global_generators_are_kept_apart_in_threads():
    def draws(seed):
        world, drawn = GlobalRandom(seed), []
        for _ in range(30):
            with world():
                drawn.append(random.random())
                threading.Event().wait(0)  # lets others go on
                drawn.append(random.random())
        return drawn

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draws, range(8))) == list(map(draws, range(8)))


# --- Gymnasium ------------------------------------------------------------------------------------------------------------


def test_gymnasiums_frozen_lake_is_ours():
    pytest.importorskip("gymnasium")
    for seed in range(20):
        ours = FrozenLake(board=HARD_ICE["desc"], turns=100)
        theirs = Gymnasium(id="FrozenLake-v1", options=HARD_ICE, words=WORDS)
        assert theirs.reset(seed)[0].startswith("Say one of Left, Down, Right, Up.\n\n[S]FFF\nFHFH")
        ours.reset(seed)
        policy = at_random(seed)
        ended = False
        while not ended:
            action = policy(ours)
            text, *wanted, info = ours.step(action)
            shown, *found, told = theirs.step(action)
            assert found == wanted
            assert told["effective"] == info["effective"] and told.get("success") == info.get("success")
            board = "".join(shown.split("\n")[1:])  # below the line with the last move
            assert board.index("[") == text.replace("\n", "").index("P")
            ended = wanted[1] or wanted[2]
        theirs.close()


def test_gymnasium_in_numbers():
    pytest.importorskip("gymnasium")
    pole = Gymnasium(id="CartPole-v1", format_penalty=0.5)
    text, info = pole.reset(3)
    assert text.startswith("Say one of 0, 1.\n\n[") and len(info["state_key"].strip("[]").split()) == 4
    assert pole.actions() == ("0", "1")
    refused = pole.step("2")
    assert refused == (info["state_key"], -0.5, False, False, {**info, "valid": False, "effective": False})
    assert pole.step("<answer>1</answer>")[1:4] == (1.0, False, False)
    assert follow(Gymnasium(id="CartPole-v1"), 5, ["1"] * 99) == follow(Gymnasium(id="CartPole-v1"), 5, ["1"] * 99)
    cards = Gymnasium(id="Blackjack-v1", words=["stick", "hit"], instructions="Come near 21.")
    assert cards.reset(0)[0].startswith("Come near 21.\n\n(")


def test_actions_that_gymnasium_masks_cannot_be_said():
    pytest.importorskip("gymnasium")
    taxi = Gymnasium(id="Taxi", words=["south", "north", "east", "west", "pickup", "dropoff"])
    taxi.reset(0)
    assert "dropoff" not in taxi.actions() and set(taxi.actions()) < {"south", "north", "east", "west", "pickup"}
    assert taxi.step("dropoff")[4]["valid"] is False
    assert taxi.step(taxi.actions()[0])[4]["valid"] is True


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"id": "FrozenLake-v99"}, "id"),
        ({"id": "FrozenLake-v1", "options": {"slipery": 1}}, "options"),
        ({"id": "FrozenLake-v1", "words": ["a", "b"]}, "words"),
        ({"id": "Pendulum-v1"}, "id"),
        ({"id": "FrozenLake-v1", "format_penalty": -1}, "format_penalty"),
    ],
)
def test_options_that_gymnasium_has_not(options, key):
    pytest.importorskip("gymnasium")
    with raises_with(OptionError, environment="gymnasium", key=key, value=options[key]):
        Gymnasium(**options)


def test_text_in_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")

    class Parrot(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(20)
        action_space = gymnasium.spaces.Text(5)

        def reset(self, *, seed=None, options=None):
            return "speak", {}

        def step(self, action):
            return f"you say {action}", float(action == "polly"), action == "polly", False, {}

    gymnasium.register("Parrot-v0", Parrot)
    try:
        parrot = Gymnasium(id="Parrot-v0")
        assert parrot.reset(0) == ("speak", {"state_key": "speak"}) and parrot.actions() == ()
        assert parrot.step("much too long")[4]["valid"] is False
        assert parrot.step("hi")[:4] == ("you say hi", 0.0, False, False)
        assert parrot.step("polly")[1:] == (
            1.0,
            True,
            False,
            {"state_key": "you say polly", "valid": True, "effective": True, "success": True},
        )
    finally:
        gymnasium.registry.pop("Parrot-v0")


# --- reasoning-gym --------------------------------------------------------------------------------------------------------


@pytest.mark.reasoning_gym
def test_a_problem_with_a_second_try():
    make = lambda: ReasoningGym(name="leg_counting", options={"max_animals": 3})  # noqa: E731
    assert success_rate(make, expert, 50) == 1.0
    world = make()
    question, info = world.reset(7)
    assert make().reset(7)[0] == question != make().reset(8)[0]
    observation, reward, terminated, truncated, after = world.step("no idea")
    assert (reward, terminated, truncated) == (0.0, False, False) and "Try again" in observation
    assert after["state_key"] != info["state_key"] and "success" not in after
    assert world.step(f"<answer>{world.expert()}</answer>")[1:3] == (1.0, True)
    with pytest.raises(RuntimeError, match="over"):
        world.step("4")


@pytest.mark.reasoning_gym
def test_the_last_answer_counts():
    steps = play(ReasoningGym(name="leg_counting", tries=3), 0, lambda world: "no idea")
    assert len(steps) == 3 and steps[-1][1] < 1.0 and steps[-1][4]["success"] is False


@pytest.mark.reasoning_gym
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "__import__('sys').modules.update(ran=1)"),  # the library's grader would evaluate it
        ("simple_integration", "__import__('sys').modules.update(ran=1)"),
        ("binary_matrix", "[__import__('sys').modules.update(ran=1)]"),
        ("gsm_symbolic", "-{right}"),  # the library's grader reads no sign
        ("prime_factorization", "no number"),  # the library's grader raises
    ],
)
def test_answers_that_the_graders_of_the_library_must_not_see(name, answer):
    world = ReasoningGym(name=name, tries=1)
    world.reset(0)
    _, reward, terminated, _, info = world.step(answer.format(right=world.expert() if "{" in answer else ""))
    assert (reward < 0.5, terminated, info["success"]) == (True, True, False) and "ran" not in sys.modules
    assert success_rate(lambda: ReasoningGym(name=name), expert, 2) == 1.0


@pytest.mark.reasoning_gym
@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"name": "leg_countng"}, "name"),
        ({"name": "leg_counting", "options": {"max_animal": 3}}, "options"),
        ({"name": "leg_counting", "options": {"max_animals": 0}}, "options"),
        ({"name": "leg_counting", "tries": 0}, "tries"),
    ],
)
def test_options_that_reasoning_gym_has_not(options, key):
    with raises_with(OptionError, environment="reasoning_gym", key=key, value=options[key]):
        ReasoningGym(**options)


# --- GEM ------------------------------------------------------------------------------------------------------------------


def test_gem():
    pytest.importorskip("gem", reason="gem-llm pins other versions than constraints.txt")
    make = lambda: Gem(id="game:GuessTheNumber-v0-easy")  # noqa: E731
    actions = [rf"\boxed{{{number}}}" for number in (5, 3, 8)]
    first = follow(make(), 3, actions)
    random.seed(0)
    before = random.getstate()
    assert follow(make(), 3, actions) == first and random.getstate() == before
    assert "1 and 10" in first[0][0] or "1 to 10" in first[0][0]
    won = [follow(make(), 3, [rf"\boxed{{{number}}}"])[-1] for number in range(1, 11)]
    assert sum(step[4].get("success", False) for step in won) == 1
    with raises_with(OptionError, environment="gem", key="id", value="game:Nothing"):
        Gem(id="game:Nothing")


def test_interleaved_gem_games_have_own_random_streams():
    pytest.importorskip("gem", reason="gem-llm pins other versions than constraints.txt")
    alone = [follow(Gem(id="game:Game2048-v0-easy"), seed, [r"\boxed{up}", r"\boxed{left}"] * 5) for seed in (1, 2)]
    worlds = [Gem(id="game:Game2048-v0-easy") for _ in range(2)]
    mixed = [[world.reset(seed)] for world, seed in zip(worlds, (1, 2), strict=True)]
    for turn in range(max(map(len, alone)) - 1):
        for world, said, wanted in zip(worlds, mixed, alone, strict=True):
            if turn + 1 < len(wanted):
                said.append(world.step([r"\boxed{up}", r"\boxed{left}"][turn % 2]))
    assert mixed == alone


# --- TextArena ------------------------------------------------------------------------------------------------------------


def test_textarena_alone():
    pytest.importorskip("textarena")
    make = lambda: TextArena(id="GuessTheNumber-v0")  # noqa: E731
    rates = [follow(make(), 4, [f"[{number}]"])[-1] for number in range(1, 21)]
    assert [step[1] for step in rates].count(1.0) == 1
    said = follow(make(), 4, ["[1]", "[20]", "[19]", "[2]"])
    assert said == follow(make(), 4, ["[1]", "[20]", "[19]", "[2]"])
    assert "Guess The Number" in said[0][0]
    assert all("Guess The Number" not in step[0] for step in said[1:])  # is not told again
    with raises_with(OptionError, environment="textarena", key="id", value="Nothing-v0"):
        TextArena(id="Nothing-v0")


def take_all(observation, random):
    """Wins at Nim when one pile is left."""
    piles = [line.split(":") for line in observation.split("\n") if line.strip().startswith("pile")][-2:]
    left = [(name.split()[-1], int(count)) for name, count in piles if int(count)]
    name, count = left[int(random.integers(len(left)))]
    return f"[{name} {count}]"


def test_textarena_against_an_opponent(monkeypatch):
    pytest.importorskip("textarena")
    module = types.ModuleType("opponents")
    module.take_all = take_all
    monkeypatch.setitem(sys.modules, "opponents", module)

    def make(seat=0):
        return TextArena(id="Nim-v0", options={"piles": [1, 2]}, players=2, seat=seat, opponent="opponents:take_all")

    first = make()
    first.reset(0)
    observation, _, over, *_ = first.step("[1 1]")
    assert not over and observation.count("Current Pile") == 2  # of which two are after the opponent's move
    said = follow(make(), 1, ["[0 1]"])
    assert said[-1][1:3] == (-1.0, True) and said[-1][4]["success"] is False  # the opponent takes the rest
    second = make(seat=1)
    text, _ = second.reset(2)
    left = "0" if "pile 0: 1" in text.split("Current Pile")[-1] else "1"
    assert second.step(f"[{left} {1 if left == '0' else 2}]")[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"players": 2}, "opponent", None),
        ({"opponent": "a:b"}, "opponent", "a:b"),
        ({"seat": 1}, "seat", 1),
        ({"state": "board"}, "state", "board"),
    ],
)
def test_options_that_textarena_has_not(options, key, value):
    pytest.importorskip("textarena")
    with raises_with(OptionError, environment="textarena", key=key, value=value):
        TextArena(id="Nim-v0", **options)


# --- OpenEnv --------------------------------------------------------------------------------------------------------------


@contextmanager
def openenv_server():
    """A server of OpenEnv's own, whose environment adds numbers up to 10."""
    pytest.importorskip("openenv", reason="openenv-core pins other versions than constraints.txt")
    from fastapi import FastAPI
    from openenv.core.env_server.http_server import HTTPEnvServer
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Add(Action):
        message: str

    class Total(Observation):
        total: int

    class Adding(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self._total = (seed or 0) % 3
            return Total(total=self._total, done=False, reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            self._total += int(action.message)
            return Total(total=self._total, done=self._total >= 10, reward=float(self._total == 10))

        @property
        def state(self):
            return State()

    app = FastAPI()
    HTTPEnvServer(Adding, Add, Total, max_concurrent_envs=8).register_routes(app)
    with served(app) as url:
        yield f"{url}/"


def test_openenv():
    async def episodes(url):
        ours = [OpenEnv(url=url, observation_field="total") for _ in range(2)]
        assert [(await world.reset(seed))[0] for world, seed in zip(ours, (1, 2), strict=True)] == ["1", "2"]
        assert (await ours[0].step("<answer>4</answer>"))[:4] == ("5", 0.0, False, False)
        assert (await ours[1].step("8"))[:3] == ("10", 1.0, True)
        observation, reward, over, _, info = await ours[0].step("9")
        assert (observation, reward, over, info["success"]) == ("14", 0.0, True, False)
        structured = OpenEnv(url=url, action_field=None, format_penalty=0.5)
        assert '"total": 0' in (await structured.reset(0))[0]
        assert (await structured.step("7"))[1] == -0.5
        assert (await structured.step('{"message": "10"}'))[1] == 1.0
        wrong = OpenEnv(url=url)
        await wrong.reset(0)
        with pytest.raises(RuntimeError, match="OpenEnv server at ws://"):
            await wrong.step("no number")
        missing = OpenEnv(url=url, observation_field="sum")
        with raises_with(OptionError, key="observation_field", value="sum") as caught:
            await missing.reset(0)
        assert "total" in caught.value.valid
        for world in (*ours, structured, wrong, missing):
            await world.close()

    with openenv_server() as url:
        asyncio.run(episodes(url))


def test_an_address_that_is_none():
    with raises_with(OptionError, environment="openenv", key="url", value="localhost"):
        OpenEnv(url="localhost")
