"""Judge models behind an address: asked at a bounded rate, each question once, within the budget of a run."""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import msgspec

from antiphon.core.config import read_secret
from antiphon.core.errors import BudgetError, ConfigError, RecordError
from antiphon.core.types import Message
from antiphon.engines.chat_client import ChatRequestError, OpenAIChatClient
from antiphon.record.run_dir import write_json
from antiphon.tasks.base import UnreachableError
from antiphon.tasks.rewards.judge_options import remote_judge_key

MOST_REPLIES = 20_000  # that are kept
MILLION = 1e6


@dataclass(slots=True)
class JudgeUsage:
    """Counts of a judge's requests and tokens, and their cost."""

    requests: float = 0  # that were sent, retries included
    retries: float = 0
    cached: float = 0  # questions that were not sent, since an equal one was
    tokens: float = 0  # of questions and replies, as the server counts them
    cost: float = 0.0  # in the currency of the prices
    uncounted: float = 0  # replies of which the server did not say how many tokens they took

    def __add__(self, other: "JudgeUsage") -> "JudgeUsage":
        return JudgeUsage(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class RemoteJudge:
    """Asks a model behind an address that speaks OpenAI's chat protocol."""

    def __init__(
        self,
        address: str,
        model: str,
        key: str = "",
        attempts: int = 5,
        timeout: float = 60.0,
        settings: Mapping[str, Any] | None = None,
        *,
        requests_per_minute: float = 0.0,
        input_price: float = 0.0,
        output_price: float = 0.0,
        cache: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a client; nothing is sent yet.

        Args:
            address: Such as https://api.example.com/v1.
            model: Name of the model there.
            key: Name of the environment variable with the API key; empty for none.
            attempts: How often a request is tried.
            timeout: Seconds of one try.
            settings: Further fields of each request, such as temperature, which is 0 by default.
            requests_per_minute: Most questions that are sent in a minute, at even distances; 0 for no bound.
            input_price: Cost of a million tokens of questions.
            output_price: Cost of a million tokens of replies.
            cache: Answer a question that was asked before by the reply to it.
            check: Called before each request; what it raises is raised instead of asking.

        Raises:
            ConfigError: A number is negative.
        """
        numbers = {
            "requests_per_minute": requests_per_minute,
            "input_price": input_price,
            "output_price": output_price,
        }
        for name, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
                message = f"judge: {name} must be a number of at least 0, not {number!r}"
                raise ConfigError(message, key=f"reward_options.{name}", value=number)
        self._chat = OpenAIChatClient(
            address, model, read_secret(key) if key else "", attempts=attempts, timeout=timeout
        )
        self.name = f"{model} at {address}"
        self._settings = {"temperature": 0.0, **(settings or {})}
        self._pause = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next = 0.0  # earliest time of the next question
        self._prices = input_price, output_price
        self._cache = cache
        self._check = check
        self._replies: OrderedDict[bytes, str] = OrderedDict()
        self._open: dict[bytes, asyncio.Task[str]] = {}
        self._cached = 0
        self.close = self._chat.close

    @property
    def usage(self) -> JudgeUsage:
        """Counts of requests and tokens until now, and their cost."""
        sent, (price, reply_price) = self._chat.usage, self._prices
        return JudgeUsage(
            requests=sent.requests,
            retries=sent.retries,
            cached=self._cached,
            tokens=sent.input_tokens + sent.output_tokens,
            cost=(price * sent.input_tokens + reply_price * sent.output_tokens) / MILLION,
            uncounted=sent.uncounted,
        )

    async def __call__(self, messages: Sequence[Message]) -> str:
        """Return the model's reply.

        Raises:
            UnreachableError: It does not answer.
        """
        sent = [message.to_openai() for message in messages]
        if not self._cache:
            return await self._send(sent)
        key = hashlib.sha256(json.dumps(sent).encode()).digest()
        if (known := self._replies.get(key)) is not None:
            self._replies.move_to_end(key)
            self._cached += 1
            return known
        if (asking := self._open.get(key)) is None:
            asking = self._open[key] = asyncio.get_running_loop().create_task(self._send(sent), name="ask the judge")
            asking.add_done_callback(lambda done: self._keep(key, done))
        else:
            self._cached += 1
        return await asyncio.shield(asking)  # others may wait for the same reply

    def _keep(self, key: bytes, asked: asyncio.Task[str]) -> None:
        del self._open[key]
        if not asked.cancelled() and asked.exception() is None:
            self._replies[key] = asked.result()
            if len(self._replies) > MOST_REPLIES:
                self._replies.popitem(last=False)

    async def _send(self, sent: list[dict[str, str]]) -> str:
        self._check()
        now = asyncio.get_running_loop().time()
        self._next = max(self._next, now) + self._pause
        if (wait := self._next - self._pause - now) > 0:
            await asyncio.sleep(wait)
            self._check()
        try:
            return await self._chat(sent, **self._settings)
        except ChatRequestError as error:
            raise UnreachableError(f"the judge at {error}") from error


class RemoteJudges:
    """The remote judges of a run. Tasks and rollout workers with equal options share one, and all share a budget."""

    def __init__(self, options: Sequence[Mapping[str, Any]] = (), budget: float = 0.0) -> None:
        """Make the judges.

        Args:
            options: Options of each `RemoteJudge`; equal ones make one.
            budget: Cost at which nothing is asked any more; 0 for no bound.

        Raises:
            ConfigError: Options that no judge takes.
        """
        self._budget = budget
        self._before = JudgeUsage()
        self.judges = {remote_judge_key(each): self._make(each) for each in options}

    @property
    def usage(self) -> JudgeUsage:
        """Sum over all judges, with the usage of the run before it was resumed."""
        return sum((judge.usage for judge in self.judges.values()), self._before)

    def read_usage(self, path: Path) -> None:
        """Go on from what a run had asked, if it has a file of that; `RecordError` if that is damaged."""
        if not path.exists():
            return
        try:
            self._before = msgspec.json.decode(path.read_bytes(), type=JudgeUsage)
        except (OSError, msgspec.DecodeError) as error:
            raise RecordError(f"{path}: cannot be read as what judges have cost: {error}", path=path) from error

    def write_usage(self, path: Path) -> None:
        """Replace the file of what the run has asked, if there are judges."""
        if self.judges:
            write_json(path, asdict(self.usage))

    async def close(self) -> None:
        """Close all connections."""
        for judge in self.judges.values():
            await judge.close()

    def _make(self, options: Mapping[str, Any]) -> RemoteJudge:
        try:
            return RemoteJudge(**options, check=self._check_budget)
        except TypeError as error:
            raise ConfigError(f"judge: {error}", key="reward_options", value=dict(options)) from error

    def _check_budget(self) -> None:
        if not self._budget:
            return
        for judge in self.judges.values():
            if judge.usage.uncounted:
                raise BudgetError(f"the judge {judge.name} does not say how many tokens it used: no budget can be kept")
        if (cost := self.usage.cost) >= self._budget:
            message = f"judges have cost {cost:.6g} of grading.judge_budget {self._budget:g}: raise it and resume"
            raise BudgetError(message)
