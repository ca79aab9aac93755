"""The policy as an environment of Atropos sees it: completions for one group, each of them sampled as one of its attempts.

A request goes to an attempt as follows. What `collect_trajectory` asks belongs to the attempt of that trajectory. Otherwise a
conversation, or a text, that continues one of an attempt goes on as this attempt, and a new one with `n` choices takes `n`
attempts that have not begun.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.errors import UnsupportedError
from antiphon.core.optional_packages import import_optional
from antiphon.rollout.gateway.server import Answer

Ask = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]  # `Gateway.answer`
ENVIRONMENT_KEY = "tasks.agent.atropos"
MASKED, NO_LOGPROB = -100, 1.0  # Atropos' marks of tokens that were not sampled
_IGNORED = ("split", "skip_reasoning", "extra_body", "timeout", "model")  # settings of Atropos' own clients


def refuse(what: str) -> UnsupportedError:
    """Return the error for an environment that does what cannot be trained on."""
    return UnsupportedError(f"the environment of Atropos {what}", key=ENVIRONMENT_KEY)


@dataclass(slots=True, eq=False, kw_only=True)
class Reply:
    """One sampled reply: to a conversation, or to a text."""

    tokens: tuple[int, ...]
    """All tokens, from the first of the prompt to the last of the reply."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation, which the reply ends."""
    text: str = ""
    """The text, which the reply ends."""
    continued: int = 0
    """Number of requests that continue it."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt of the group."""

    key: str
    begun: bool = False
    replies: list[Reply] = field(default_factory=list)


class PolicyGroup:
    """The attempts of one group, to which an environment's requests are divided."""

    def __init__(self, keys: Sequence[str], ask: Ask) -> None:
        """Create a group of attempts with these keys of the gateway, which `ask` asks."""
        self.attempts = [Attempt(key) for key in keys]
        self.refusal: UnsupportedError | None = None
        """The first request that was refused: an environment may hide the error that it got."""
        self._ask = ask

    def refuse(self, what: str) -> UnsupportedError:
        """Note and return the error for a request that cannot be answered."""
        self.refusal = self.refusal or refuse(what)
        return self.refusal

    def begin(self, count: int) -> list[Attempt]:
        """Return attempts that have not begun, and begin them; `UnsupportedError` if there are too few."""
        fresh = [attempt for attempt in self.attempts if not attempt.begun]
        if len(fresh) < count:
            raise self.refuse(
                f"begins more conversations than the {len(self.attempts)} attempts of its group (rollout.group_size)"
            )
        for attempt in fresh[:count]:
            attempt.begun = True
        return fresh[:count]

    async def chat(self, request: Mapping[str, Any]) -> tuple[Any, list[Answer]]:
        """Answer a request for chat completions; return the completion of OpenAI's package, and the answers it comes from."""
        messages = [_as_mapping(message) for message in request["messages"]]
        texts = [_text_of(message) for message in messages]
        known = self._find_continued(
            lambda reply: bool(reply.messages) and texts[: len(reply.messages)] == [*map(_text_of, reply.messages)]
        )
        choices, answers = await self._answer(
            {**request, "messages": messages},
            known,
            lambda choice, tokens: Reply(tokens=tokens, messages=[*messages, choice["message"]]),
        )
        types = import_optional("openai.types.chat", ENVIRONMENT_KEY, "atroposlib")
        return types.ChatCompletion.model_validate({**answers[0].response, "choices": choices}), answers

    async def complete(self, request: Mapping[str, Any], tokenizer: Any) -> tuple[Any, list[Answer]]:
        """Answer a request to complete a text as `chat` does; a text that begins with a known one goes on from its tokens."""
        prompt = request["prompt"]
        if not isinstance(prompt, str):
            raise self.refuse("completes several texts in one request; a group has one")
        known = self._find_continued(lambda reply: bool(reply.text) and prompt.startswith(reply.text))
        choices, answers = await self._answer(
            {**request, "prompt": _encode_text(tokenizer, prompt, known[1] if known else None)},
            known,
            lambda choice, tokens: Reply(tokens=tokens, text=prompt + choice["text"]),
        )
        types = import_optional("openai.types", ENVIRONMENT_KEY, "atroposlib")
        return types.Completion.model_validate({**answers[0].response, "choices": choices}), answers

    async def _answer(
        self,
        request: Mapping[str, Any],
        known: tuple[Attempt, Reply] | None,
        note: Callable[[Mapping[str, Any], tuple[int, ...]], Reply],
    ) -> tuple[list[dict[str, Any]], list[Answer]]:
        """Have attempts answer a request, and note their replies.

        Args:
            request: The request of the environment.
            known: The attempt whose reply it continues, and the reply.
            note: Makes a reply of a choice and all its tokens.

        Returns:
            The choices of all answers, and the answers.
        """
        count = request.get("n") or 1
        body = {key: value for key, value in request.items() if key not in _IGNORED}
        attempt = TRAJECTORY.get() or (known[0] if known else None)
        if known:
            known[1].continued += 1
        asked = [(attempt, count)] if attempt else [(each, 1) for each in self.begin(count)]
        answers = await asyncio.gather(*(self._ask(each.key, {**body, "n": n}) for each, n in asked))
        choices: list[dict[str, Any]] = []
        for (each, _), answer in zip(asked, answers, strict=True):
            for choice, (tokens, _) in zip(answer.response["choices"], answer.replies, strict=True):
                each.replies.append(note(choice, (*answer.prompt.tolist(), *tokens.tolist())))
                choices.append({**choice, "index": len(choices)})
        return choices, answers

    def _find_continued(self, is_continued: Callable[[Reply], bool]) -> tuple[Attempt, Reply] | None:
        """Return the attempt and its reply that a request continues, the longest and least continued; None if there is none."""
        own = TRAJECTORY.get()
        found = [
            (attempt, reply)
            for attempt in ([own] if own else self.attempts)
            for reply in attempt.replies
            if is_continued(reply)
        ]
        return min(
            found, key=lambda each: (-len(each[1].messages), -len(each[1].text), each[1].continued), default=None
        )


