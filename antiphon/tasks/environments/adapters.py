"""Environments of other libraries, by their names there. A library is imported when its environment is made, and not before.

What a library does not tell is not told: `info["valid"]` and `["effective"]` are there where they are known. An episode was a
success if its last reward is at least `success_reward`.
"""

import importlib
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from antiphon.core.errors import ConfigError
from antiphon.core.registry import import_path
from antiphon.core.rng import generator
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer, match_action
from antiphon.tasks.environments.options import require, require_number, require_whole

StateKey = Literal["observation", "history"]
Opponent = Callable[[str, np.random.Generator], str]

_SEEDS = 2**32  # numpy's legacy generator takes no larger ones
_HIGHLIGHTED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)


def _library(environment: str, module: str, package: str) -> Any:
    """The library of an environment; `ConfigError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ConfigError(
            f"environment {environment!r} needs the package {package}, and it is not installed: pip install {package}"
        ) from None


def _made(environment: str, name: str, options: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """What `make` makes; `ConfigError` if the library has no such environment, or it does not take the options."""
    try:
        return make()
    except Exception as error:  # the boundary at which what libraries say about options becomes one error
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"environment {environment!r} cannot make {name!r} with options {dict(options)}: {what}"
        ) from error


class GlobalRandom:
    """The global generators of Python and numpy as one environment sees them: libraries draw from these, though many
    environments take turns in one process, each in a thread. One that hangs keeps the others of its process waiting."""

    _one_at_a_time = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate(), np.random.RandomState(seed % _SEEDS).get_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Draw from this environment's own in the body."""
        with self._one_at_a_time:
            before = random.getstate(), np.random.get_state()
            self._set(self._state)
            try:
                yield
            finally:
                self._state = random.getstate(), np.random.get_state()
                self._set(before)

    @staticmethod
    def _set(state: Any) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])


class _Info:
    """Makes `info`. With `history` the state is all that was said so far: equal keys then mean equal states, whatever the
    environment does not show."""

    def __init__(self, environment: str, state: StateKey, success_reward: float) -> None:
        require(state in ("observation", "history"), environment, "state", state, "'observation' or 'history'")
        require_number(environment, "success_reward", success_reward, -sys.float_info.max)
        self._state, self._success_reward = state, success_reward
        self._said: list[str] = []

    def first(self, observation: str) -> dict[str, Any]:
        """Of a reset."""
        return {"state_key": self._key("", observation)}

    def after(self, action: str, observation: str, reward: float, over: bool, **known: bool) -> dict[str, Any]:
        """Of a step."""
        success = {"success": reward >= self._success_reward} if over else {}
        return {"state_key": self._key(action, observation), **known, **success}

    def _key(self, action: str, observation: str) -> str:
        if self._state == "observation":
            return observation
        self._said += [action, observation]
        return json.dumps(self._said)


