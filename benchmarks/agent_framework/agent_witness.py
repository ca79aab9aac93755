"""The recipe's agent, writing down what the framework got from its model: `agent: {function: agent_witness:agent}`.

Lines of `agent.jsonl` in the folder that EXACTNESS names, one a run of the agent: the prompt, and of each turn what was asked
and what was replied, as the framework's own hooks tell of it.
"""

import json
import os
from pathlib import Path
from typing import Any

from agent import agent as play  # the recipe's
from agents import ModelResponse, RunHooks

from antiphon.core.types import Prompt


class Heard(RunHooks[Any]):
    """The conversations that were sent, and the replies: what was said, and the tools that were to be called."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []
        self.replies: list[tuple[str, list[tuple[str, Any]]]] = []

    async def on_llm_start(self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]) -> None:
        """The framework asks."""
        self.asked.append(list(input_items))

    async def on_llm_end(self, context: Any, agent: Any, response: ModelResponse) -> None:
        """The framework has got a reply."""
        said = [part.text for item in response.output if item.type == "message" for part in item.content]
        calls = [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]
        self.replies.append(("".join(said), calls))


async def agent(base_url: str, api_key: str, prompt: Prompt) -> str:
    """See the recipe."""
    heard = Heard()
    try:
        return str(await play(base_url, api_key, prompt, heard))
    finally:
        with Path(os.environ["EXACTNESS"], "agent.jsonl").open("a") as file:
            file.write(json.dumps({"prompt": prompt.id, "asked": heard.asked, "replies": heard.replies}) + "\n")
