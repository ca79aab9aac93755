"""A policy between a customer and a database, with rules for what it may do. In the spirit of tau-bench (Yao et al., 2024),
with a shop of our own and a customer who answers by a script.

The reward is 1 if in the end the database is as it should be, the customer was told what the rules ask for, and no rule was
broken on the way; else 0.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.core.types import ToolCall
from antiphon.tasks.environments.toolbox import Tool, Toolbox, ToolError, render_result, render_tool_responses
from antiphon.tasks.tool_calls import TOOL_FORMATS, strip_thinking
from antiphon_envs.tool_user.cases import TOPICS, Case, Customer, draw_case, mentions_fact
from antiphon_envs.tool_user.shop import CHANGES, READS, RULES, Shop

Step = tuple[str, float, bool, bool, dict[str, Any]]

TASK = """{rules}

{tools}

What you write without a call is said to the customer; beside a call it is not heard. When all is done and said, call
end_conversation.

Customer: {greeting}"""
END = ToolCall("end_conversation", {})


class ToolUser:
    """One conversation, which is over when the policy ends it, or after so many turns with a reward of 0.

    `info["violations"]` says at the end which rules were broken.
    """

    def __init__(self, format: str = "hermes", turns: int = 20, format_penalty: float = 0.0) -> None:
        """`format` is that of tool calls; a response with a call that cannot be read costs `format_penalty`."""
        if turns < 1:
            raise ConfigError(f"turns={turns}: a conversation has at least 1")
        self._format = TOOL_FORMATS.resolve(format)
        self._left, self._penalty = turns, format_penalty
        self._case: Case | None = None

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin; shop and customer depend on `seed` only."""
        self._case = case = draw_case(seed)
        self._shop = case.shop
        self._customer = Customer(case)
        self._identified = ""  # the customer who was found
        self._confirmed = False  # the next change
        self._ended = False
        self._seen: set[str] = set()  # orders and products that were looked at
        self._told: set[str] = set()  # facts
        self._changes: list[ToolCall] = []  # that were made
        self._violations: list[str] = []
        tools = [replace(tool, call=getattr(self._shop, tool.name)) for tool in _shop_tools()]
        self._box = Toolbox([*tools, Tool.of(self.end_conversation)], self._format)
        task = TASK.format(rules=RULES, tools=self._box.describe(), greeting=self._customer.greet())
        return task, self._info(valid=True, effective=True)

    def step(self, action: str) -> Step:
        """Call tools, or say something to the customer."""
        case = self._begun()
        self._left -= 1
        before = self._state_key()
        content, calls, problems = self._box.format.parse(action)
        if problems:
            return self._turn(" ".join(problems), -self._penalty, valid=False, before=before)
        if not calls:
            return self._turn(f"Customer: {self._say(case, strip_thinking(content))}", 0.0, valid=True, before=before)
        results = [self._call(case, call) for call in calls if not self._ended]
        if self._ended:
            return self._judge(case)
        valid = all(worked for _, worked in results)
        return self._turn(render_tool_responses([text for text, _ in results]), 0.0, valid=valid, before=before)

    def close(self) -> None:
        """Nothing is held."""

    def end_conversation(self) -> str:
        """Say goodbye: the conversation is over."""
        self._ended = True
        return ""

    def actions(self) -> Sequence[str]:
        """Questions, what is known of orders that were seen, and all calls with what was found."""
        case = self._begun()
        mine = [number for number, order in self._shop.orders.items() if order.customer == self._identified]
        seen = {number: self._shop.orders[number] for number in mine if number in self._seen}
        messages = [_question(topic) for topic in TOPICS]
        messages += [f"Order {number} is {order.status}, it came to {order.total()}." for number, order in seen.items()]
        messages += [f"I {case.wish.action} order {number}. Do you confirm?" for number in seen]
        messages += [f"That cannot be done, order {number} is {order.status}." for number, order in seen.items()]
        calls = [ToolCall("find_customer", {"email": case.email})] if "email" in self._customer.asked else []
        calls += [ToolCall("get_order", {"order": number}) for number in mine]
        calls += [case.wish.change] if case.wish.change and case.number in seen else []
        return [*messages, *(self._box.format.render("", [call]) for call in (*calls, END))]

    def expert(self) -> str:
        """Ask, look, have it confirmed, do it, tell, and end."""
        case = self._begun()
        following = self._expert(case)
        return following if isinstance(following, str) else self._box.format.render("", [following])

    def _expert(self, case: Case) -> str | ToolCall:
        """What to say or call."""
        wish = case.wish
        missing = [topic for topic in ("email", "order", *wish.answers) if topic not in self._customer.asked]
        if missing and (missing[0] == "email" or self._identified):
            return _question(missing[0])
        if not self._identified:
            return ToolCall("find_customer", {"email": case.email})
        if case.number not in self._seen:
            mine = [number for number, order in self._shop.orders.items() if order.customer == self._identified]
            known = case.number in case.answers["order"]
            number = case.number if known else next(each for each in mine if each not in self._seen)
            return ToolCall("get_order", {"order": number})
        if wish.product and wish.product not in self._seen:
            return ToolCall("find_variants", {"product": wish.product})
        if wish.change and self._shop != case.goal:
            asked = f"I {wish.action} it as you wish: order {case.number}. Do you confirm?"
            return wish.change if self._confirmed else asked
        if self._told < set(wish.facts):
            return f"About order {case.number}: {', '.join(wish.facts)}."
        return END

    def _say(self, case: Case, message: str) -> str:
        """The customer's answer."""
        self._told.update(fact for fact in case.wish.facts if mentions_fact(fact, message))
        answer = self._customer.answer(message)
        self._confirmed = self._customer.agreed
        return answer

    def _call(self, case: Case, call: ToolCall) -> tuple[str, bool]:
        """What the policy is told of a call, and whether it worked."""
        try:
            objection = self._objection(call)
            result = self._box.call(call)
        except ToolError as error:
            return f"error: {error}", False
        if objection:
            self._violations.append(f"{call.name}: {objection}")
        if call.name == "find_customer":
            self._identified = result["customer"]
        elif call.name in ("get_order", "find_variants"):
            self._seen.update(map(str, call.arguments.values()))
        elif call.name in CHANGES:
            self._confirmed = False
            self._changes.append(call)
        return render_result(result), True

    def _objection(self, call: ToolCall) -> str:
        """Which rule the call breaks; empty if none. `ToolError` if it cannot be called so at all."""
        if call.name not in (*CHANGES, "get_order"):
            return ""
        self._box.tools[call.name].check(call.arguments)
        if self._shop.order(call.arguments["order"]).customer != self._identified:
            return "rule 1"
        if call.name == "get_order":
            return ""
        return self._shop.objection(call.name, call.arguments) or ("" if self._confirmed else "rule 2")

    def _judge(self, case: Case) -> Step:
        right = self._shop == case.goal and self._told >= set(case.wish.facts) and not self._violations
        self._left = 0
        info = self._info(valid=True, effective=True) | {"success": right, "violations": tuple(self._violations)}
        return "", float(right), True, False, info

    def _turn(self, observation: str, reward: float, *, valid: bool, before: str) -> Step:
        over = not self._left
        info = self._info(valid=valid, effective=self._state_key() != before)
        if over:
            info |= {"success": False, "violations": tuple(self._violations)}
        return observation, reward, False, over, info

    def _begun(self) -> Case:
        if self._case is None or not self._left:
            raise RuntimeError("the conversation is over, or was never begun: call reset first")
        return self._case

    def _state_key(self) -> str:
        """Names what was changed, asked, seen, told and broken."""
        changes = [(call.name, call.arguments) for call in self._changes]
        known = [sorted(each) for each in (self._customer.asked, self._seen, self._told)]
        flags = (self._identified, self._confirmed, self._customer.insists)
        state = (changes, known, flags, self._violations)
        return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=8).hexdigest()

    def _info(self, *, valid: bool, effective: bool) -> dict[str, Any]:
        return {"state_key": self._state_key(), "valid": valid, "effective": effective}


@functools.cache
def _shop_tools() -> list[Tool]:
    """The tools, of a shop that is none."""
    return [Tool.of(getattr(Shop(today=0), name)) for name in (*READS, *CHANGES)]


def _question(topic: str) -> str:
    return {
        "email": "What is your email address?",
        "order": "What is your order number?",
        "reason": "What is the reason?",
        "address": "What is the new address?",
        "variant": "Which variant do you want?",
        "item": "Which item is it?",
    }[topic]
