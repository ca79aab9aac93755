"""A policy between a customer and a database."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.types import ToolCall
from antiphon.tasks.environments import environment_factory, required_options
from antiphon_envs.tool_user.cases import KINDS, draw_case
from antiphon_envs.tool_user.customer import mentions_fact
from antiphon_envs.tool_user.environment import ToolUser
from antiphon_envs.tool_user.shop import REASONS, RETURN_DAYS
from tests.unit.tasks.worlds import check_option_error

SEEDS = range(150)
CASES = {seed: draw_case(seed) for seed in SEEDS}


def hermes(call, **arguments):
    name, arguments = (call.name, call.arguments) if isinstance(call, ToolCall) else (call, arguments)
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


def converse(seed, act, **options):
    """To the end; the observations, the last step and the actions."""
    world = ToolUser(**options)
    said, actions = [world.reset(seed)[0]], []
    while True:
        actions.append(act(world))
        observation, reward, terminated, truncated, info = world.step(actions[-1])
        said.append(observation)
        if terminated or truncated:
            return said, reward, info, actions


def seed_of(action, allowed=True, **differs):
    """A case about this."""
    for seed, case in CASES.items():
        if case.request.action == action and (case.request.change is not None) == allowed:
            order = case.shop.orders[case.number]
            if all(getattr(order, name) == value for name, value in differs.items()):
                return seed
    raise AssertionError("there is no such case")


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder"])
def test_the_expert_wins(format):
    for seed in range(100):
        _, reward, info, _ = converse(seed, ToolUser.expert, format=format)
        assert reward == 1.0 and info["success"] and info["violations"] == (), seed


def test_all_kinds_of_wishes_occur_allowed_and_not():
    seen = Counter((case.request.action, case.request.change is not None) for case in CASES.values())
    changes = {"cancel", "return", "exchange", "address"}
    assert set(seen) == {(action, allowed) for action in changes for allowed in (True, False)} | {("", False)}
    assert min(seen.values()) >= 5 and len(KINDS) == 5


def test_chance_wins_almost_nothing():
    random = np.random.default_rng(0)
    rewards = [converse(seed, lambda world: str(random.choice(world.actions())))[1] for seed in SEEDS]
    assert np.mean(rewards) <= 0.04


ALL_REASONS = f"I cannot: it is shipped, out of stock, and {RETURN_DAYS} days are over."


@pytest.mark.parametrize(
    "texts",
    [
        [ALL_REASONS],
        ["I cannot.", "It is shipped.", "Out of stock.", f"{RETURN_DAYS} days are over."],
        [f"{RETURN_DAYS} days are over.", "Out of stock.", "I cannot, it is shipped."],
        ["Total: " + " ".join(map(str, range(1000)))],
    ],
)
def test_a_policy_that_looks_at_nothing_wins_nothing(texts):
    for seed in SEEDS:
        assert play(seed, *texts, end())[0] == 0.0


def test_a_refusal_has_the_reason_of_the_case_alone():
    for seed in SEEDS:
        if "cannot" in CASES[seed].request.facts:
            assert play(seed, *asked(seed), ALL_REASONS, end())[0] == 0.0
            assert play(seed, *asked(seed), told(seed), ALL_REASONS, end())[0] == 0.0
            assert play(seed, *asked(seed), ALL_REASONS, told(seed), end())[0] == 1.0
            assert play(seed, told(seed), *asked(seed), end())[0] == 0.0  # guessed


def test_the_seed_alone_decides():
    assert [converse(seed, ToolUser.expert) for seed in range(9)] == [
        converse(seed, ToolUser.expert) for seed in range(9)
    ]
    assert draw_case(0) == draw_case(0) != draw_case(1)


def test_goal_differs_from_the_start_only_where_allowed():
    for case in map(draw_case, SEEDS):
        assert (case.shop != case.goal) == (case.request.change is not None)
        if case.request.change:
            assert case.shop.broken_rule(case.request.change.name, case.request.change.arguments) == ""


# --- what makes it 0 ---------------------------------------------------------------------------------------------------------


def end():
    return hermes("end_conversation")


def asked(seed):
    """Everything up to the change, by which everything is known."""
    case = CASES[seed]
    return [
        "Your email?",
        hermes("find_customer", email=case.email),
        hermes("get_order", order=case.number),
    ]


def yes(seed):
    return f"I will {CASES[seed].request.action} it, order {CASES[seed].number}. Do you confirm?"


def told(seed):
    return "So: " + " and ".join(CASES[seed].request.facts)


def play(seed, *texts):
    left = iter(texts)
    _, reward, info, _ = converse(seed, lambda world: next(left))
    return reward, info["violations"]


def test_correct_conversation_scores_and_each_mistake_fails():
    seed = seed_of("cancel")
    change = hermes(CASES[seed].request.change)
    assert play(seed, *asked(seed), yes(seed), change, told(seed), end()) == (1.0, ())
    assert play(seed, *asked(seed), yes(seed), told(seed), change, end()) == (0.0, ("cancel_order: rule 2",))
    assert play(seed, *asked(seed), yes(seed), change + end()) == (0.0, ())  # the refund was not told
    assert play(seed, *asked(seed), yes(seed), told(seed), end()) == (0.0, ())  # nothing was done
    assert play(seed, *asked(seed), change, told(seed), end()) == (0.0, ("cancel_order: rule 2",))
    assert play(seed, *asked(seed), yes(seed), change, change, told(seed), end())[0] == 0.0
    unknown = ("get_order: rule 1", "cancel_order: rule 1")
    assert play(seed, asked(seed)[2], yes(seed), change, told(seed), end()) == (0.0, unknown)


def test_what_may_not_be_cancelled():
    seed = seed_of("cancel", allowed=False, status="shipped")
    forbidden = hermes("cancel_order", order=CASES[seed].number, reason=REASONS[0])
    refusal = "I am sorry, that is not possible: it has been shipped."
    assert play(seed, *asked(seed), refusal, end()) == (1.0, ())
    assert play(seed, *asked(seed), "I am sorry, I can’t.", end())[0] == 0.0  # why?
    broken = ("cancel_order: the order is shipped",)
    assert play(seed, *asked(seed), yes(seed), forbidden, refusal, end()) == (0.0, broken)


def test_a_reason_that_does_not_count():
    seed = seed_of("cancel", allowed=False, status="pending")
    order = CASES[seed].number
    cannot = "For that reason I cannot."
    assert play(seed, *asked(seed), cannot, end()) == (1.0, ())
    for reason in ("it is cheaper elsewhere", REASONS[0]):  # the customer's, and one that was made up
        assert (
            play(seed, *asked(seed), yes(seed), hermes("cancel_order", order=order, reason=reason), cannot, end())[0]
            == 0.0
        )


def test_returns_that_come_too_late_and_twice():
    seed = seed_of("return", allowed=False)
    order, item = CASES[seed].number, CASES[seed].shop.orders[CASES[seed].number].items[0]
    change = hermes("return_item", order=order, sku=item.sku)
    refusal = f"I cannot: it is more than {RETURN_DAYS} days."
    assert play(seed, *asked(seed), refusal, end()) == (1.0, ())
    assert play(seed, *asked(seed), yes(seed), change, refusal, end()) == (0.0, ("return_item: rule 4",))
    seed = seed_of("return")
    change = hermes(CASES[seed].request.change)
    again = [*asked(seed), yes(seed), change, yes(seed), change, told(seed), end()]
    assert play(seed, *again) == (0.0, ("return_item: rule 4",))


def test_exchanges_without_stock():
    seed = seed_of("exchange", allowed=False)
    case = CASES[seed]
    item = case.shop.orders[case.number].items[0]
    colour = case.answers["variant"].split()[1]
    change = hermes("exchange_item", order=case.number, sku=item.sku, new_sku=f"{item.product}-{colour}")
    refusal = "We cannot, it is sold out."
    assert play(seed, *asked(seed), refusal, end()) == (1.0, ())
    assert play(seed, *asked(seed), yes(seed), change, refusal, end()) == (0.0, ("exchange_item: rule 5",))


def test_the_orders_of_others():
    seed = seed_of("", allowed=False)
    case = CASES[seed]
    other = next(
        number for number, each in case.shop.orders.items() if each.customer != case.shop.orders[case.number].customer
    )
    assert play(seed, *asked(seed), told(seed), end()) == (1.0, ())
    assert play(seed, *asked(seed), hermes("get_order", order=other), told(seed), end()) == (
        0.0,
        ("get_order: rule 1",),
    )


def test_what_does_not_matter():
    seed = seed_of("address")
    wrong = hermes("change_address", order="1", address="x") + hermes("find_customer", email="x@y") + hermes("nothing")
    noise = ["Hello!", wrong, "What is the weather like?", "<tool_call>"]
    change = hermes(CASES[seed].request.change)
    assert play(seed, *noise, *asked(seed), *noise, yes(seed), change, told(seed), end()) == (1.0, ())


# --- the customer ------------------------------------------------------------------------------------------------------------


def test_the_customer_answers_what_is_asked():
    seed = seed_of("exchange")
    case = CASES[seed]
    world = ToolUser()
    text, info = world.reset(seed)
    assert text.endswith(f"Customer: {case.request.text}") and "exchange_item" in text and info["valid"]

    def say(message):
        return world.step(message)[0]

    assert say("What is your email address?") == f"Customer: It is {case.email}."
    assert case.answers["variant"] in say("Your order number, and which colour?")
    assert "I do not understand" in say("Hm?")
    assert say("Do you confirm?") == "Customer: Of which order? Tell me its number."
    assert say(f"Shall I cancel order {case.number}?").startswith("Customer: No.")
    assert say(f"Shall I exchange it in order {case.number}?") == "Customer: Yes, I confirm."
    assert "cannot say more" in say("Why?")
    statements = [say("Thank you."), say("Thank you.")]
    assert statements[1] == "Customer: All right." and ("Are you sure" in statements[0]) == case.insistent


def test_thoughts_are_not_heard():
    seed = seed_of("", allowed=False)
    fact = CASES[seed].request.facts[0]
    assert play(seed, *asked(seed), f"<think>It is {fact}.</think> Well.", end())[0] == 0.0
    assert play(seed, *asked(seed), f"It is {fact}." + asked(seed)[2], end())[0] == 0.0


@pytest.mark.parametrize(
    ("fact", "message", "expected"),
    [
        ("42", "You get $42.", True),
        ("42", "You get 42.00 dollars", True),
        ("42", "42.50", False),
        ("42", "142 or 421 or 1.42", False),
        ("1042", "That is 1,042 dollars", True),
        ("30 days", "after 30 days", True),
        ("30 days", "a 30-day limit", True),
        ("cannot", "I can’t do that", True),
        ("cannot", "I can do that", False),
        ("shipped", "It has been shipped.", True),
        ("shipped", "I can't, shipped.", True),
        ("shipped", "It hasn’t been shipped.", False),
        ("shipped", "It is not yet on its way.", False),
    ],
)
def test_facts(fact, message, expected):
    assert mentions_fact(fact, message) == expected


# --- the contract ------------------------------------------------------------------------------------------------------------


def test_state_keys_name_what_is_known():
    seed = next(seed for seed in SEEDS if not CASES[seed].request.action and not CASES[seed].insistent)
    world, other = ToolUser(), ToolUser()
    keys = [world.reset(seed)[1]["state_key"]]
    for action in asked(seed):
        *_, info = world.step(action)
        assert info["effective"] and info["valid"]
        keys.append(info["state_key"])
    assert len(set(keys)) == 4
    other.reset(seed)
    assert [other.step(action)[4]["state_key"] for action in ("Nice weather.", *asked(seed))] == keys
    assert not other.step(asked(seed)[2])[4]["effective"]
    assert not other.step(hermes("get_order"))[4]["valid"]


def test_turns_run_out_and_penalties():
    _, reward, info, actions = converse(0, lambda world: "<tool_call>", turns=3, format_penalty=0.1)
    assert (reward, info["success"], info["valid"], len(actions)) == (-0.1, False, False, 3)
    world = ToolUser()
    with pytest.raises(RuntimeError, match="reset"):
        world.step("Hello")
    world.reset(0)
    world.step(end())
    with pytest.raises(RuntimeError, match="over"):
        world.step("Hello")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 50), st.lists(st.text(max_size=20), max_size=4), st.randoms())
def test_any_text_is_taken(seed, texts, random):
    world = ToolUser(turns=99)
    world.reset(seed)
    calls = [
        hermes(name, order=text, email=text, sku=text) for name, text in zip(world._toolbox.tools, texts, strict=False)
    ]
    for action in [*texts, *calls, *random.sample(list(world.actions()), 3)]:
        _, reward, terminated, _, info = world.step(action)
        assert reward in (0.0, 1.0) and isinstance(info["state_key"], str)
        if terminated:
            return


def test_options_are_checked():
    assert "prompt" not in required_options("tool_user")
    check_option_error(lambda: ToolUser(turns=0), "turns")
    check_option_error(lambda: environment_factory("tool_user", {"formats": "hermes"}), "formats", "format, turns")
