"""WebShop's published files: small ones of the same form, with goals in the original's order and its rewards."""

import json
import random

import pytest

pytest.importorskip("bm25s")
pytest.importorskip("rapidfuzz")

from antiphon.core.errors import DataError
from antiphon_envs.webshop.environment import WebShop
from tests.raising import raises_with
from tests.unit.tasks.worlds import check_option_error

BOOTS = {
    "asin": "B000000001",
    "name": "Alder Men's Waterproof Leather Hiking Boots",
    "query": "Hiking Boots ",
    "category": "fashion",
    "product_category": "Clothing, Shoes & Jewelry › Men › Shoes › Boots",
    "full_description": "Boots that keep feet dry.",
    "small_description": ["rubber sole", "arch support"],
    "pricing": "$49.99",
    "customization_options": {
        "Size": [{"value": " 8 ", "image": None, "asin": "B1"}, {"value": "9/10"}],
        "Color": [{"value": "Dark Green", "image": "http://images/1.jpg"}, {"value": "Black"}],
        "Style": None,
    },
    "images": ["http://images/1.jpg"],
    "seller_name": "Alder",
}
LAMP = BOOTS | {
    "asin": "B000000002",
    "name": "Brass Desk Lamp",
    "query": "desk lamp",
    "product_category": "Home & Kitchen › Lighting › Lamps",
    "full_description": None,
    "small_description": "a lamp for a desk",
    "pricing": "$20.00 to $30.00",
    "customization_options": "",
}
SOFA = LAMP | {"asin": "B000000003", "name": "Velvet Sofa", "query": "sofa", "pricing": "$1,199.00"}
PLAIN = LAMP | {"asin": "B000000004", "name": "Oak Shelf", "query": "shelf", "pricing": None}
ITEMS = [BOOTS, BOOTS, LAMP | {"asin": "nan"}, LAMP | {"asin": "B0000000000"}, LAMP, SOFA, PLAIN]
MADE = {
    "B000000001": {
        "attributes": ["waterproof", "rubber sole"],
        "instruction": "Find me waterproof boots",
        "instruction_attributes": ["waterproof"],
        "instruction_options": [],
    },
    "B000000002": {
        "attributes": ["brass"],
        "instruction": "Find me a lamp",
        "instruction_attributes": ["brass", "for a desk"],
    },
    "B000000003": {"attributes": ["velvet"]},
}
WRITTEN = {
    "B000000001": [
        {
            "instruction": "i need waterproof boots in dark green.",
            "instruction_attributes": ["waterproof"],
            "instruction_options": ["dark green", "9 | 10"],
            "worker_id": "A1",
        },
        {"instruction": "boots", "instruction_attributes": [], "instruction_options": []},
    ],
    "B000000002": [{"instruction": "a lamp", "instruction_attributes": ["brass"], "instruction_options": ["large"]}],
    "B000000003": [{"instruction": "a sofa", "instruction_attributes": ["velvet"], "instruction_options": []}],
    "B000000009": [{"instruction": "sold out", "instruction_attributes": ["a"], "instruction_options": []}],
}


@pytest.fixture
def files(tmp_path):
    def write(items=ITEMS, made=MADE, written=WRITTEN):
        options = {"items": items, "attributes": made, "goals": written}
        paths = {name: tmp_path / f"{name}.json" for name, content in options.items() if content is not None}
        for name, path in paths.items():
            path.write_text(json.dumps(options[name]))
        return {name: str(path) for name, path in paths.items()}

    return write


def first_lines(shop, count):
    return [shop.reset(seed)[0].splitlines()[1] for seed in range(count)]


def test_written_goals_are_in_the_order_of_the_original(files):
    texts = ["i need waterproof boots in dark green", "a lamp", "a sofa"]
    random.seed(233)
    random.shuffle(texts)
    lines = first_lines(WebShop(**files()), 6)
    assert [line.partition(", and price lower than ")[0] for line in lines] == [*texts, *texts]
    assert lines[:3] == lines[3:]