GROUP: ContextVar[PolicyGroup] = ContextVar("group")
"""The group whose trajectories the current task collects."""
TRAJECTORY: ContextVar[Attempt | None] = ContextVar("trajectory", default=None)
"""The attempt whose trajectory the current task collects."""


class PolicyServer:
    """Stands in the place of an environment's `ServerManager`."""

    def __init__(self, servers: Sequence[Any], tokenizer: Any) -> None:
        """Create a server.

        Args:
            servers: Those of the environment's own manager, from which it may read a configuration.
            tokenizer: The environment's tokenizer.
        """
        self.servers = servers
        self._tokenizer = tokenizer

    async def chat_completion(self, **request: Any) -> Any:
        """Return chat completions of the policy."""
        return (await self._group().chat(request))[0]

    async def completion(self, **request: Any) -> Any:
        """Return completions of a text by the policy."""
        return (await self._group().complete(request, self._tokenizer))[0]

    async def get_logprobs(self, **request: Any) -> Any:
        """Refuse to compute the log-probs of a text."""
        raise self._group().refuse("asks for the log-probs of a text")

    async def tokens_and_logprobs_completion(self, **request: Any) -> Any:
        """Refuse the request of Atropos' own managed server."""
        raise self._group().refuse(
            "completes a text by tokens_and_logprobs_completion; managed_server() has its tokens"
        )

    @asynccontextmanager
    async def dedicated_server(self) -> Any:
        """Yield the server itself."""
        yield self

    @asynccontextmanager
    async def managed_server(self, **options: Any) -> Any:
        """Yield a server that keeps the sequences of its completions."""
        yield ManagedPolicy(self._group(), self._tokenizer)

    def _group(self) -> PolicyGroup:
        if (group := GROUP.get(None)) is None:
            raise refuse("asks the policy outside of collect_trajectories")
        return group


