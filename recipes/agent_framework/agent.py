"""An agent of OpenAI's Agents SDK with a calculator, as one would write it for any model."""

from functools import cache

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from antiphon.tasks.environments.tools import calculator as arithmetic

set_tracing_disabled(True)  # it would be sent away


@function_tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return arithmetic.calculator(expression)


@cache
def client(base_url):
    return AsyncOpenAI(base_url=base_url, api_key="that of the attempt")


async def agent(base_url, api_key, prompt, hooks=None):
    policy = OpenAIChatCompletionsModel("policy", client(base_url).with_options(api_key=api_key))
    solver = Agent("solver", model=policy, tools=[calculator])
    try:
        return (await Runner.run(solver, prompt.messages[-1].content, max_turns=4, hooks=hooks)).final_output
    except AgentsException:  # a tool that does not exist, too many turns: the policy's doing, so it is worth 0
        return ""
