"""Prompt sources: what comes out, and one clear line for what is wrong."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.types import Message, Prompt
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.prompts import load_prompts
from tests.raising import raises_with

SYSTEM = Message("system", "Be brief.")


def load(source: str, seed: int = 0, system: str | None = None, name: str = "sums", **prompts: Any) -> list[Prompt]:
    config = PromptsConfig(source=source, **prompts)
    return load_prompts(TaskConfig(name=name, prompts=config, system=system), config, seed)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def given_rows(split: str, rows: Any = (), prefix: str = "") -> Iterator[Any]:
    yield from rows


OWN = f"{__name__}:given_rows"


def test_jsonl_rows_become_prompts(tmp_path: Path) -> None:
    conversation = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+1?"},
    ]
    path = write(tmp_path / "a.jsonl", {"prompt": "2+2?", "answer": 4}, "", {"prompt": conversation, "id": 17})
    first, second = load("jsonl", path=path, system="Be brief.")
    assert first.messages == (SYSTEM, Message("user", "2+2?"))
    assert first.payload == {"prompt": "2+2?", "answer": 4}
    assert first.task == "sums" and first.id.startswith("sums/")
    assert second.messages == (SYSTEM, Message("user", "1+1?"), Message("assistant", "2"), Message("user", "+1?"))
    assert second.id == "sums/17"
    assert first.seed != second.seed


def test_a_directory_holds_a_file_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"prompt": "a"}, {"prompt": "b"})
    write(tmp_path / "test.jsonl", {"prompt": "c"})
    assert [p.messages[0].content for p in load("jsonl", path=str(tmp_path), split="test")] == ["c"]
    with raises_with(DataError, path=tmp_path / "validation.jsonl"):
        load("jsonl", path=str(tmp_path), split="validation")


def test_files_of_a_split_are_numbered(tmp_path: Path) -> None:
    for name in ("train.jsonl", "train-00001-of-00002.jsonl", "train_2.jsonl", "train_old.jsonl", "training.jsonl"):
        write(tmp_path / name, {"prompt": name})
    found = {prompt.messages[0].content for prompt in load("jsonl", path=str(tmp_path))}
    assert found == {"train.jsonl", "train-00001-of-00002.jsonl", "train_2.jsonl"}


@pytest.mark.parametrize(
    "last, said",
    [
        ({"role": "assistant", "content": "2"}, "gives the answer away"),
        ({"role": "tool", "content": "2", "tool_call_id": "1"}, "tool_call_id"),
    ],
)
def test_a_prompt_ends_before_its_answer(tmp_path: Path, last: dict[str, str], said: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "1+1?"}, last]})
    with raises_with(DataError, match=said, column="prompt"):
        load("jsonl", path=path)


def test_parquet_and_another_column(tmp_path: Path) -> None:
    table = pa.table({"question": ["a", "b"], "answer": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    prompts = load("parquet", path=str(tmp_path / "data.parquet"), prompt_column="question", limit=1)
    assert [prompt.payload for prompt in prompts] == [{"question": "a", "answer": 1}]
    (tmp_path / "bad.parquet").write_text("not at all")
    with raises_with(DataError, path=tmp_path / "bad.parquet"):
        load("parquet", path=str(tmp_path / "bad.parquet"))


def test_huggingface_loads_a_local_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y"})
    options = {"data_files": {"train": path}, "cache_dir": str(tmp_path / "cache")}
    assert [p.messages[0].content for p in load("huggingface", path="json", options=options)] == ["x", "y"]
    with raises_with(DataError, match="'tset'", path="json"):
        load("huggingface", path="json", split="tset", options=options)


@pytest.mark.reasoning_gym
def test_reasoning_gym_splits_share_no_problem() -> None:
    options = {"size": 40, "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    splits = [
        load("reasoning_gym", path="chain_sum", split=s, options=options) for s in ("train", "validation", "test")
    ]
    texts = [{prompt.messages[0].content for prompt in split} for split in splits]
    assert [len(text) for text in texts] == [40, 40, 40]
    assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])
    assert splits[0][0].payload["dataset"]["name"] == "chain_sum"
    assert [p.id for p in load("reasoning_gym", path="chain_sum", options=options)] == [p.id for p in splits[0]]


@pytest.mark.reasoning_gym
@pytest.mark.parametrize(
    "path, options, word",
    [
        ("no_such_set", {}, "no_such_set"),
        ("chain_sum", {"terms": 2}, "'terms'"),
        ("chain_sum", {"size": 500, "max_terms": 2, "max_digits": 1}, "500 "),
    ],
)
def test_reasoning_gym_errors(path: str, options: dict[str, Any], word: str) -> None:
    with raises_with(DataError, match=word, path=path):
        load("reasoning_gym", path=path, options=options)


@pytest.mark.reasoning_gym
def test_unknown_split_is_refused() -> None:
    with raises_with(ConfigError, match="'sums'", key="split", value="dev", valid=("train", "validation", "test")):
        load("reasoning_gym", path="chain_sum", split="dev")


def test_a_users_source_that_raises_is_named_with_file_and_line(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "broken_source.py").write_text(
        "def rows(split):\n    yield {'prompt': 'p'}\n    raise KeyError('column')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with raises_with(DataError, match=r"KeyError: 'column' \(.*broken_source\.py:3\)"):
        load("broken_source:rows")


def test_a_users_source_may_yield_rows_and_prompts() -> None:
    ready = Prompt(id="mine", task="other", messages=(Message("user", "q"),), payload=(1, 2), seed=9)
    row, prompt = load(OWN, system="Be brief.", options={"rows": [{"prompt": "p"}, ready]})
    assert row.payload == {"prompt": "p"}
    assert (prompt.id, prompt.task, prompt.seed, prompt.payload) == ("sums/mine", "sums", 9, (1, 2))
    assert prompt.messages == (SYSTEM, Message("user", "q"))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_ids_are_distinct_and_do_not_depend_on_the_order(numbers: list[int], random: Any) -> None:
    rows = [{"prompt": "same", "id": "same", "answer": n} if n < 2 else {"prompt": f"q{n}"} for n in numbers]
    shuffled = rows[:]
    random.shuffle(shuffled)
    ids, again = (
        sorted((prompt.id, str(prompt.payload), prompt.seed) for prompt in load(OWN, options={"rows": some}))
        for some in (rows, shuffled)
    )
    assert ids == again
    assert len({id for id, _, _ in ids}) == len(ids)


@pytest.mark.parametrize(
    "rows, row, column, word",
    [
        ([], None, "", "'train'"),
        ([{"promt": "a", "answer": 1}], 1, "prompt", "'promt'"),
        ([{"prompt": "a"}, {"prompt": 3}], 2, "prompt", "int"),
        ([{"prompt": []}], 1, "prompt", "list"),
        ([{"prompt": [{"role": "user"}]}], 1, "prompt", "'content'"),
        ([{"prompt": [{"role": "robot", "content": "x"}]}], 1, "prompt", "'robot'"),
        (["text"], 1, "", "str"),
    ],
)
def test_rows_that_are_wrong(rows: list[Any], row: int | None, column: str, word: str) -> None:
    with raises_with(DataError, match=word, row=row, column=column) as caught:
        load(OWN, options={"rows": rows})
    assert "task 'sums'" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "lines, line",
    [
        (['{"prompt": "a"}', "{oops"], ":2"),
        (["[1]"], ":1"),
        ([], ""),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, lines: list[str], line: str) -> None:
    path = write(tmp_path / "a.jsonl", *lines)
    with raises_with(DataError, path=path + line):
        load("jsonl", path=path)


@pytest.mark.parametrize(
    "error, prompts, fields",
    [
        (DataError, {"source": "jsonl", "path": "no/such.jsonl"}, {"path": "no/such.jsonl"}),
        (ConfigError, {"source": "jsonl"}, {"key": "path"}),
        (ConfigError, {"source": "json"}, {"value": "json", "suggestions": ("jsonl",)}),
        (ConfigError, {"source": OWN, "options": {"row": []}}, {"key": "options", "value": {"row": []}}),
        (ConfigError, {"source": OWN, "path": "x"}, {"key": "options", "value": {"path": "x"}}),
    ],
)
def test_configurations_that_are_wrong(error: type[Any], prompts: dict[str, Any], fields: dict[str, Any]) -> None:
    with raises_with(error, **fields):
        load(**prompts)


def test_loading_imports_only_what_the_source_needs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x"})
    program = f"""
import sys
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.prompts import load_prompts
config = PromptsConfig(source="jsonl", path={path!r})
assert load_prompts(TaskConfig(name="t", prompts=config), config, 0)
print(*({{"torch", "datasets", "pyarrow", "transformers", "reasoning_gym", "math_verify"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
