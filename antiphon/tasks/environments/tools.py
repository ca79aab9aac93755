"""A world of tools: the policy calls them, reads what they return, and ends with an answer.

Tools are Python functions, or all those of an MCP server. What a tool says of a wrong call is for the policy to read; a tool or
a server that breaks raises, and is never worth 0.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.registry import Registry
from antiphon.core.types import Prompt, ToolCall
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.actions import extract_answer
from antiphon.tasks.environments.bm25 import Index
from antiphon.tasks.environments.mcp_tools import get_server
from antiphon.tasks.environments.tool_problems import build_corpus
from antiphon.tasks.environments.toolbox import Tool, Toolbox, ToolError, render_result, render_tool_responses
from antiphon.tasks.tool_calls import TOOL_FORMATS, strip_thinking

TOOLS = Registry(
    "tool",
    {
        "calculator": "antiphon.tasks.environments.calculator:calculator",
        "search": "antiphon.tasks.environments.tools:search_tool",
    },
)

FOUND = 3  # documents that a search tells
TASK = (
    "{tools}\n\nYou are told what they return. When you know the answer, call nothing and write <answer>...</answer>."
)


class ToolUse:
    """Answers a prompt's question with tools, in at most so many turns.

    A response without a call is the answer and ends the episode. It is worth 1 if it is what the payload holds under `answer`,
    up to case and spaces, else 0; with `answer=None` nothing is judged here, and the task's reward has the last word.
    """

    def __init__(
        self,
        prompt: Prompt,
        tools: Sequence[str] = ("calculator", "search"),
        mcp: Sequence[str] = (),
        format: str = "hermes",
        turns: int = 8,
        answer: str | None = "answer",
        seconds: float = 30.0,
        output: int = 2000,
        format_penalty: float = 0.0,
    ) -> None:
        """`tools` are `calculator`, `search`, or package.module:attribute: an annotated function, or one that makes a tool
        when it is called with `prompt`. `mcp` is the command, with its arguments, of an MCP server; each of its tools may
        take `seconds`. Of a result so many characters of `output` are told. A response with a call that cannot be read
        costs `format_penalty`."""
        self._payload = prompt.payload if isinstance(prompt.payload, Mapping) else {}
        if turns < 1 or seconds <= 0 or output < 1:
            raise ConfigError(f"there is nothing to do with turns={turns}, seconds={seconds}, output={output}")
        if answer is not None and answer not in self._payload:
            raise DataError(
                f"prompt {prompt.id} has no {answer!r} to judge by; with answer: null the task's reward judges"
            )
        self._answer = None if answer is None else str(self._payload[answer])
        self._tools = [_tool(name, prompt) for name in tools]
        self._mcp, self._seconds = tuple(mcp), seconds
        self._format, self._output, self._penalty = TOOL_FORMATS.resolve(format), output, format_penalty
        self._question = " ".join(message.content for message in prompt.messages)
        self._left = turns
        self._box: Toolbox | None = None
        self._calls: list[ToolCall] = []
        self._last: list[str] = []  # results of the last calls

    async def reset(self, seed: int) -> Reset:
        """Begin; the seed changes nothing."""
        remote = await get_server(self._mcp).tools(self._seconds) if self._mcp else []
        self._box = Toolbox([*self._tools, *remote], self._format)
        return TASK.format(tools=self._box.describe()), self._info(valid=True, effective=True)

    async def step(self, action: str) -> Step:
        """Call tools, or answer."""
        box = self._begun()
        self._left -= 1
        content, calls, problems = box.format.parse(action)
        if problems:  # then nothing is called: the policy must know what was done and what was not
            return self._turn(" ".join(problems), -self._penalty, valid=False, effective=False)
        if not calls:
            return self._end(content)
        results = [await self._call(box, call) for call in calls]
        self._last = [text for text, _ in results]
        worked = any(worked for _, worked in results)
        return self._turn(
            render_tool_responses(self._last), 0.0, valid=all(worked for _, worked in results), effective=worked
        )

    def close(self) -> None:
        """Nothing is held: a server goes on for the next episode."""

    def actions(self) -> Sequence[str]:
        """Each word of the question and of the last results as the answer, and as what a tool is called with."""
        box = self._begun()
        words = sorted(set(re.findall(r"\w+", " ".join([self._question, *self._last]))))
        single = [tool for tool in box.tools.values() if _takes_a_text(tool)]
        calls = [
            ToolCall(tool.name, dict.fromkeys(tool.parameters["properties"], word)) for tool in single for word in words
        ]
        return [*(box.format.render("", [call]) for call in calls), *(f"<answer>{word}</answer>" for word in words)]

    def expert(self) -> str:
        """The next call of the payload's `plan`; the right answer when all are done."""
        box = self._begun()
        plan = [ToolCall(call["name"], call["arguments"]) for call in self._payload.get("plan", ())]
        following = next((call for call in plan if call not in self._calls), None)
        return box.format.render("", [following]) if following else f"<answer>{self._answer}</answer>"

    async def _call(self, box: Toolbox, call: ToolCall) -> tuple[str, bool]:
        """What the policy is told of a call, and whether it worked."""
        self._calls.append(call)
        try:
            result = box.call(call)
            text, worked = render_result(await result if inspect.isawaitable(result) else result), True
        except ToolError as error:
            text, worked = f"error: {error}", False
        more = len(text) - self._output
        return (f"{text[: self._output]}\n[{more} characters more]" if more > 0 else text), worked

    def _turn(self, observation: str, reward: float, *, valid: bool, effective: bool) -> Step:
        over = not self._left
        info = self._info(valid=valid, effective=effective) | ({"success": False} if over else {})
        return observation, reward, False, over, info

    def _end(self, content: str) -> Step:
        self._left = 0
        info = self._info(valid=True, effective=True)
        if self._answer is None:
            return "", 0.0, True, False, info
        right = _plain(extract_answer(strip_thinking(content))) == _plain(self._answer)
        return "", float(right), True, False, info | {"success": right}

    def _begun(self) -> Toolbox:
        if self._box is None or not self._left:
            raise RuntimeError("the episode is over, or was never begun: call reset first")
        return self._box

    def _info(self, *, valid: bool, effective: bool) -> dict[str, Any]:
        """The state is what was called so far: the same calls have the same results."""
        calls = json.dumps([(call.name, call.arguments) for call in self._calls], sort_keys=True)
        key = hashlib.blake2b(calls.encode(), digest_size=8).hexdigest()
        return {"state_key": key, "valid": valid, "effective": effective}


def search_tool(prompt: Prompt) -> Tool:
    """Searches the payload's `documents`, a list of texts; without them a corpus of made-up facts, drawn from its `corpus`."""
    payload = prompt.payload if isinstance(prompt.payload, Mapping) else {}
    if "documents" in payload:
        documents = [str(document) for document in payload["documents"]]
        index = Index(documents)
    else:
        documents, index = build_corpus(int(payload.get("corpus", 0)))

    def search(query: str) -> str:
        """Find documents that have words of the query."""
        found = [documents[number] for number in index.search(query, FOUND)]
        return "\n".join(f"[{rank}] {text}" for rank, text in enumerate(found, start=1)) or "nothing found"

    return Tool.of(search)


def _tool(name: str, prompt: Prompt) -> Tool:
    found: Callable[..., Any] = TOOLS.resolve(name)
    made = found(prompt) if "prompt" in inspect.signature(found).parameters else found
    return made if isinstance(made, Tool) else Tool.of(made)


def _takes_a_text(tool: Tool) -> bool:
    """Whether it has one parameter, and that is a text."""
    return [schema.get("type") for schema in tool.parameters.get("properties", {}).values()] == ["string"]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
