"""Rewards that judge by number, option, form and execution; shaping; and what is composed of them."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError
from antiphon.core.types import Message, Prompt, Score, ScoreStatus
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards import build_group_reward, build_reward
from antiphon.tasks.rewards.composed import PartError
from antiphon.tasks.rewards.sql import orders


def judge(reward: str, payload: Any, response: str, **options: Any) -> Score:
    prompt = Prompt(id="p", task="t", messages=(Message("user", "?"),), payload=payload)
    score = build_reward(reward, options)(prompt, Transcript([Message("assistant", response)]))
    assert isinstance(score, Score)
    return score


# --- numeric -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "right, response, value",
    [
        ("1234", "The answer is 1,234.", 1),
        ("1234", r"\boxed{1{,}234}", 1),
        ("1234", "The answer is 12,34.", 0),  # two numbers
        ("18", "The answer is $18.00 dollars, in all.", 1),
        ("0.5", "Answer: 50%", 1),
        ("50%", "#### 0.5", 1),
        ("50", "Answer: 50%", 0),
        ("1/2", r"\boxed{\frac12}", 1),
        ("0.5", r"\boxed{-\frac{1}{2}}", 0),
        ("-0.5", r"\boxed{-\frac{1}{2}}", 1),
        ("1.5", "the answer is 1 1/2", 1),
        ("1.5", r"\boxed{1\frac{1}{2}}", 1),
        ("-5", "The answer is −5", 1),  # a minus of typographers
        ("1200", "The answer is 1.2e3", 1),
        ("1200", r"\boxed{1.2 \times 10^{3}}", 1),
        ("7", "The answer is 3 + 4 = 7", 1),
        ("18", "Answer: 20 - 2 = 18", 1),
        ("18", r"\boxed{20-2=18}", 1),
        ("18", r"\boxed{\$20-\$2=18}", 1),
        ("18", r"\boxed{-20=18}", 0),
        ("18", r"\boxed{20=18}", 0),
        ("18", "Answer: 19, 17 = 18", 0),
        ("-18", r"\boxed{{-}18}", 1),
        ("-18", r"\boxed{\text{-}18}", 1),
        ("-0.5", r"\boxed{{−}\frac12}", 1),
        ("18", r"\boxed{{-}18}", 0),
        ("18", r"\boxed{\text{-}18}", 0),
        ("18", r"\boxed{{{-}}18}", 0),
        ("5", "The answer is 5 or 7", 0),
        ("7", "The answer is 5 or 7", 0),
        ("5", "The answer is 4. No: the answer is 5.", 1),
        ("5", r"The answer is 5. Or \boxed{4}", 0),
        ("5", "The answer is 5. I hope that my answer is right", 1),
        ("5", "The answer is not 5", 0),
        ("5", "I think 7 or maybe 5", 0),  # announces nothing
        ("5", " 5 ", 1),
        ("5", "", 0),
        ("1/3", "The answer is 0.333", 0),
        ("5", "The answer is 1/0", 0),
        ("5", "The answer is 1e" + "9" * 40, 0),
        ("5", "The answer is " + "9" * 9000, 0),
        ("9007199254740993", "The answer is 9007199254740992", 0),  # the same in floating point
        (7, "The answer is 7.0", 1),
    ],
)
def test_numeric(right: Any, response: str, value: float) -> None:
    assert judge("numeric", {"answer": right}, response).value == value


def test_tolerances_of_numeric() -> None:
    assert judge("numeric", {"answer": "1/3"}, "The answer is 0.333", absolute=0.001).value == 1
    assert judge("numeric", {"answer": "300"}, "The answer is 299", relative=0.01).value == 1
    assert judge("numeric", {"answer": "300"}, "The answer is 296", relative=0.01).value == 0
    assert judge("numeric", {"answer": "50"}, "The answer is 50%", percent=False).value == 1
    assert judge("numeric", {"answer": "5"}, "7, or maybe 5", require_marker=False).value == 1


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.sampled_from(["{:f}", "{:,f}", "{:e}"]))
def test_every_way_to_write_a_number_is_that_number(number: Any, form: str) -> None:
    assert judge("numeric", {"answer": str(number)}, f"The answer is {form.format(number)}.").value == 1


@pytest.mark.parametrize("right", ["", "five", "5 or 7"])
def test_a_right_answer_that_is_no_number_is_an_error(right: str) -> None:
    with pytest.raises(ValueError, match="is not one number"):
        judge("numeric", {"answer": right}, "The answer is 5")


# --- multiple choice -----------------------------------------------------------------------------------------------------

CITIES = ["London", "Paris", "Paris, Texas", "Vitamin C"]


@pytest.mark.parametrize(
    "right, response, value",
    [
        ("B", "B", 1),
        ("B", "(b).", 1),
        ("B", "$B$", 1),
        ("B", "B) Paris", 1),
        ("B", "paris", 1),
        ("B", "First this, then that.\n\n**B**", 1),
        ("B", "The answer is B.", 1),
        ("B", "the answer is (B) Paris, the capital", 1),
        ("B", "The correct option: **B**", 1),
        ("B", "Answer: b", 1),
        ("B", r"so \boxed{\text{(B)}}", 1),
        ("B", "the answer is Paris", 1),
        ("C", "the answer is Paris, Texas", 1),
        ("B", "the answer is Paris, Texas", 0),
        ("D", "The answer is (D) Vitamin C", 1),
        ("B", "The answer is A. No, wait: the answer is B.", 1),
        ("A", "The answer is A. No, wait: the answer is B.", 0),
        ("B", "The answer is A or B", 0),
        ("A", "The answer is A or B", 0),
        ("B", "The answer is B) London", 0),  # contradicts itself
        ("B", "A, B, C, D", 0),
        ("B", "I think that B is good", 0),  # states nothing
        ("A", "The answer is not A", 0),
        ("A", "A good question. I do not know.", 0),
        ("B", "", 0),
        (1, "B", 1),
        (0, "B", 0),
        ("Paris", "B", 1),
    ],
)
def test_multiple_choice(right: Any, response: str, value: float) -> None:
    assert judge("multiple_choice", {"answer": right, "choices": CITIES}, response).value == value


def test_options_may_have_labels_of_their_own_or_none() -> None:
    assert judge("multiple_choice", {"answer": "2", "choices": {"1": "up", "2": "down"}}, "The answer is 2").value == 1
    assert judge("multiple_choice", {"answer": "B"}, "The answer is B, I think").value == 1
    with pytest.raises(ValueError, match="'Rome' of prompt p is none of A, B"):
        judge("multiple_choice", {"answer": "Rome", "choices": ["up", "down"]}, "A")


NUMBERS = ["12", "5", "3", "8"]


@pytest.mark.parametrize(
    "other", ["−5", "-5", ".5", "5.5", "0.5", "1/5", "5%", "5 \\%", "5^2", "√5", "5:30", "5,000", "≤ 5", "10 - 5"]
)
def test_a_part_of_another_number_is_no_option(other: str) -> None:
    for response in (f"Answer: {other}", rf"\boxed{{{other}}}", f"The answer is {other}, I think.", other):
        assert judge("multiple_choice", {"answer": "5", "choices": NUMBERS}, response).value == 0
        assert judge("multiple_choice", {"answer": "1", "choices": {"1": "up", "5": "down"}}, response).value == 0


@pytest.mark.parametrize(
    "right, choices, response, value",
    [
        ("5", NUMBERS, "Answer: 5.", 1),
        ("5", NUMBERS, "Answer: 5, which is odd", 1),
        ("5", NUMBERS, "The answer is 2 + 3 = 5: odd", 1),
        ("-5", ["-5", "5", "10", "0"], "Answer: −5", 1),
        ("5", ["-5", "5", "10", "0"], "Answer: −5", 0),
        ("−5", ["−5", "5"], "The answer is -5, as x is negative", 1),
        (".5", [".5", "5"], "Answer: .5", 1),
        ("1990–1995", ["1990–1995", "1990"], "Answer: 1990-1995", 1),
        ("not guilty", ["guilty", "not guilty"], "Answer: not guilty", 1),
        ("guilty", ["guilty", "not guilty"], "Answer: not guilty", 0),
        ("Not enough information", ["Yes", "No", "Not enough information"], "The answer is not enough information.", 1),
        ("Yes", ["Yes", "Not enough"], "The answer is not Yes", 0),
        ("No", ["Yes", "No", "Not enough"], "The answer is No. The answer is not enoughYes", 1),
    ],
)
def test_options_that_are_numbers_or_begin_with_not(right: str, choices: Any, response: str, value: float) -> None:
    assert judge("multiple_choice", {"answer": right, "choices": choices}, response).value == value


@given(st.lists(st.sampled_from("ABCD"), min_size=2, max_size=4, unique=True))
def test_naming_several_options_never_pays(named: list[str]) -> None:
    for response in (f"The answer is {' or '.join(named)}", rf"\boxed{{{', '.join(named)}}}", " ".join(named)):
        assert judge("multiple_choice", {"answer": named[0]}, response).value == 0


# --- regular expressions -------------------------------------------------------------------------------------------------

THINKING = r"<think>.*</think>\s*<answer>[^<]*</answer>"


def test_regex() -> None:
    good = "<think>\nso\n</think>\n<answer>5</answer>"
    assert judge("regex", None, good, pattern=THINKING).value == 1
    assert judge("regex", None, f"{good} and more", pattern=THINKING).value == 0
    assert judge("regex", None, f"{good} and more", pattern=THINKING, whole=False).value == 1
    assert judge("regex", {"pattern": "a+"}, "AAA").value == 0
    assert judge("regex", {"pattern": "a+"}, "AAA", ignore_case=True).value == 1
    with pytest.raises(ValueError, match="has no 'pattern'"):
        judge("regex", {}, "a")
    with pytest.raises(ValueError, match=r"pattern '\(' is no regular expression"):
        judge("regex", None, "a", pattern="(")


# --- SQL -----------------------------------------------------------------------------------------------------------------

TABLE = "CREATE TABLE t (a INTEGER, b TEXT, c REAL); INSERT INTO t VALUES {};"
ONE = TABLE.format("(1, 'x', 0.1), (2, 'y', 0.2), (3, 'x', 0.3)")
TWO = TABLE.format("(7, 'x', 0.5), (9, 'y', 1.5)")
COUNT = "SELECT count(*) FROM t WHERE b = 'x'"
ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT"


def ask_database(right: str, response: str, databases: Any = (ONE, TWO), **options: Any) -> Score:
    return judge("sql", {"query": right, "databases": databases}, response, **options)


@pytest.mark.parametrize(
    "right, response, value",
    [
        (COUNT, COUNT, 1),
        (COUNT, "Count them:\n```sql\nSELECT sum(b = 'x') FROM t;\n```", 1),
        (COUNT, "```sql\nSELECT 1\n```\nor rather\n```sql\nSELECT sum(b = 'x') AS n FROM t\n```", 1),  # the last block
        (COUNT, "```PostgreSQL\nSELECT sum(b = 'x') AS n FROM t\n```\nIt finds\n```\n2\n```\nor\n```text\n2\n```", 1),
        (COUNT, "SELECT 2", 0),  # right in one of the databases
        (COUNT, "", 0),
        (COUNT, "I do not know", 0),
        ("SELECT a, b FROM t", "SELECT a, b FROM t ORDER BY a DESC", 1),
        ("SELECT a, b FROM t ORDER BY a DESC", "SELECT a, b FROM t ORDER BY a", 0),
        ("SELECT a, b FROM t ORDER BY a DESC", "SELECT a, b FROM t ORDER BY -a", 1),
        ("SELECT b FROM t", "SELECT DISTINCT b FROM t", 0),  # a multiset
        ("SELECT a, b FROM t", "SELECT b, a FROM t", 0),
        ("SELECT a FROM t", "SELECT a, b FROM t", 0),
        ("SELECT sum(c) FROM t", "SELECT sum(c * 10) / 10 FROM t", 1),  # 0.1 + 0.2 + 0.3
        ("SELECT a FROM t WHERE a = 1", "SELECT a FROM t WHERE a = 1", 1),  # nothing in the other one
        ("SELECT strftime('%Y', '2026-01-0' || a) FROM t", "SELECT '2026' FROM t", 1),
    ],
)
def test_sql(right: str, response: str, value: float) -> None:
    assert ask_database(right, response).value == value


@pytest.mark.parametrize(
    "query, why",
    [
        ("SELEC", "syntax error"),
        ("DROP TABLE t", "not authorized"),
        ("DELETE FROM t", "not authorized"),
        ("INSERT INTO t VALUES (1, 'x', 1)", "not authorized"),
        ("CREATE TEMP TABLE u (a)", "not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("SELECT * FROM pragma_table_info('t')", "not authorized"),
        ("ATTACH 'stolen.db' AS u", "not authorized"),
        ("VACUUM INTO 'stolen.db'", "authorization denied"),
        ("BEGIN", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT a FROM t ORDER BY random()", "not authorized"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        ("SELECT 1; DROP TABLE t", "one statement at a time"),
        ("SELECT '\ud800'", "surrogates not allowed"),
        ("SELECT hex(zeroblob(100000000))", "too big"),
        (f"{ENDLESS} count(*) FROM r", "interrupted"),
        (f"{ENDLESS} n FROM r", "more than 10000 rows"),
        (f"{ENDLESS} max(printf('%.*c', 900000, 'x')) FROM r", "not authorized"),
        (f"{ENDLESS} max(format('%900000d', n)) FROM r", "not authorized"),
        (ENDLESS.replace("n + 1", "n || zeroblob(100000)") + " max(n) FROM r", "too big"),
        (ENDLESS.replace("n + 1", "zeroblob(1900)") + " * FROM (SELECT n FROM r ORDER BY n)", "MemoryError"),
        ("", "finds no rows"),
    ],
)
def test_a_query_that_may_not_or_cannot_be_run_is_wrong(query: str, why: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    score = ask_database(COUNT, query)
    assert score.value == 0 and why in score.detail
    assert list(tmp_path.iterdir()) == []


def test_formatting_is_allowed_where_the_right_query_formats() -> None:
    formatted = "SELECT printf('%.1f', a) FROM t"
    assert ask_database(formatted, "SELECT printf('%.1f', a + 0) FROM t").value == 1
    assert ask_database(COUNT, f"SELECT count(*) FROM ({formatted})").value == 0


def test_the_share_of_databases_is_reported() -> None:
    assert ask_database(COUNT, "SELECT 2").parts == {"databases": 0.5}
    assert ask_database(COUNT, COUNT, ONE).value == 1  # a script that stands alone


def test_columns_in_any_order() -> None:
    assert ask_database("SELECT a, b, c FROM t", "SELECT c, a, b FROM t", columns_in_order=False).value == 1
    assert ask_database("SELECT a, a, b FROM t", "SELECT b, a, a FROM t", columns_in_order=False).value == 1
    assert ask_database("SELECT a, b FROM t", "SELECT b, -a FROM t", columns_in_order=False).value == 0
    many, other = ", ".join("a" * 20), ", ".join("a" * 19) + ", c"
    assert ask_database(f"SELECT {many} FROM t", f"SELECT {other} FROM t", columns_in_order=False).value == 0
    # The columns have the same values, and the rows do not.
    twisted = [TABLE.format("(1, 2, 0), (2, 1, 0), (3, 3, 0)")]
    assert ask_database("SELECT a, b + 0 FROM t", "SELECT a, a FROM t", twisted, columns_in_order=False).value == 0


@pytest.mark.parametrize(
    "right, databases, message",
    [
        ("SELEC", ONE, "database 0: the right query fails"),
        (f"{ENDLESS} count(*) FROM r", ONE, "the right query fails: OperationalError: interrupted"),
        ("SELECT random()", ONE, "the right query fails"),
        ("SELECT a FROM t WHERE a > 10", [ONE, TWO], "finds nothing in any database"),
        (COUNT, [ONE, "CREATE"], "database 1 cannot be made"),
        (COUNT, [], "has no 'databases'"),
        (COUNT, None, "has no 'databases'"),
    ],
)
def test_what_cannot_be_judged_by_execution_is_an_error(right: str, databases: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask_database(right, COUNT, databases)


@pytest.mark.parametrize(
    "query, ordered",
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n/* down */ by a limit 3", True),
        ("WITH x AS (SELECT 1) SELECT * FROM x ORDER BY 1", True),
        ("SELECT * FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'order by' FROM t -- order by a", False),
        ('SELECT "order" FROM t GROUP BY a', False),
    ],
)
def test_a_query_orders_at_its_top_level_or_not(query: str, ordered: bool) -> None:
    assert orders(query) is ordered


# --- shaping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, value", [(0, 0), (1, 0), (3, 0.5), (5, 1), (10, 1), (11, 0.75), (13, 0.25), (14, 0), (99, 0)]
)
def test_length_fades(words: int, value: float) -> None:
    score = judge("length", None, "w " * words, low=5, high=10, fade=3)
    assert (score.value, score.parts) == (value, {"words": words})


def test_repetition_is_the_share_of_what_was_there_before() -> None:
    assert judge("repetition", None, "a b c d e f").value == 0
    assert judge("repetition", None, "a b", ngram=3).value == 0
    assert judge("repetition", None, "a b A B", ngram=2).value == pytest.approx(-1 / 3)  # a b, b a, a b
    assert judge("repetition", None, "la " * 1000).value == pytest.approx(-996 / 997)
    assert judge("repetition", None, "哈" * 11, unit="characters", ngram=2).value == pytest.approx(-0.9)


@given(st.text(alphabet="ab \n", max_size=50), st.integers(1, 5))
def test_repetition_lies_between_minus_1_and_0(text: str, ngram: int) -> None:
    value = judge("repetition", None, text, ngram=ngram).value
    assert value is not None and -1 < value <= 0


def test_shaping_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="low 5 is above high 3"):
        judge("length", None, "", low=5, high=3)
    with pytest.raises(ValueError, match="unit 'tokens' is neither"):
        judge("length", None, "", high=3, unit="tokens")
    with pytest.raises(ValueError, match="ngram 0"):
        judge("repetition", None, "a", ngram=0)


# --- composed ------------------------------------------------------------------------------------------------------------


def says(prompt: Prompt, transcript: Transcript, *, what: Any) -> Any:
    """A part that comes to what the test wants."""
    if what == "raise":
        raise LookupError("no such thing")
    return Score(status=ScoreStatus(what), detail="broken") if isinstance(what, str) else what


def part(what: Any, **others: Any) -> dict[str, Any]:
    return {"reward": "tests.unit.tasks.test_verifiable_rewards:says", "options": {"what": what}, **others}


def test_a_gate_lets_its_part_through_or_not() -> None:
    parts = {
        "format": {"reward": "regex", "options": {"pattern": THINKING}, "weight": 0.0},
        "correct": {"reward": "exact_match", "options": {"pattern": "<answer>(.*?)</answer>"}, "gates": ["format"]},
        "style": {"reward": "length", "options": {"high": 3}, "weight": 0.1},
    }
    good = judge("composed", {"answer": "5"}, "<think> so </think><answer>5</answer>", parts=parts)
    assert good.value == pytest.approx(1.1)
    assert good.parts == {"format": 1, "correct": 1, "style": 1, "style/words": 3}
    bare = judge("composed", {"answer": "5"}, "<answer>5</answer>", parts=parts)
    assert bare.value == pytest.approx(0.1) and bare.parts["correct"] == 1
    assert judge("composed", {"answer": "5"}, "<think></think> <answer>4</answer>", parts=parts).value == pytest.approx(
        0.1
    )


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 2), st.floats(0, 1)), min_size=1, max_size=4))
def test_the_whole_is_the_weighted_sum_of_gated_parts(drawn: list[tuple[float, float, float]]) -> None:
    parts = {}
    for number, (value, weight, gate) in enumerate(drawn):
        parts[f"gate{number}"] = part(gate, weight=0.0)
        parts[f"part{number}"] = part(value, weight=weight, gates=[f"gate{number}"])
    expected = sum(value * weight * gate for value, weight, gate in drawn)
    assert judge("composed", None, "", parts=parts).value == pytest.approx(expected)


def paid(*turns: float) -> Score:
    return Score(status=ScoreStatus.SCORED, value=sum(turns), turns=turns)


def composed_turns(**parts: dict[str, Any]) -> tuple[float, ...]:
    return judge("composed", None, "", parts=parts).turns


def test_turns_are_weighted_as_their_part_is() -> None:
    """What a part pays for no turn, and what is of the whole, falls to the last turn when advantages are made."""
    assert composed_turns(game=part(paid(1.0, 3.0), weight=0.5)) == (0.5, 1.5)
    assert composed_turns(game=part(paid(1.0, 3.0)), style=part(7.0)) == (1, 3)
    assert composed_turns(game=part(paid(1.0, 3.0)), tools=part(paid(0.0, 2.0), weight=-0.5)) == (1, 2)
    gated = {"game": part(paid(1.0, 3.0), gates=["form"]), "form": part(0.5, weight=0.0)}
    assert composed_turns(**gated) == (0.5, 1.5)
    assert composed_turns(style=part(7.0)) == ()
    assert composed_turns(game=part(paid(1.0, 3.0), weight=0.0), style=part(7.0)) == (0, 0)


def test_parts_that_count_turns_differently_have_no_verdict() -> None:
    score = judge("composed", None, "", parts={"one": part(paid(1.0)), "two": part(paid(1.0, 2.0))})
    assert score.status is ScoreStatus.UNGRADED and "'one'" in score.detail and "'two'" in score.detail


@pytest.mark.parametrize("status", ["ungraded", "infrastructure"])
def test_a_part_without_a_verdict_leaves_the_whole_without_one(status: str) -> None:
    parts = {"shut": part(0.0, weight=0.0), "broken": part(status, gates=["shut"]), "good": part(1.0)}
    score = judge("composed", None, "", parts=parts)
    assert (score.status, score.value, score.detail) == (status, None, "broken: broken")
    with pytest.raises(PartError, match=r"raises: LookupError: no such thing .*test_verifiable_rewards.py:"):
        judge("composed", None, "", parts={"raises": part("raise"), "good": part(1.0)})


@pytest.mark.parametrize(
    "parts, message",
    [
        ({}, "no part has a weight"),
        ({"a": {"reward": "math", "weight": 0.0}}, "no part has a weight"),
        ({"a": {"reward": "maths"}}, "did you mean 'math'"),
        (
            {"a": {"reward": "math", "wieght": 1.0}},
            "a.wieght: Extra inputs are not permitted; a part has reward, options, weight",
        ),
        ({"a": {"weight": 1.0}}, "a.reward: Field required"),
        ({"a": {"reward": "math", "gates": ["b"]}}, "part 'a' has a gate 'b', which is no other part"),
        ({"a": {"reward": "math", "gates": ["a"]}}, "gate 'a', which is no other part"),
        ({"a": {"reward": "math", "options": {"boxed": True}}}, "unexpected keyword argument 'boxed'"),
    ],
)
def test_parts_that_cannot_be(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_reward("composed", {"parts": parts})


# --- groups --------------------------------------------------------------------------------------------------------------


def test_duplicates_pay() -> None:
    said = ["Yes", " yes ", "no", "maybe"]
    scores = [Score.of(1.0, style=0.5), Score.of(1.0), Score.of(0.0), Score.of(1.0)]
    judged = build_group_reward("duplicates", {"penalty": 0.3})(
        Prompt(id="p", task="t", messages=()), [Transcript([Message("assistant", text)]) for text in said], scores
    )
    assert [score.value for score in judged] == pytest.approx([0.9, 0.9, 0.0, 1.0])
    assert judged[0].parts == {"style": 0.5, "copies": 1.0}
    (kept, _) = build_group_reward("duplicates", {})(
        Prompt(id="p", task="t", messages=()),
        [Transcript([Message("assistant", text)]) for text in "ab"],
        [paid(1, 3)] * 2,
    )
    assert kept.turns == (1, 3)
