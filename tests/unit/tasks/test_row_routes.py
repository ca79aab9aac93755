"""Rows that name their task: whose prompts they are, and where a mixture finds them."""

import json
from pathlib import Path

import pytest

from antiphon.core.errors import DataError
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.prompts import load_prompts


def tasks(tmp_path: Path) -> list[TaskConfig]:
    """`a` has rows in both files and a system message; `b` has no prompts of its own."""
    mixed = [{"prompt": f"{n}", "id": n, "kind": "ab"[n % 2]} for n in range(4)]
    (tmp_path / "mixed.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in mixed))
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "0", "id": 0, "kind": "a"}))
    sources = [PromptsConfig(source="jsonl", path=str(tmp_path / f"{name}.jsonl")) for name in ("mixed", "own")]
    return [
        TaskConfig(name="mixed", prompts=sources[0], route="kind"),
        TaskConfig(name="a", prompts=sources[1], system="Be brief."),
        TaskConfig(name="b"),
    ]


def test_a_row_has_the_task_that_it_names_and_an_id_of_its_data_set(tmp_path: Path) -> None:
    mixed, own, other = tasks(tmp_path)
    prompts = load_prompts(mixed, mixed.prompts, 0, [mixed, own, other])
    assert [(prompt.id, prompt.task) for prompt in prompts] == [
        ("mixed/0", "a"),
        ("mixed/1", "b"),
        ("mixed/2", "a"),
        ("mixed/3", "b"),
    ]
    assert [[m.content for m in prompt.messages] for prompt in prompts[:2]] == [["Be brief.", "0"], ["1"]]
    (alone,) = load_prompts(own, own.prompts, 0)
    assert (alone.seed, alone.messages, alone.payload) == (prompts[0].seed, prompts[0].messages, prompts[0].payload)


def test_a_mixture_draws_data_sets_and_finds_prompts_by_task(tmp_path: Path) -> None:
    mixture = Mixture.load(tasks(tmp_path), 0)
    drawn = [mixture.next() for _ in range(8)]
    assert sorted(prompt.id for prompt in drawn) == ["a/0"] * 4 + [f"mixed/{n}" for n in range(4)]
    assert all(mixture.find(prompt.task, prompt.id, prompt.epoch) == prompt for prompt in drawn)
    assert {prompt.id for prompt in mixture.sample("b", 9)} == {"mixed/1", "mixed/3"}
    assert {prompt.id for prompt in mixture.sample("a", 9)} == {"mixed/0", "mixed/2", "a/0"}
    again = Mixture.load(tasks(tmp_path), 0)
    again.restore(json.loads(json.dumps(mixture.state())))
    assert again.next() == mixture.next()


def test_nothing_is_drawn_of_a_task_without_weight_and_no_row_to_train_on_names_it(tmp_path: Path) -> None:
    mixed, own, other = tasks(tmp_path)
    watched = own.model_copy(update={"weight": 0.0})
    with pytest.raises(DataError, match=r"row 1, column 'kind': names 'a': a row can name b"):
        Mixture.load([mixed, watched, other], 0)
    assert len(load_prompts(mixed, mixed.prompts, 0, [mixed, watched, other])) == 4  # as test prompts they may
    mixture = Mixture.load([watched, other.model_copy(update={"prompts": own.prompts})], 0)
    assert {mixture.next().task for _ in range(4)} == {"b"} and not list(mixture.sample("a", 1))
