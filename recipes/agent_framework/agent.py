"""An agent of OpenAI's Agents SDK with a calculator, as one would write it for any model."""

from functools import cache

from antiphon.core.optional_packages import import_optional
from antiphon.tasks.environments.tools import calculator as arithmetic

agents = import_optional("agents", "the recipe agent_framework", "openai-agents")
agents.set_tracing_disabled(True)  # it would be sent away


@agents.function_tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return arithmetic.calculator(expression)


@cache
def client(base_url):
    return agents.AsyncOpenAI(base_url=base_url, api_key="that of the attempt")


async def agent(base_url, api_key, prompt, hooks=None):
    policy = agents.OpenAIChatCompletionsModel("policy", client(base_url).with_options(api_key=api_key))
    solver = agents.Agent("solver", model=policy, tools=[calculator])
    try:
        return (await agents.Runner.run(solver, prompt.messages[-1].content, max_turns=4, hooks=hooks)).final_output
    except agents.AgentsException:  # a tool that does not exist, too many turns: the policy's doing, so it is worth 0
        return ""
