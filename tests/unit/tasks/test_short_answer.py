"""Short answers: right ones however they are written, and nothing else. The reference is SQuAD's evaluation in lm-eval."""

from string import punctuation

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks.super_glue.record.t5_utils import normalize_squad, squad_f1_agg

from antiphon.core.types import Message, Prompt
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards import build_reward
from antiphon.tasks.rewards.short_answer import normalize_answer


def value(answer, response, **options):
    prompt = Prompt(id="p", task="t", messages=(Message("user", "?"),), payload={"answer": answer})
    return build_reward("short_answer", options)(prompt, Transcript([Message("assistant", response)])).value


WORDS = st.lists(st.sampled_from([*"abz", "the", "an", "The", "A", "Paris", "York", "é", "1914", "two"]), max_size=6)
# Signs that SQuAD leaves out and that make no other answer beside letters and spaces.
NOISE = st.lists(st.sampled_from([" ", "  ", "", *(set(punctuation) - set("+#%/&=^~|@-."))]), min_size=7, max_size=7)


@given(words=WORDS, noise=NOISE)
def test_words_are_compared_as_squad_does(words, noise):
    text = "".join(f"{sign} {word}{sign} " for word, sign in zip(words, noise, strict=False))
    expected = normalize_squad(text)
    if expected:  # else all words are articles, and SQuAD has nothing to compare
        assert normalize_answer(text) == expected


@given(given_words=WORDS, right_words=WORDS.filter(bool))
def test_f1_is_squads(given_words, right_words):
    response, right = " ".join(given_words), " ".join(right_words)
    if not normalize_squad(response) or not normalize_squad(right):
        return
    expected = squad_f1_agg([(response, f"group_{right}")])
    assert value(right, response, f1=True) == pytest.approx(expected)


RIGHT = [
    ("Paris", "The answer is Paris."),
    ("Paris", "paris"),
    ("Paris", r"So it is \boxed{\text{Paris}}."),
    ("Paris", "**Answer:** the city.\nAnswer: “Paris”"),
    ("the Beatles", "The answer is Beatles"),
    ("St. Louis", "The answer is St. Louis."),
    ("J. R. R. Tolkien", "Answer: J. R. R. Tolkien"),
    (["NYC", "New York City"], "The answer is new york city!"),
    (1969, "Answer: 1969"),
    ("1,234", "The answer is 1234"),
    ("A", "The answer is A."),
    ("-5", "The answer is −5"),
    ("not applicable", "The answer is not applicable."),
    ("Spider-Man", "The answer is Spiderman"),
    ("Zürich", "The answer is ZÜRICH"),
    ("Gauß", "The answer is GAUSS"),
    ("Ту-154", "The answer is Ту154"),
]


@pytest.mark.parametrize(("right", "response"), RIGHT)
def test_right_answers_are_paid(right, response):
    assert value(right, response) == 1
    assert value(right, response, f1=True) == 1


WRONG = [
    ("Paris", "The answer is London."),
    ("Paris", "The answer is not Paris."),
    ("Paris", "The answer is Paris or London."),
    ("Paris", "The answer is Paris.\nThe answer is London."),
    ("Paris", "Paris, London, Rome, Berlin"),
    ("Paris", "I think of Paris.\nThen I think of London."),
    ("Paris", ""),
    ("Paris", "The answer is Paris" + " indeed" * 200),
    ("35", "The answer is 3.5"),
    ("3.5", "The answer is 35"),
    ("5", "The answer is -5"),
    ("5", "The answer is - 5"),
    ("-5", "The answer is 5"),
    ("5%", "The answer is 5"),
    ("C++", "The answer is C"),
    ("C", "The answer is C#"),
    ("1914-1918", "The answer is 19141918"),
    ("1.5", "The answer is 1,5"),
    ("A", "The answer is the"),
    ("10:30", "The answer is 1030"),
]


@pytest.mark.parametrize(("right", "response"), WRONG)
def test_nothing_else_is_paid(right, response):
    assert value(right, response) == 0


def test_guesses_lower_f1():
    assert value("New York", "The answer is New York", f1=True) == 1
    assert value("New York", "The answer is New York or Rome or Paris", f1=True) == pytest.approx(2 * 2 / (6 + 2))
    assert value("New York", "The answer is New New New New", f1=True) == pytest.approx(2 / 6)


def test_a_statement_of_a_thousand_words_is_no_answer():
    assert value("Paris", "The answer is " + "Paris " * 1_000, f1=True) == 0


def test_an_answer_without_a_marker_is_read_if_asked():
    response = "It is a city in France.\nParis"
    assert value("Paris", response) == 0 and value("Paris", response, require_marker=False) == 1


@pytest.mark.parametrize("right", ["", "!?", [], ["Paris", " "], None])
def test_a_row_without_a_right_answer_is_an_error(right):
    with pytest.raises(ValueError, match="answer"):
        value(right, "The answer is Paris")
