"""Customer service with tools, in the spirit of tau-bench (Yao et al., 2024), with its own shop and a scripted customer.

The reward is 1 if the database ends in the right state, the customer was told what the rules ask for, and no rule was broken;
else 0. What the customer is told counts once the order was looked up; a message that gives another reason for a refusal than
the case has takes back what was told before.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from antiphon.core.types import ToolCall
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig
from antiphon.tasks.environments.tools.toolbox import Tool, Toolbox, ToolError, render_result, render_tool_responses
from antiphon.tasks.tool_calls import TOOL_FORMATS, strip_thinking
from antiphon_envs.tool_user.cases import draw_case
from antiphon_envs.tool_user.customer import ScriptedCustomer, mentions_fact, mentions_other_reason
from antiphon_envs.tool_user.expert import END, QUESTIONS, Progress, next_action
from antiphon_envs.tool_user.shop import CHANGES, READS, RULES, Shop

TASK = """{rules}

{tools}

Text without a call is sent to the customer; text beside a call is not. When everything is settled, call end_conversation.

Customer: {greeting}"""


class ToolUser(BaseEnvironment):
    """A conversation with a customer of a shop; running out of turns earns 0. `info["violations"]` lists the broken rules."""

    class Config(EnvironmentConfig):
        """Options of `tool_user`."""

        format: str = "hermes"
        """Format of tool calls."""
        turns: int = Field(20, ge=1)
        """Turns after which the episode is truncated."""
        format_penalty: float = Field(0.0, ge=0)
        """Cost of a response with a call that cannot be parsed."""

    config: Config
    name: ClassVar[str] = "tool_user"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._format = TOOL_FORMATS.resolve(self.config.format)

    def reset(self, seed: int) -> Reset:
        """Begin a conversation; shop and customer depend on `seed` only."""
        self._case = case = draw_case(seed)
        self._turns_left = self.config.turns
        self._customer = ScriptedCustomer(case)
        self._progress = Progress()
        self._ended = False
        tools = [replace(tool, call=getattr(case.shop, tool.name)) for tool in _shop_tools()]
        self._toolbox = Toolbox([*tools, Tool.of(self.end_conversation)], self._format)
        task = TASK.format(rules=RULES, tools=self._toolbox.describe(), greeting=self._customer.greet())
        return task, self._info(valid=True, effective=True)

    def step(self, action: str) -> Step:
        """Call tools, or say something to the customer."""
        self._check_running()
        self._turns_left -= 1
        before = self._state_key()
        content, calls, problems = self._toolbox.format.parse(action)
        if problems:
            return self._end_turn(" ".join(problems), -self.config.format_penalty, valid=False, before=before)
        if not calls:
            return self._end_turn(f"Customer: {self._say(strip_thinking(content))}", 0.0, valid=True, before=before)
        results = [self._call(call) for call in calls if not self._ended]
        if self._ended:
            return self._end_episode()
        valid = all(success for _, success in results)
        return self._end_turn(render_tool_responses([text for text, _ in results]), 0.0, valid=valid, before=before)

    def end_conversation(self) -> str:
        """Say goodbye: the conversation is over."""
        self._ended = True
        return ""

    def actions(self) -> Sequence[str]:
        """Return all questions, statements about the orders seen, and calls with what is known."""
        self._check_running()
        case, progress = self._case, self._progress
        own = case.shop.orders_of(progress.customer)
        seen = {number: case.shop.orders[number] for number in own if number in progress.seen}
        messages = list(QUESTIONS.values())
        messages += [f"Order {number} is {order.status}, it came to {order.total()}." for number, order in seen.items()]
        messages += [f"I {case.request.action} order {number}. Do you confirm?" for number in seen]
        messages += [f"That cannot be done, order {number} is {order.status}." for number, order in seen.items()]
        calls = [ToolCall("find_customer", {"email": case.email})] if "email" in self._customer.asked else []
        calls += [ToolCall("get_order", {"order": number}) for number in own]
        calls += [case.request.change] if case.request.change and case.number in seen else []
        return [*messages, *(self._toolbox.format.render("", [call]) for call in (*calls, END))]

    def expert(self) -> str:
        """Return the next action of a script: ask, look up, have it confirmed, do it, tell, and end."""
        self._check_running()
        following = next_action(self._case, self._customer.asked, self._progress)
        return following if isinstance(following, str) else self._toolbox.format.render("", [following])

    def _say(self, message: str) -> str:
        """Return the customer's answer to a message."""
        facts, told = self._case.request.facts, self._progress.told
        if "cannot" in facts and mentions_other_reason(facts, message):
            told.clear()  # who lists all reasons has found out none; it can be put right
        elif self._case.number in self._progress.seen:  # of an order that was not looked up, it is a guess
            told.update(fact for fact in facts if mentions_fact(fact, message))
        answer = self._customer.answer(message)
        self._progress.confirmed = self._customer.agreed
        return answer

    def _call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool; return its result as the policy reads it, and True if the call succeeded."""
        progress = self._progress
        try:
            broken = self._broken_rule(call)
            result = self._toolbox.call(call)
        except ToolError as error:
            return f"error: {error}", False
        if broken:
            progress.violations.append(f"{call.name}: {broken}")
        if call.name == "find_customer":
            progress.customer = result["customer"]
        elif call.name in ("get_order", "find_variants"):
            progress.seen.update(map(str, call.arguments.values()))
        elif call.name in CHANGES:
            progress.confirmed = False
            progress.changes.append(call)
        return render_result(result), True

    def _broken_rule(self, call: ToolCall) -> str:
        """Return the rule that a call breaks; an empty string if none. `ToolError` if its arguments are wrong."""
        if call.name not in (*CHANGES, "get_order"):
            return ""
        shop, progress = self._case.shop, self._progress
        self._toolbox.tools[call.name].check(call.arguments)
        if shop.order(call.arguments["order"]).customer != progress.customer:
            return "rule 1"
        if call.name == "get_order":
            return ""
        return shop.broken_rule(call.name, call.arguments) or ("" if progress.confirmed else "rule 2")

    def _end_episode(self) -> Step:
        case, progress = self._case, self._progress
        success = case.shop == case.goal and progress.told >= set(case.request.facts) and not progress.violations
        self._turns_left = 0
        info = self._info(valid=True, effective=True) | {"success": success, "violations": tuple(progress.violations)}
        return "", float(success), True, False, info

    def _end_turn(self, observation: str, reward: float, *, valid: bool, before: str) -> Step:
        over = not self._turns_left
        info = self._info(valid=valid, effective=self._state_key() != before)
        if over:
            info |= {"success": False, "violations": tuple(self._progress.violations)}
        return observation, reward, False, over, info

    def _state_key(self) -> str:
        """Digest what was changed, asked, seen, told and broken."""
        progress, customer = self._progress, self._customer
        changes = [(call.name, call.arguments) for call in progress.changes]
        known = [sorted(each) for each in (customer.asked, progress.seen, progress.told)]
        flags = (progress.customer, progress.confirmed, customer.insists)
        state = (changes, known, flags, progress.violations)
        return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=8).hexdigest()

    def _info(self, *, valid: bool, effective: bool) -> dict[str, Any]:
        return {"state_key": self._state_key(), "valid": valid, "effective": effective}


@functools.cache
def _shop_tools() -> list[Tool]:
    """Return the tools of an empty shop, to be bound to another."""
    return [Tool.of(getattr(Shop(today=0), name)) for name in (*READS, *CHANGES)]