class Gymnasium:
    """An environment of Gymnasium whose actions are numbers or text: a `Discrete` or a `Text` space.

    It is shown as it renders itself as text (`render_mode` ansi), or else by its observation in digits. Numbers can have
    `words`, in their order. The state is the observation. An action that cannot be read does nothing and costs
    `format_penalty`.
    """

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any] | None = None,
        words: Sequence[str] | None = None,
        instructions: str = "",
        format_penalty: float = 0.0,
        success_reward: float = 1.0,
    ) -> None:
        gymnasium = _library("gymnasium", "gymnasium", "gymnasium")
        asked = dict(options or {})
        require_number("gymnasium", "format_penalty", format_penalty, 0)
        self._info = _Info("gymnasium", "observation", success_reward)

        def make(**more: Any) -> Any:
            return _made("gymnasium", id, asked, lambda: gymnasium.make(id, disable_env_checker=True, **asked, **more))

        self._world = make()
        if "render_mode" not in asked and "ansi" in (self._world.metadata.get("render_modes") or ()):
            self._world.close()
            self._world = make(render_mode="ansi")
        space = self._world.action_space
        kind = type(space).__name__
        require(
            kind in ("Discrete", "Text"), "gymnasium", "id", id, f"one whose actions are Discrete or Text, not {kind}"
        )
        self._first = int(space.start) if kind == "Discrete" else 0
        self._words = self._named(words, int(space.n)) if kind == "Discrete" else None
        self._instructions, self._format_penalty = instructions, format_penalty
        self._allowed: Any = None
        self._shown, self._observation = "", ""

    def reset(self, seed: int) -> Reset:
        """Begin; the first observation says what can be said, or has `instructions` of one's own."""
        observation, info = self._world.reset(seed=seed)
        self._see(observation, info)
        choice = f"Say one of {', '.join(self._words)}." if self._words else ""
        text = "\n\n".join(filter(None, (self._instructions or choice, self._shown)))
        return text, self._info.first(self._observation)

    def step(self, action: str) -> Step:
        """Act."""
        act = self._read(extract_answer(action))
        if act is None:
            known = {"valid": False, "effective": False}
            worth = 0.0 - self._format_penalty
            return self._shown, worth, False, False, self._info.after(action, self._observation, worth, False, **known)
        before = self._observation
        observation, reward, terminated, truncated, info = self._world.step(act)
        self._see(observation, info)
        known = {"valid": True, "effective": self._observation != before}
        over = bool(terminated or truncated)
        told = self._info.after(action, self._observation, float(reward), over, **known)
        return self._shown, float(reward), bool(terminated), bool(truncated), told

    def close(self) -> None:
        """Close Gymnasium's."""
        self._world.close()

    def actions(self) -> Sequence[str]:
        """Words that are allowed now, by the environment's `action_mask` if it has one; none if any text is."""
        mask = self._allowed if self._allowed is not None else [True] * len(self._words or ())
        return tuple(word for word, allowed in zip(self._words or (), mask, strict=True) if allowed)

    def _named(self, words: Sequence[str] | None, count: int) -> tuple[str, ...]:
        named = tuple(words or (str(self._first + number) for number in range(count)))
        require(len(named) == len(set(named)) == count, "gymnasium", "words", words, f"{count} different words")
        return named

    def _read(self, action: str) -> Any:
        if self._words is None:
            return action if self._world.action_space.contains(action) else None
        word = match_action(action, self.actions())
        return None if word is None else self._first + self._words.index(word)

    def _see(self, observation: Any, info: Mapping[str, Any]) -> None:
        self._allowed = info.get("action_mask")
        text = (
            np.array2string(observation, threshold=sys.maxsize)
            if isinstance(observation, np.ndarray)
            else str(observation)
        )
        self._observation = text
        rendered = self._world.render() if self._world.render_mode == "ansi" else text
        # What is told by colour alone, such as where one stands, is told by brackets.
        self._shown = _HIGHLIGHTED.sub(r"[\1]", str(rendered)).strip("\n")


class Gem:
    """An environment of GEM (gem-llm): `gem.make(id, **options)`. It reads actions its own way, mostly from a box."""

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any] | None = None,
        state: StateKey = "history",
        success_reward: float = 1.0,
    ) -> None:
        _library("gem", "gem", "gem-llm")
        importlib.import_module("gem.envs")  # registers them
        gem, asked = importlib.import_module("gem"), dict(options or {})
        self._info = _Info("gem", state, success_reward)
        self._random = GlobalRandom(0)
        with self._random():
            self._world = _made("gem", id, asked, lambda: gem.make(id, **asked))

    def reset(self, seed: int) -> Reset:
        """Begin."""
        self._random = GlobalRandom(seed)
        with self._random():
            observation, info = self._world.reset(seed=seed % _SEEDS)
        text = self._text(observation, info)
        return text, self._info.first(text)

    def step(self, action: str) -> Step:
        """Act."""
        with self._random():
            observation, reward, terminated, truncated, info = self._world.step(action)
        text, over = self._text(observation, info), bool(terminated or truncated)
        told = self._info.after(action, text, float(reward), over)
        return text, float(reward), bool(terminated), bool(truncated), told

    def close(self) -> None:
        """Close GEM's, if that can be."""
        getattr(self._world, "close", bool)()

    @staticmethod
    def _text(observation: Any, info: Mapping[str, Any]) -> str:
        return "\n".join(str(part) for part in (observation, info.get("suffix")) if part)