def test_many_goals_are_in_the_order_of_the_original(files):
    """The original shuffles them with Python's generator: numbers 0 to 499 are its test split."""
    ids = [f"B{number:09}" for number in range(60)]
    instruction = {"instruction_attributes": ["brass"], "instruction_options": []}
    written = {each: [{"instruction": f"lamp {each}", **instruction}] for each in ids}
    shop = WebShop(**files(items=[LAMP | {"asin": each} for each in ids], made={}, written=written))
    wanted = [f"lamp {each}" for each in ids]
    random.seed(233)
    random.shuffle(wanted)
    assert [line.partition(",")[0] for line in first_lines(shop, 60)] == wanted


def test_made_goals_have_every_choice_of_options(files):
    """Options by name, the last of them fastest, as `itertools.product` gives them."""
    boots = [
        f"Find me waterproof boots with color: {color}, and size: {size}"
        for color in ("dark green", "black")
        for size in ("8", "9 | 10")
    ]
    texts = [*boots, "Find me a lamp"]
    random.seed(233)
    random.shuffle(texts)
    lines = first_lines(WebShop(**files(written=None)), 5)
    assert [line.partition(", and price lower than ")[0] for line in lines] == texts


def test_prices_and_their_bounds(files):
    shop = WebShop(**files(), shop=3)
    prices = {product.id: product.price for product in shop._catalogue.products}
    assert prices.pop("B000000002") == pytest.approx(25, abs=5)
    assert prices == {"B000000001": 49.99, "B000000003": 1199.0, "B000000004": 100.0}
    bounds = {}
    for seed in range(3):
        goal = shop._catalogue.goal(seed)
        bounds[goal.product.id] = goal.price_upper
        assert (", and price lower than" in goal.instruction) == (goal.product.id != "B000000003")
    assert bounds["B000000001"] in (60, 70, 80) and bounds["B000000003"] > 1e5
    again = WebShop(**files(), shop=3)
    assert [again._catalogue.goal(seed) for seed in range(3)] == [shop._catalogue.goal(seed) for seed in range(3)]


@pytest.mark.parametrize("written", [WRITTEN, None], ids=["written", "made"])
def test_the_expert_buys_what_was_asked_for(files, written):
    shop, rewards = WebShop(**files(written=written)), {}
    for seed in range(5):
        shop.reset(seed)
        over = False
        while not over:
            _, reward, ended, truncated, info = shop.step(shop.expert())
            over = ended or truncated
        rewards[shop._goal.product.id] = reward, info["parts"]["options"]
    lamp = rewards.pop("B000000002")
    assert all(reward == 1.0 for reward, _ in rewards.values())
    # No lamp is large: one of three things that this goal counts cannot be had.
    assert lamp == ((pytest.approx(2 / 3), 0) if written else (1.0, 0))


def test_options_are_those_of_the_page(files):
    shop = WebShop(**files())
    shop.reset(0)
    shop.step("search[hiking boots]")
    page = shop.step("click[b000000001]")[0]
    assert "[dark green]" in page and "[9 | 10]" in page and "[8]" in page and "style" not in page


def test_a_number_of_products_takes_the_first(files):
    shop = WebShop(**files(), products=2)  # one product, twice
    assert {line.partition(",")[0] for line in first_lines(shop, 4)} == {"i need waterproof boots in dark green"}


@pytest.mark.parametrize(
    ("changed", "name", "word"),
    [
        ({"items": [BOOTS | {"name": None}]}, "items", "name"),
        ({"items": {"a": 1}}, "items", "array"),
        ({"made": {"B000000001": {"attributes": "waterproof"}}}, "attributes", "attributes"),
        ({"written": {"B000000001": [{"instruction": "boots"}]}}, "goals", "instruction_attributes"),
        ({"written": {"B000000009": WRITTEN["B000000009"]}}, "goals", "no goal"),
        ({"made": {}, "written": None}, "attributes", "no goal"),
    ],
)
def test_a_file_of_another_form_is_named(files, changed, name, word):
    paths = files(**changed)
    with raises_with(DataError, match=word, path=paths[name]):
        WebShop(**paths)


def test_a_file_that_is_not_there_is_named(files, tmp_path):
    with raises_with(DataError, path=tmp_path / "none.json"):
        WebShop(**files() | {"items": str(tmp_path / "none.json")})


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"items": "items.json"}, "attributes"),
        ({"goals": "goals.json"}, "goals"),
        ({"items": "items.json", "attributes": "made.json", "size": "tiny"}, "size"),
    ],
)
def test_files_belong_together(given, option):
    check_option_error(lambda: WebShop(**given), option)
