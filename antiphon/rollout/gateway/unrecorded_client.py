"""The session of a client that uses a served model outside any attempt."""

import secrets
from dataclasses import replace
from typing import Any

from typing_extensions import override

from antiphon.core.rng import derive
from antiphon.core.types import GenerateRequest, IntArray, Sampling
from antiphon.rollout.gateway.chat import ChatRequest, Reply
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.sessions import PreparedRequest, Session

_MAX_SEED = 2**63 - 1


class UnrecordedClient(Session):
    """A client that samples with its own settings; nothing is recorded. It may send many requests at once."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self._name = f"guest-{secrets.token_hex(4)}"  # so that ids of requests are unique

    @override
    def sampling(self, chat: ChatRequest, room: int) -> Sampling:
        settings: dict[str, Any] = dict(chat.requested_sampling)
        settings["top_k"] = max(int(settings.get("top_k", 0)), 0)
        settings["seed"] = int(settings["seed"]) & _MAX_SEED if "seed" in settings else secrets.randbits(63)
        if settings.get("top_p") == 0:  # the most likely token alone
            settings |= {"top_p": 1.0, "temperature": 0.0}
        return Sampling(max_tokens=min(room, chat.max_tokens or room), stop=chat.stop, **settings)

    @override
    def request(self, prompt: IntArray, sampling: Sampling, choice: int) -> GenerateRequest:
        seeded = replace(sampling, seed=derive(sampling.seed, choice))
        return GenerateRequest(id=f"{self._name}/{next(self._numbers)}", tokens=prompt, sampling=seeded)

    @override
    def record(self, prepared: PreparedRequest, request: GenerateRequest, reply: Reply) -> None:
        """Do nothing."""