class TextArena:
    """A game of TextArena. With several `players` the policy has `seat`, and `opponent` all others: a function of yours, as
    `package.module:function`, from the observation and a random generator to an action.

    The reward is what the game gives to the seat, at its end. Of observations that repeat what was said, only the rest is told.
    """

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any] | None = None,
        players: int = 1,
        seat: int = 0,
        opponent: str | None = None,
        state: StateKey = "history",
        success_reward: float = 1.0,
    ) -> None:
        textarena, asked = _library("textarena", "textarena", "textarena"), dict(options or {})
        require_whole("textarena", "players", players, 1)
        require_whole("textarena", "seat", seat, 0, players - 1)
        valid = "package.module:function" if players > 1 else "left out: there is one player"
        require((opponent is not None) == (players > 1), "textarena", "opponent", opponent, valid)
        self._opponent: Opponent | None = None if opponent is None else import_path(opponent, "opponent")
        self._info = _Info("textarena", state, success_reward)
        self._players, self._seat = players, seat
        self._random, self._chance = GlobalRandom(0), generator(0)
        with self._random():
            self._world = _made("textarena", id, asked, lambda: textarena.make(id, **asked))
        self._seen = ""

    def reset(self, seed: int) -> Reset:
        """Begin; opponents whose turn comes first have had it."""
        self._random, self._chance = GlobalRandom(seed), generator(seed, "textarena", "opponent")
        with self._random():
            self._world.reset(num_players=self._players, seed=seed % _SEEDS)
            _, text = self._until_our_turn()
        return text, self._info.first(text)

    def step(self, action: str) -> Step:
        """Act, and let opponents act until it is the policy's turn again."""
        with self._random():
            over, _ = self._world.step(action)
            over, text = (True, "") if over else self._until_our_turn()
            reward = 0.0
            if over:
                rewards, about = self._world.close()
                reward, text = float((rewards or {}).get(self._seat, 0.0)), str(about[self._seat].get("reason") or "")
        return text, reward, over, False, self._info.after(action, text, reward, over)

    def close(self) -> None:
        """Nothing is held."""

    def _until_our_turn(self) -> tuple[bool, str]:
        """Whether the game is over, and what there is to see."""
        while True:
            player, observation = self._world.get_observation()
            text = (
                observation if isinstance(observation, str) else "\n".join(str(message[1]) for message in observation)
            )
            if player == self._seat or self._opponent is None:
                fresh = text[len(self._seen) :] if text.startswith(self._seen) else text
                self._seen = text
                return False, fresh.strip()
            if self._world.step(self._opponent(text, self._chance))[0]:
                return True, ""


