"""Data sets: what is a copy, what overlaps a test question, how rows are divided, mixed and chosen by difficulty."""

import json
import random
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from antiphon.cli.app import app
from antiphon.core.errors import ConfigError
from antiphon.tasks.data.overlap import find_duplicates, find_overlaps, words_of
from antiphon.tasks.data.selection import mix, split_of

PLAIN = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=9).map(" ".join), max_size=6)


def run(*arguments: object, code: int = 0) -> str:
    """Run `antiphon data` and return what it prints, its spaces made single."""
    done = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return " ".join(done.output.replace("│", " ").split())


def write(path: Path, *rows: dict) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def read(path: Path) -> list[dict]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pq.read_table(path).to_pylist()


@given(PLAIN)
def test_duplicates_are_those_of_comparing_every_pair(questions: list[str]) -> None:
    expected: dict[int, int] = {}
    for one, other in combinations(range(len(questions)), 2):
        if questions[one] == questions[other]:
            expected.setdefault(other, one)
    assert find_duplicates(questions) == expected
    assert find_duplicates([f"  {question.upper()}?!" for question in questions]) == expected


@given(PLAIN, PLAIN, st.integers(1, 6))
def test_overlaps_are_those_of_searching_texts_in_texts(questions: list[str], tests: list[str], n: int) -> None:
    """One letter is one word, so words in a row are a part of the text without its spaces."""
    texts, others = ([text.replace(" ", "") for text in given] for given in (questions, tests))
    expected = set()
    for number, text in enumerate(texts):
        for other in others:
            size = min(n, len(other))
            parts = [other[at : at + size] for at in range(len(other) - size + 1)]
            if text == other or (size >= min(4, n) and any(part in text for part in parts)):
                expected.add(number)
    assert {each.row for each in find_overlaps(questions, tests, n)} == expected


def test_words_are_compared_without_case_accents_and_punctuation() -> None:
    assert words_of("Où est-ce, l'ÉTÉ?") == words_of("ou est-ce l ete")
    assert words_of("2+3=5") == ("2", "+", "3", "=", "5") != words_of("2-3=5")
    assert words_of("“What is 5!?” he said…") == words_of("what is 5! he said.")
    assert words_of("１−２？") == words_of("1 - 2") and words_of("(1,2)") == words_of("( 1, 2 )")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(2+3)*4", "2+(3*4)"),
        ("5!", "5"),
        ("(2n)! / n", "(2n) / n"),
        ("求n!", "求n"),
        ("10²", "102"),
        ("x₁", "x1"),
        ("1.5+2", "1,5+2"),
        ("3:4", "3 4"),
        ("3≤4", "3≥4"),
        ("a≠b", "a=b"),
        ("a != b", "a = b"),
        ("50%", "50"),
        ("f'(2)", "f(2)"),
        ("か", "が"),
    ],
)
def test_symbols_tell_questions_apart(one: str, other: str) -> None:
    assert not find_duplicates([f"What is {one}?", f"What is {other}?"])
    assert find_duplicates([f"What is {one}?", f"what is {one}"]) == {1: 0}


def test_no_question_is_left_of_a_set_without_itself(tmp_path: Path) -> None:
    questions = ["中国的首都是哪里？", "Define entropy.", "5!", "What is the capital of France?", "你好"]
    file = write(tmp_path / "a.jsonl", *({"prompt": question} for question in questions))
    assert "0 of 5 rows" in run("clean", file, "--against", file, "--out", tmp_path / "b.jsonl")
    long = "小明有五个苹果，他给了小红两个苹果，请问小明还剩下几个苹果"  # without a space
    assert [each.row for each in find_overlaps([f"题目：{long}？", "小明有五个梨"], [f"{long}。为什么"])] == [0]


def test_clean_removes_copies_and_test_questions(tmp_path: Path) -> None:
    long = "a train leaves the station at nine and travels sixty miles each hour for three hours"
    rows = [{"q": "What is 2+2?"}, {"q": "what is 2 + 2"}, {"q": f"Riddle: {long}. How far?"}, {"q": "What is 2+3?"}]
    file, test = write(tmp_path / "a.parquet", *rows), write(tmp_path / "t.jsonl", {"q": f"{long}; where is it?"})
    said = run("report", file, "--column", "q", "--against", test)
    assert "row 3 overlaps row 1" in said and "repeated questions 1" in said and "rows 4" in said
    said = run("clean", file, "--column", "q", "--against", test, "--out", tmp_path / "b.jsonl")
    assert "2 of 4 rows; 1 repeated, 1 overlapping" in said
    assert read(tmp_path / "b.jsonl") == [rows[0], rows[3]]


def test_split_keeps_equal_questions_together_and_has_the_shares(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "n": n} for n in range(2000)]
    file = write(tmp_path / "a.jsonl", *rows)
    run("split", file, "--out", tmp_path / "parts", "--test", "0.2", "--validation", "0.1")
    parts = {name: read(tmp_path / "parts" / f"{name}.jsonl") for name in ("train", "validation", "test")}
    assert sorted(row["n"] for rows in parts.values() for row in rows) == list(range(2000))
    sizes = {name: len(rows) / 2000 for name, rows in parts.items()}
    assert sizes == pytest.approx({"train": 0.7, "validation": 0.1, "test": 0.2}, abs=0.04)
    shares = {"test": 0.2, "validation": 0.1}
    assert all(split_of(f"what IS {row['n']}+1", shares) == name for name, rows in parts.items() for row in rows)
    # A larger share of test questions takes some from the others, and gives back none.
    assert all(split_of(f"What is {row['n']} + 1?", {"test": 0.4}) == "test" for row in parts["test"])


