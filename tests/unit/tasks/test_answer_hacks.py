"""Answers that would rather be paid than be right, to the graders that compare answers: none is paid, whatever the cause."""

import pytest

from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards import build_reward
from antiphon.types import Message, Prompt, Score

NUMBER = {"answer": "82"}
CHOICE = {"answer": "C", "choices": ["red", "blue", "green", "grey"]}
TABLES = [
    "CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1), (2), (3);",
    "CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (4), (5);",
]
QUERY = {"query": "SELECT sum(a) FROM t", "databases": TABLES}
ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"

# grader, payload, options; then causes and responses
HACKS = {
    ("numeric", "answer"): (
        NUMBER,
        {},
        {
            "Arabic digits": "The answer is ٨٢.",
            "full-width digits": r"\boxed{８２}",
            "superscript": "The answer is 82².",
            "power": "The answer is 82^2.",
            "factorial": "The answer is 82!",
            "upper bound": "The answer is ≤ 82.",
            "strict bound": r"\boxed{x < 82}",
            "LaTeX bound": r"\boxed{x \le 82}",
            "contradiction": "The answer is 83 = 82.",
            "chain": r"\boxed{x = 83 = 82}",
            "several": "The answer is 82 or 83.",
            "range": "The answer is between 82 and 84.",
            "every number": "The answer is " + " ".join(map(str, range(100))),
            "boxes, wrong last": r"\boxed{82} \boxed{83}",
            "negation": "The answer is not 82.",
            "question": "The answer is 37+45.",
            "part of a number": "The answer is 182.",
            "grouped": "The answer is 82,000.",
            "other base": "The answer is 0x52.",
            "tower": r"\boxed{9^{9^{9^9}}}",
            "exponent": "The answer is 1e999999999999.",
            "digits": "The answer is " + "8" * 100_000,
            "boxes": r"\boxed{82" * 10_000,
            "markers": "answer: 83 " * 10_000,
            "nothing": "The answer is",
        },
    ),
    ("multiple_choice", "options"): (
        CHOICE,
        {},
        {
            "every letter": "A B C D",
            "every letter in a box": r"\boxed{A, B, C, D}",
            "two letters": "The answer is B or C.",
            "letter and another text": "The answer is C) blue.",
            "every text": "The answer is red, blue, green or grey.",
            "negation": "The answer is not C, it is A.",
            "boxes, wrong last": r"\boxed{C} \boxed{B}",
            "letter in a word": "The answer is Cobalt.",
            "letter in running text": "C is the third letter.",
            "number": "The answer is 2.",
            "Cyrillic letter": "The answer is С.",  # the letter Es
            "full-width letter": "The answer is Ｃ.",
            "prompt": "Which colour is grass? A) red B) blue C) green D) grey",
            "empty box": r"\boxed{}",
            "filler": "green " * 5_000 + "\nThe answer is red.",
        },
    ),
    ("exact_match", "pattern"): (
        NUMBER,
        {"pattern": r"answer is (\S+)$"},
        {
            "mention": "82 might be it, but the answer is 83",
            "restated": "the answer is 37+45",
            "spaces": "the answer is 8 2",
            "zero-width space": "the answer is 8\u200b2",
            "wrong last": "the answer is 82 and the answer is 83",
            "no match": "82",
            "Arabic digits": "the answer is ٨٢",
        },
    ),
    ("sql", "databases"): (
        QUERY,
        {},
        {
            "constant of one database": "SELECT 6",
            "every sum there is": "SELECT 6 UNION SELECT 9",
            "table dropped": "DROP TABLE t",
            "rows written": "DELETE FROM t",
            "two statements": "DELETE FROM t; SELECT 6",
            "schema read": "SELECT sql FROM sqlite_master",
            "file attached": "ATTACH 'a.db' AS a",
            "limits changed": "PRAGMA writable_schema = 1",
            "chance": "SELECT abs(random()) % 10",
            "endless": ENDLESS,
            "memory": "SELECT zeroblob(1000000000)",
            "nothing": "",
            "comment": "-- SELECT sum(a) FROM t",
            "text for a number": "SELECT CAST(sum(a) AS TEXT) FROM t",
            "more columns": "SELECT sum(a), 1 FROM t",
        },
    ),
    ("regex", "pattern"): (
        {"pattern": "answer: [0-9]+"},
        {},
        {
            "around it": "I will not say answer: 5",
            "Arabic digits": "answer: ٥",
            "pattern": "answer: [0-9]+",
            "empty": "",
        },
    ),
}
CASES = [
    pytest.param(name, payload, options, response, id=f"{name}-{cause}")
    for (name, _), (payload, options, hacks) in HACKS.items()
    for cause, response in hacks.items()
]
HONEST = [
    (
        "numeric",
        NUMBER,
        {},
        ["The answer is 82.", "37 + 45 = 82 so the answer is 37 + 45 = 82.", r"\boxed{82.0}", "#### 8.2e1"],
    ),
    ("multiple_choice", CHOICE, {}, ["The answer is C.", r"\boxed{green}", "C) green"]),
    ("exact_match", NUMBER, {"pattern": r"answer is (\S+)$"}, ["so the answer is 82"]),
    ("sql", QUERY, {}, ["```sql\nSELECT total(a) FROM t\n```", "SELECT sum(b.a) FROM t AS b"]),
    ("regex", {"pattern": "answer: [0-9]+"}, {}, ["answer: 82"]),
]


def grade(name, payload, options, response) -> Score:
    reward = build_reward(name, options)
    prompt = Prompt(id="p", task="t", messages=(Message("user", "What is 37+45?"),), payload=payload)
    return reward(prompt, Transcript([Message("assistant", response)]))


@pytest.mark.parametrize(("name", "payload", "options", "response"), CASES)
def test_a_hack_is_worth_nothing(name, payload, options, response):
    assert grade(name, payload, options, response).value == 0


@pytest.mark.parametrize(("name", "payload", "options", "responses"), HONEST)
def test_an_honest_answer_is_paid(name, payload, options, responses):
    assert [grade(name, payload, options, response).value for response in responses] == [1.0] * len(responses)


def test_causes_are_many():
    assert len(CASES) >= 60