class OpenEnv:
    """An environment of a running OpenEnv server at `url`, over its WebSocket, for that alone keeps an episode (its
    `/reset` and `/step` make a new environment each).

    What the policy says goes into `action_field` of the action, or is the action itself, a JSON object, if that is None.
    Of observations `observation_field` is shown, or all of it as JSON. What the server calls an error fails the attempt.
    """

    def __init__(
        self,
        url: str,
        action_field: str | None = "message",
        observation_field: str | None = None,
        reset_options: Mapping[str, Any] | None = None,
        format_penalty: float = 0.0,
        state: StateKey = "history",
        success_reward: float = 1.0,
    ) -> None:
        found = re.fullmatch(r"(?:http|ws)(s?)://(.+?)/*", url)
        require(found is not None, "openenv", "url", url, "of the form http://host:port")
        require_number("openenv", "format_penalty", format_penalty, 0)
        self._client = _library("openenv", "websockets.asyncio.client", "websockets")
        self._url = f"ws{found[1]}://{found[2]}/ws" if found else ""
        self._action_field, self._observation_field = action_field, observation_field
        self._reset_options, self._format_penalty = dict(reset_options or {}), format_penalty
        self._info = _Info("openenv", state, success_reward)
        self._socket: Any = None
        self._shown = ""

    async def reset(self, seed: int) -> Reset:
        """Begin an episode on a connection of its own."""
        self._socket = await self._client.connect(self._url, max_size=None)
        await self._ask("reset", {"seed": seed % _SEEDS, **self._reset_options})
        return self._shown, self._info.first(self._shown)

    async def step(self, action: str) -> Step:
        """Act; what should be JSON and is not is not sent."""
        act = (
            {self._action_field: extract_answer(action)} if self._action_field else _json_object(extract_answer(action))
        )
        if act is None:
            worth = 0.0 - self._format_penalty
            return self._shown, worth, False, False, self._info.after(action, self._shown, worth, False, valid=False)
        result = await self._ask("step", act)
        reward, over = float(result.get("reward") or 0.0), bool(result.get("done"))
        return self._shown, reward, over, False, self._info.after(action, self._shown, reward, over)

    async def close(self) -> None:
        """End the connection, and the episode with it."""
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        result: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            raise RuntimeError(f"the OpenEnv server at {self._url} says: {result.get('message', result)}")
        self._shown = self._text(result.get("observation"))
        return result

    def _text(self, observation: Any) -> str:
        if self._observation_field is None:
            return observation if isinstance(observation, str) else json.dumps(observation, sort_keys=True)
        if not isinstance(observation, dict) or self._observation_field not in observation:
            fields = ", ".join(observation) if isinstance(observation, dict) else repr(observation)
            raise ConfigError(f"environment 'openenv': no observation_field {self._observation_field!r} in: {fields}")
        return str(observation[self._observation_field])


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class ReasoningGym:
    """A problem of the reasoning-gym dataset `name`, with `tries` to answer it. Every answer but the last is told whether it is
    right; the score of the last, from 0 to 1, is the reward."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None, tries: int = 2) -> None:
        self._gym, asked = _library("reasoning_gym", "reasoning_gym", "reasoning-gym"), dict(options or {})
        require_whole("reasoning_gym", "tries", tries, 1)
        self._name, self._options, self._left = name, asked, tries
        self._dataset = self._problems(0)
        self._entry: dict[str, Any] | None = None
        self._answers: list[str] = []

    def reset(self, seed: int) -> Reset:
        """Begin; the problem depends on `seed` only."""
        self._dataset = self._problems(seed % _SEEDS)
        self._entry = self._dataset[0]
        return self._entry["question"], {"state_key": self._key(), "valid": True, "effective": False}

    def step(self, action: str) -> Step:
        """Answer."""
        entry = self._playing()
        answer = extract_answer(action)
        score = float(self._dataset.score_answer(answer, entry))
        self._answers.append(answer)
        self._left -= 1
        right, over = score >= 1.0, score >= 1.0 or not self._left
        info = {"state_key": self._key(), "valid": True, "effective": True}
        if not over:
            return "That is not right. Try again.", 0.0, False, False, info
        self._left = 0
        return "right" if right else "wrong", score, True, False, {**info, "success": right}

    def close(self) -> None:
        """Nothing is held."""

    def expert(self) -> str:
        """The stored answer; `RuntimeError` for the few datasets that store none."""
        answer = self._playing()["answer"]
        if answer is None:
            raise RuntimeError(f"the reasoning-gym dataset {self._name!r} stores no answers")
        return str(answer)

    def _playing(self) -> dict[str, Any]:
        if self._entry is None or not self._left:
            raise RuntimeError("the episode is over, or was never begun: call reset first")
        return self._entry

    def _problems(self, seed: int) -> Any:
        def make() -> Any:
            return self._gym.create_dataset(self._name, seed=seed, size=1, **self._options)

        return _made("reasoning_gym", self._name, self._options, make)

    def _key(self) -> str:
        assert self._entry is not None
        return json.dumps([self._entry["question"], *self._answers])