def test_split_leaves_no_part_of_an_earlier_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} + 1?"} for n in range(40)]
    file, parts = write(tmp_path / "a.jsonl", *rows), tmp_path / "new" / "parts"
    run("split", file, "--out", parts, "--test", "0.3", "--validation", "0.3")
    assert (parts / "validation.jsonl").exists()
    said = run("split", file, "--out", parts, "--test", "0.3")
    assert "of an earlier split is removed" in said and not (parts / "validation.jsonl").exists()
    assert len(read(parts / "train.jsonl")) + len(read(parts / "test.jsonl")) == 40
    test = parts / "test.jsonl"
    assert "part that stays empty" in run("split", test, "--out", parts, "--test", "0", code=2) and test.exists()


@given(
    st.lists(st.tuples(st.integers(3, 30), st.sampled_from([1.0, 2.0, 0.5])), min_size=1, max_size=4), st.integers(0, 9)
)
def test_a_mix_has_the_proportions_and_no_row_twice(shape: list[tuple[int, float]], seed: int) -> None:
    sets = [[{"set": number, "row": row} for row in range(size)] for number, (size, _) in enumerate(shape)]
    weights = [weight for _, weight in shape]
    mixed = mix(sets, weights, seed=seed)
    counts = Counter(row["set"] for row in mixed)
    assert len({(row["set"], row["row"]) for row in mixed}) == len(mixed)
    for number, weight in enumerate(weights):
        assert abs(counts[number] - len(mixed) * weight / sum(weights)) <= 1
    with pytest.raises(ConfigError, match="there can be"):
        mix(sets, weights, count=sum(size for size, _ in shape) * 10)
    assert mixed == mix(sets, weights, seed=seed)


def test_mix_reads_and_writes_either_format(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path / "a.jsonl", *({"n": n} for n in range(6))),
        write(tmp_path / "b.parquet", {"n": 7}, {"n": 8}),
    )
    assert "6 rows" in run("mix", f"{one}=2", f"{other}=1", "--out", tmp_path / "c.parquet")
    assert sum(row["n"] > 6 for row in read(tmp_path / "c.parquet")) == 2


def solved(tmp_path: Path, rates: list[float]) -> tuple[list[dict], Path, Path]:
    """Rows, their file, and samples of them with these shares of successes among four, in any order."""
    rows = [{"prompt": f"{n}?", "n": n} for n in range(len(rates))]
    samples = [
        {"row": json.dumps(row), "success": k < rate * 4}
        for row, rate in zip(rows, rates, strict=True)
        for k in range(4)
    ]
    random.Random(0).shuffle(samples)
    return rows, write(tmp_path / "rows.jsonl", *rows), write(tmp_path / "samples.parquet", *samples)


def test_rows_are_chosen_by_how_often_they_were_solved(tmp_path: Path) -> None:
    rates = [0.0, 0.25, 1.0, 0.5, 0.75, 0.5, 0.0, 0.5]
    rows, file, samples = solved(tmp_path, rates)
    out = tmp_path / "out.jsonl"
    run("stratify", file, "--samples", samples, "--out", out, "--least", "0.25", "--most", "0.75")
    expected = [row | {"pass_rate": rate} for row, rate in zip(rows, rates, strict=True) if 0.25 <= rate <= 0.75]
    assert read(out) == expected
    run("stratify", file, "--samples", samples, "--out", out, "--each", "1")
    assert sorted(row["pass_rate"] for row in read(out)) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [row["n"] for row in read(out)] == sorted(row["n"] for row in read(out))  # in the order of the data set
    said = run("report", file, "--samples", samples)
    assert f"pass@1 {fmean(rates):.4f}" in said and f"pass@4 {fmean(rate > 0 for rate in rates):.4f}" in said
    assert "rows solved at 0.4 to 0.6 3" in said and "rows solved at 0.0 to 0.2 2" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("report", "rows.jsonl", "--column", "question"), "column 'question' has no question; the row has prompt, n"),
        (("clean", "rows.jsonl", "--out", "x.csv"), "'x.csv' must end in .jsonl or .parquet"),
        (("mix", "rows.jsonl", "--out", "x.jsonl"), "'rows.jsonl' must be FILE=WEIGHT with a weight above 0"),
        (("mix", "rows.jsonl=1", "--rows", "99", "--out", "x.jsonl"), "there can be 2"),
        (("stratify", "rows.jsonl", "--samples", "rows.jsonl", "--out", "x.jsonl"), "is no file of antiphon generate"),
        (
            ("stratify", "more.jsonl", "--samples", "samples.parquet", "--out", "x.jsonl"),
            "row 3: there are no samples of it",
        ),
        (("report", "empty.jsonl"), "empty.jsonl has no rows"),
        (("split", "rows.jsonl", "--out", "p", "--test", "0.7", "--validation", "0.4"), "more than the whole"),
    ],
)
def test_mistakes_are_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    rows, _, _ = solved(tmp_path, [0.0, 1.0])
    write(tmp_path / "more.jsonl", *rows, {"prompt": "new"})
    write(tmp_path / "empty.jsonl")
    monkeypatch.chdir(tmp_path)
    assert said in run(*arguments, code=2)
    assert not (tmp_path / "x.jsonl").exists()