class ManagedPolicy:
    """Stands in the place of Atropos' `ManagedServer`; its nodes are the sequences that the engines sampled."""

    def __init__(self, group: PolicyGroup, tokenizer: Any) -> None:
        self._group = group
        self._tokenizer = tokenizer
        self._nodes: list[Any] = []

    async def chat_completion(self, **request: Any) -> Any:
        """Return chat completions of the policy, and keep their sequences."""
        return self._keep(*await self._group.chat(request))

    async def completion(self, **request: Any) -> Any:
        """Return completions of a text by the policy, and keep their sequences."""
        return self._keep(*await self._group.complete(request, self._tokenizer))

    async def get_logprobs(self, **request: Any) -> Any:
        """Refuse to compute the log-probs of a text."""
        raise self._group.refuse("asks for the log-probs of a text")

    def get_state(self) -> dict[str, Any]:
        """Return the sequences as `nodes`, in the order of their choices."""
        return {"nodes": list(self._nodes)}

    def reset(self) -> None:
        """Forget the sequences."""
        self._nodes.clear()

    def _keep(self, completion: Any, answers: Sequence[Answer]) -> Any:
        """Keep the sequences of a completion in the place of those that they continue; return the completion."""
        choices = iter(completion.choices)
        for answer in answers:
            prompt = answer.prompt.tolist()
            before = next((node for node in self._nodes if prompt[: len(node.tokens)] == node.tokens), None)
            for tokens, logprobs in answer.replies:
                node = self._make_node(before, prompt, tokens.tolist(), logprobs.tolist(), next(choices).finish_reason)
                if before in self._nodes:
                    self._nodes[self._nodes.index(before)] = node
                else:
                    self._nodes.append(node)
        return completion

    def _make_node(self, before: Any, prompt: list[int], tokens: list[int], logprobs: list[float], finish: str) -> Any:
        """Return a node of a prompt and its reply; `before` is the node that the prompt continues, if there is one."""
        module = import_optional("atroposlib.envs.server_handling.managed_server", ENVIRONMENT_KEY, "atroposlib")
        added = len(prompt) - (len(before.tokens) if before else 0)
        return module.SequenceNode(
            full_text=self._tokenizer.decode(prompt + tokens),
            tokens=prompt + tokens,
            masked_tokens=[*(before.masked_tokens if before else []), *[MASKED] * added, *tokens],
            logprobs=[*(before.logprobs if before else []), *[NO_LOGPROB] * added, *logprobs],
            metadata={"finish_reason": finish},
        )


def _encode_text(tokenizer: Any, prompt: str, known: Reply | None) -> list[int]:
    """Return the tokens of a text, which go on from those of the reply that it continues.

    As Atropos' clients do, they leave one of two marks of the beginning: a chat template writes one, and the tokenizer another.
    The mark of an end that was sampled is not repeated, either.
    """
    if known is None:
        tokens: list[int] = tokenizer.encode(prompt)
        return tokens[1:] if len(tokens) > 1 and tokens[0] == tokens[1] == tokenizer.bos_token_id else tokens
    rest: list[int] = tokenizer.encode(prompt[len(known.text) :], add_special_tokens=False)
    repeated = rest[:1] == [known.tokens[-1]] == [tokenizer.eos_token_id]
    return [*known.tokens, *(rest[1:] if repeated else rest)]


def _as_mapping(message: Any) -> Mapping[str, Any]:
    """Return a message, which may be an object of OpenAI's package, as a mapping."""
    return dict(message) if isinstance(message, Mapping) else message.model_dump(exclude_none=True)


def _text_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the role and the content of a message; clients strip what they got."""
    return str(message.get("role")), str(message.get("content") or "").strip()
