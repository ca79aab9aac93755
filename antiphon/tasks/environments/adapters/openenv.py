"""Adapter to servers of OpenEnv."""

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.adapters.base import Adapter, AdapterConfig
from antiphon.tasks.environments.adapters.global_random import SEEDS
from antiphon.tasks.environments.base import OptionError, require

_URL = re.compile(r"(?:http|ws)(s?)://(.+?)/*\Z")


class OpenEnv(Adapter):
    """An environment of a running OpenEnv server, over its WebSocket: its HTTP endpoints make a new environment each call.

    An error that the server returns fails the attempt.
    """

    class Config(AdapterConfig):
        """Options of `openenv`."""

        url: str
        """Address of the server."""
        action_field: str | None = "message"
        """Field of the action that holds the response; None if the response is the whole action, a JSON object."""
        observation_field: str | None = None
        """Field of the observation that the policy sees; None shows all of it as JSON."""
        reset_options: Mapping[str, Any] = {}
        """Passed to the server's `reset`."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of a response that should be JSON and is not; it is not sent."""

        @field_validator("url")
        @classmethod
        def _check_url(cls, url: str) -> str:
            require(_URL.fullmatch(url) is not None, "url", url, "of the form http://host:port")
            return url

    config: Config
    name: ClassVar[str] = "openenv"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._client = self._import("websockets.asyncio.client", "websockets")
        self._url = _URL.sub(r"ws\1://\2/ws", self.config.url)
        self._socket: Any = None
        self._shown = ""

    async def reset(self, seed: int) -> Reset:
        """Begin an episode on a connection of its own."""
        self._socket = await self._client.connect(self._url, max_size=None)
        await self._ask("reset", {"seed": seed % SEEDS, **self.config.reset_options})
        return self._shown, self._reset_info(self._shown)

    async def step(self, action: str) -> Step:
        """Send an action to the server."""
        answer, field = extract_answer(action), self.config.action_field
        sent = {field: answer} if field else _json_object(answer)
        if sent is None:
            reward = 0.0 - self.config.format_penalty
            return self._shown, reward, False, False, self._step_info(action, self._shown, reward, False, valid=False)
        result = await self._ask("step", sent)
        reward, over = float(result.get("reward") or 0.0), bool(result.get("done"))
        return self._shown, reward, over, False, self._step_info(action, self._shown, reward, over)

    async def close(self) -> None:
        """Close the connection, which ends the episode."""
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
        field = self.config.observation_field
        if field is None:
            return observation if isinstance(observation, str) else json.dumps(observation, sort_keys=True)
        if not isinstance(observation, dict) or field not in observation:
            valid = list(observation) if isinstance(observation, dict) else []
            fields = ", ".join(valid) or repr(observation)
            message = f"environment {self.name!r}: no observation_field {field!r} in: {fields}"
            raise OptionError(message, environment=self.name, key="observation_field", value=field, valid=valid)
        return str(observation[field])


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
