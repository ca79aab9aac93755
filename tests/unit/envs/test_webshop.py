"""WebShop: its reward against cases computed by hand, and whole visits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("bm25s")
pytest.importorskip("rapidfuzz")

from antiphon.core.errors import ConfigError
from antiphon.tasks.environments import environment_factory
from antiphon_envs.webshop.catalogue import Goal, Product
from antiphon_envs.webshop.catalogues import CATALOGUES, load_catalogue
from antiphon_envs.webshop.environment import WebShop
from antiphon_envs.webshop.reward import score_purchase, similarity
from tests.raising import raises_with
from tests.unit.tasks.worlds import check_option_error

COLOURS = ("blue", "green")
GREEN_8 = {"color": "dark green", "size": "8"}


def nouns(title):
    """The words in capitals."""
    return {word for word in title.split() if word.isupper()}


def product(**changes):
    values = {
        "id": "a",
        "title": "Soft LEATHER BOOTS for WOMEN by ALDER",
        "query": "boots",
        "category": ("Clothing", "Shoes", "Boots"),
        "price": 50.0,
        "attributes": ("waterproof", "wide fit"),
        "options": {"color": dict.fromkeys(("dark green", "light green", "green", "blue", "8"), 0.0)}
        | {"size": {"8": 0.0, "9": 0.0, "x-large": 60.0, "dark green": 0.0}},
    }
    return Product(**values | changes)


WANTED = product()
LONG = " ".join(f"N{number}X" for number in range(12))  # 12 nouns
TEN = " ".join(f"N{number}X" for number in range(10))
OTHER = {"query": "shoes", "category": ("Toys",)}

# What is asked for is WANTED with two attributes, GREEN_8 and at most 100 dollars: five things. The columns: what differs in
# the product that is bought, the options that are chosen, what differs in the product that is wanted, the factor, the share.
CASES = {
    "all as wanted": ({}, GREEN_8, {}, 1, 5 / 5),
    "no option chosen": ({}, {}, {}, 1, 3 / 5),
    "one option chosen": ({}, {"size": "8"}, {}, 1, 4 / 5),
    "another size": ({}, GREEN_8 | {"size": "9"}, {}, 1, 4 / 5),
    "another colour": ({}, GREEN_8 | {"color": "blue"}, {}, 1, 4 / 5),
    "another shade of the colour": ({}, GREEN_8 | {"color": "light green"}, {}, 1, 5 / 5),
    "the colour without its shade": ({}, GREEN_8 | {"color": "green"}, {}, 1, 5 / 5),
    "options under each other's names": ({}, {"color": "8", "size": "dark green"}, {}, 1, 5 / 5),
    "exactly the highest price": ({"price": 100.0}, GREEN_8, {}, 1, 5 / 5),
    "a cent more": ({"price": 100.01}, GREEN_8, {}, 1, 4 / 5),
    "too dear by an option": ({}, GREEN_8 | {"size": "x-large"}, {}, 1, 3 / 5),
    "one attribute": ({"attributes": ("waterproof",)}, GREEN_8, {}, 1, 4 / 5),
    "no attribute": ({"attributes": ()}, GREEN_8, {}, 1, 3 / 5),
    "nothing right but the kind": ({"attributes": (), "price": 200.0}, {}, {}, 1, 0 / 5),
    "words of an attribute in another order": ({"attributes": ("waterproof", "fit wide")}, GREEN_8, {}, 1, 5 / 5),
    "an attribute among more words": ({"attributes": ("waterproof", "extra wide fit")}, GREEN_8, {}, 1, 5 / 5),
    "an attribute with a letter more": ({"attributes": ("waterproof", "wide fits")}, GREEN_8, {}, 1, 5 / 5),
    "an attribute in two words": ({"attributes": ("water-proof", "wide fit")}, GREEN_8, {}, 1, 4 / 5),
    "an attribute that is not alike enough": ({"attributes": ("water resistant", "wide fit")}, GREEN_8, {}, 1, 4 / 5),
    "an attribute in the title": (
        {"attributes": ("waterproof",), "title": "Wide Fit LEATHER BOOTS"},
        GREEN_8,
        {},
        1,
        5 / 5,
    ),
    "an attribute in the bullets": (
        {"attributes": ("waterproof",), "bullets": ("Has a Wide Fit.",)},
        GREEN_8,
        {},
        1,
        5 / 5,
    ),
    "an attribute in the description": (
        {"attributes": ("waterproof",), "description": "A wide fit."},
        GREEN_8,
        {},
        1,
        5 / 5,
    ),
    "an attribute in a query only": ({"attributes": ("waterproof",), "query": "wide fit"}, GREEN_8, {}, 1, 4 / 5),
    "no common noun": ({"title": "A HAT"}, GREEN_8, {}, 0, 5 / 5),
    "one noun of four, all else other": ({**OTHER, "title": "WOMEN HAT"}, GREEN_8, {}, 1, 5 / 5),
    "one noun of ten, all else other": ({**OTHER, "title": "N1X"}, GREEN_8, {"title": TEN}, 0.5, 5 / 5),
    "one noun of ten, the same query": ({"category": (), "title": "N1X"}, GREEN_8, {"title": TEN}, 1, 5 / 5),
    "one noun of ten, one part of the category": (
        {"query": "x", "category": ("Shoes", "Boot"), "title": "N1X"},
        GREEN_8,
        {"title": TEN},
        0.5,
        5 / 5,
    ),
    "one noun of ten, two parts of the category": (
        {"query": "x", "category": ("Boots", "Shoes"), "title": "N1X"},
        GREEN_8,
        {"title": TEN},
        1,
        5 / 5,
    ),
    "one noun of twelve, the same query": ({"title": "N1X"}, GREEN_8, {"title": LONG}, 0.1, 5 / 5),
    "one noun of twelve, and half of the rest": ({"title": "N1X", "attributes": ()}, {}, {"title": LONG}, 0.1, 1 / 5),
    "no noun to compare with": ({}, GREEN_8, {"title": "nothing"}, 1, 5 / 5),
    "no noun to compare with, all else other": (OTHER, GREEN_8, {"title": "nothing"}, 0.5, 5 / 5),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reward(case):
    bought, chosen, wanted, factor, share = CASES[case]
    goal = Goal(product=product(**wanted), attributes=("waterproof", "wide fit"), options=GREEN_8, price_upper=100.0)
    verdict = score_purchase(goal, product(**bought), chosen, nouns, COLOURS)
    assert verdict.value == pytest.approx(factor * share)
    assert verdict.type == factor


def test_the_reward_of_a_goal_without_options():
    goal = Goal(product=WANTED, attributes=("waterproof",), options={}, price_upper=10.0)
    assert (
        score_purchase(goal, WANTED, GREEN_8, nouns).value == 1 / 2
    )  # options that nobody asked for count for nothing


def test_shades_differ_where_the_colour_is_not_known():
    goal = Goal(product=WANTED, attributes=("waterproof",), options={"color": "dark green"}, price_upper=100.0)
    assert score_purchase(goal, WANTED, {"color": "light green"}, nouns).value == pytest.approx(2 / 3)


@given(st.text(max_size=30), st.text(max_size=30))
def test_texts_are_as_alike_as_thefuzz_finds_them(first, second):
    fuzz = pytest.importorskip("thefuzz.fuzz")
    assert similarity(first, second) == fuzz.token_set_ratio(first, second)
    assert similarity(first, f"{second} {first}") == fuzz.token_set_ratio(first, f"{second} {first}")


def visit(world, seed, act):
    """Play to the end; the texts, the actions, and the last step."""
    texts, actions = [world.reset(seed)[0]], []
    while True:
        actions.append(act(world))
        *step, terminated, truncated, info = world.step(actions[-1])
        texts.append(step[0])
        if terminated or truncated:
            return texts, actions, (step[1], info)


def randomly(random):
    return lambda world: str(random.choice(world.actions()))


@pytest.mark.parametrize("size", CATALOGUES)
def test_the_expert_wins(size):
    for seed in range(100):
        *_, (reward, info) = visit(WebShop(size=size), seed, WebShop.expert)
        assert reward == 1.0 and info["success"], seed


@pytest.mark.parametrize(
    ("size", "won", "reward"), [("full", (0.0, 0.01), (0.13, 0.23)), ("tiny", (0.0, 0.04), (0.15, 0.4))]
)
def test_what_chance_is_worth(size, won, reward):
    random = np.random.default_rng(0)
    ends = [visit(WebShop(size=size), seed, randomly(random))[-1] for seed in range(300)]
    assert won[0] <= np.mean([info["success"] for _, info in ends]) <= won[1]
    assert reward[0] <= np.mean([value for value, _ in ends]) <= reward[1]


def test_the_seed_alone_decides():
    def play(seed):
        return visit(WebShop(), seed, randomly(np.random.default_rng(seed)))

    assert [play(seed) for seed in range(9)] == [play(seed) for seed in range(9)]
    load_catalogue.cache_clear()
    assert play(0) == play(0) != play(1)
    assert WebShop(shop=1).reset(0) != WebShop().reset(0)


def test_a_tiny_visit_is_short():
    for seed in range(50):
        texts, actions, _ = visit(WebShop(size="tiny"), seed, WebShop.expert)
        assert max(map(len, actions)) <= 24 and len(actions) == 5
        assert max(map(len, texts)) <= 60
        assert sum(map(len, texts + actions)) <= 300


def test_pages():
    world = WebShop()
    text, info = world.reset(0)
    assert info == {"state_key": "search", "valid": True, "effective": True}
    assert "desk lamp" in text and "at most $" in text and world.actions()[0] == "search[desk lamp]"
    first = world.step("<answer>search[ Desk  LAMP ]</answer>")
    assert first[0].count("$") == 10 and "23 in all" in first[0] and first[4]["state_key"] == "results/desk lamp/0"
    second = world.step("click[Next >]")
    assert second[0] != first[0] and "click[< prev]" in world.actions()
    assert world.step("click[< prev]")[0] == first[0]
    listed = [action for action in world.actions() if action.startswith("click[B0")]
    page, *_, info = world.step(listed[3].lower())
    assert info["effective"] and "[buy now]" in page
    for name in ("description", "features", "reviews", "attributes"):
        assert world.step(f"click[{name}]")[4]["valid"]
        assert world.actions() == ["click[back to search]", "click[< prev]"]
        assert world.step("click[< prev]")[0] == page
    assert world.step("click[< prev]")[0] == first[0]
    assert world.step("click[back to search]")[0] == "search"


def test_choosing_again_replaces_and_adds_to_the_price():
    world = WebShop()
    goal = next(seed for seed in range(99) if len(world._catalogue.goal(seed).product.options["size"]) == 2)
    world.reset(goal)
    wanted = world._catalogue.goal(goal).product
    world.step(world.expert())
    world.step(f"click[{wanted.id}]")
    (small, _), (large, more) = wanted.options["size"].items()
    world.step(f"click[{small}]")
    text, *_, info = world.step(f"click[{large}]")
    assert info["state_key"].endswith(f"size={large}") and f"${wanted.price + more:.2f}" in text.splitlines()[0]
    assert not world.step(f"click[{large}]")[4]["effective"]


@pytest.mark.parametrize(
    ("action", "info"),
    [
        ("buy", {"valid": False, "effective": False}),
        ("click[buy now]", {"valid": False, "effective": False}),
        ("click[]", {"valid": False, "effective": False}),
        ("search[]", {"valid": True, "effective": True}),
        ("search[zzz]", {"valid": True, "effective": True}),
    ],
)
def test_what_can_and_cannot_be_done_at_first(action, info):
    world = WebShop(format_penalty=0.1)
    world.reset(0)
    _, reward, terminated, truncated, found = world.step(action)
    assert {name: found[name] for name in info} == info
    assert (reward, terminated, truncated) == (-0.1 if action == "buy" else 0.0, False, False)


def test_turns_run_out():
    world = WebShop(turns=2)
    world.reset(0)
    world.step("search[hat]")
    assert world.step("search[hat]")[1:4] == (0.0, False, True)
    with pytest.raises(RuntimeError, match="over"):
        world.step("search[hat]")
    with pytest.raises(RuntimeError, match="reset"):
        WebShop().step("search[hat]")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(max_size=20)
        | st.text(max_size=9).map("search[{}]".format)
        | st.text(max_size=9).map("click[{}]".format)
    )
)
def test_any_text_is_taken(actions):
    world = WebShop(size="tiny", turns=99)
    world.reset(0)
    for action in [*actions, world.expert()]:
        text, reward, *_, info = world.step(action)
        assert isinstance(text, str) and reward == 0.0 and info["valid"] in (True, False)


def test_buttons_of_a_page_are_all_different():
    for name in CATALOGUES:
        for each in load_catalogue(name, 0, 0).products:
            values = [value for options in each.options.values() for value in options]
            assert len(set(values)) == len(values)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"size": "big"}, "size"),
        ({"size": "tiny", "products": 25}, "products"),
        ({"products": -1}, "products"),
        ({"turns": 0}, "turns"),
    ],
)
def test_invalid_options_are_refused(options, key):
    check_option_error(lambda: environment_factory("webshop", options), key)


def test_a_function_for_nouns_must_exist():
    with raises_with(ConfigError, value="no_such_module:nouns"):
        WebShop(nouns="no_such_module:nouns")


def test_nouns_can_be_found_by_another():
    world = WebShop(size="tiny", nouns="textwrap:wrap")
    *_, (reward, _) = visit(world, 0, WebShop.expert)
    assert reward == 1.0
