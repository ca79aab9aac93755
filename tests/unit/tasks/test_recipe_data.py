"""The data and models that recipes bring along."""

import asyncio
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from antiphon.core.config import load
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.types import AttemptId, Message, PolicyVersion, Prompt
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.episode_loop import EpisodeContext
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.run.config import RunConfig
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.environments import environment_factory
from antiphon.tasks.prompts import load_prompts
from antiphon.tasks.rendering import Renderer
from recipes.grid_worlds import boards
from recipes.grid_worlds import model as grid_model
from recipes.smollm2_arithmetic import model as smollm2
from recipes.smollm2_arithmetic import task as chat_task
from recipes.tiny_arithmetic import model, task
from recipes.webshop import model as shop_model
from recipes.webshop import shop
from tests.raising import raises_with


def test_problems_are_right_and_splits_disjoint() -> None:
    splits = {split: list(task.problems(split)) for split in ("train", "validation", "test")}
    prompts = [{row["prompt"] for row in rows} for rows in splits.values()]
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == 90 * 90
    assert [round(len(some) / 8100, 1) for some in prompts] == [0.8, 0.1, 0.1]
    assert task.respond(37, 45) == "12,8:82"
    for row in splits["test"]:
        a, b = map(int, row["prompt"][:-1].split("+"))
        units, tens, total = map(int, row["answer"].replace(":", ",").split(","))
        assert row["response"] == row["answer"]
        assert total == a + b == 10 * tens + units % 10
        assert len(row["prompt"]) == 6 and len(row["answer"]) <= 9
    with raises_with(ConfigError, key="split", value="dev", valid=("train", "validation", "test")):
        next(task.problems("dev"))


def test_problems_load_as_prompts() -> None:
    config = PromptsConfig(source="recipes.tiny_arithmetic.task:problems", split="test", limit=3)
    prompts = load_prompts(TaskConfig(name="sums", prompts=config), config, 0)
    assert len(prompts) == 3 and prompts[0].payload["answer"]


def test_the_tiny_model_follows_its_seed_and_reads_characters(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        model.build(tmp_path / name, seed)
    assert torch.equal(before, torch.random.get_rng_state())
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert loaded.dtype is torch.float32 and 800_000 < loaded.num_parameters() < 900_000
    tokenizer, renderer = AutoTokenizer.from_pretrained(tmp_path / "a"), Renderer(tmp_path / "a")
    assert not renderer.chat and renderer.eos_ids == (tokenizer.eos_token_id,) == (loaded.config.eos_token_id,)
    tokens = np.append(renderer.encode_prompt([Message("user", "37+45=")]), renderer.encode_response("12,8:82"))
    assert len(tokens) == 6 + 7 + 1 and tokens.max() < loaded.config.vocab_size
    assert tokenizer.encode("37+45=12,8:82<eos>") == tokens.tolist()
    assert renderer.decode(tokens) == "37+45=12,8:82"


@pytest.mark.reasoning_gym
def test_chat_problems_have_two_turns_and_disjoint_splits() -> None:
    splits = [list(chat_task.problems(split, size=60)) for split in ("train", "validation", "test")]
    questions = [{row["prompt"][-1]["content"] for row in rows} for rows in splits]
    assert [len(some) for some in questions] == [60, 60, 60] and len(set.union(*questions)) == 180
    assert not {f"{shown} =" for shown in chat_task.SHOWN} & set.union(*questions)
    row = splits[0][0]
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "user", "assistant", "user"]
    assert row["response"] == f"{row['prompt'][-1]['content']} {row['answer']}"
    left, right = row["metadata"]["expression"].split(" + ")
    assert int(row["answer"]) == int(left) + int(right) < 200


def test_the_missing_wheel_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_wheel")
    with pytest.raises(DataError, match="pip install"):
        smollm2.build(tmp_path, 0)


def test_shops_are_in_one_split_and_their_pages_can_be_read(tmp_path: Path) -> None:
    pytest.importorskip("rapidfuzz")
    rows = [list(shop.wishes(split)) for split in ("train", "validation", "test")]
    shops = [{row["shop"] for row in some} for some in rows]
    assert sum(map(len, shops)) == len(set.union(*shops)) == shop.SHOPS and all(shops)
    heard = {row["prompt"] for row in rows[0]}
    assert list(shop.wishes("test", unheard=True)) == [row for row in rows[2] if row["prompt"] not in heard] != []
    config = PromptsConfig(source="recipes.webshop.shop:wishes", split="test", limit=40)
    prompts = load_prompts(TaskConfig(name="shop", prompts=config), config, 0)
    shop_model.build(tmp_path)
    renderer = Renderer(tmp_path)
    for prompt in prompts:
        visit, over = environment_factory("recipes.webshop.shop:Visit", {"turns": 12})(prompt), False
        page, _ = visit.reset(0)
        while not over:
            text, action = prompt.messages[0].content + page, visit.expert()
            read, said = renderer.encode_prompt([Message("user", text)]), renderer.encode_response(action)
            assert renderer.decode(read) == text and renderer.decode(said) == action and len(said) <= 8
            page, reward, over, _, info = visit.step(action)
        assert reward == 1.0 and info["success"]
    assert renderer.decode(renderer.encode(visit_says := "This is no action.\nNot here.\nnothing found")) == visit_says


def test_the_unpractised_customer_errs() -> None:
    pytest.importorskip("rapidfuzz")
    rows = list(islice(shop.examples("train"), 2_000))
    again = list(islice(shop.examples("train"), 2_000))
    assert rows == again
    first = [row["response"] for row in rows if row["prompt"].endswith("search")]
    bought = [row for row in rows if row["response"] == shop.BUY]
    assert 0.5 < sum(" " not in response for response in first) / len(first) < 0.8
    assert 0.1 < sum(row["prompt"].count("(") < 2 for row in bought) / len(bought) < 0.9


@pytest.mark.parametrize("game", ["frozen_lake", "sokoban"])
def test_no_layout_of_a_board_is_in_two_splits(game: str) -> None:
    """Of the boards that attempts are shown first, whatever moves on them put aside."""
    config = load(Path(boards.__file__).with_name(f"{game}.yaml"), model=RunConfig)
    options = config.tasks[0].environment_options
    assert config.tasks[0].prompts.options == {"game": game, "options": options}
    layouts: list[set[str]] = []
    for split in ("train", "validation", "test"):
        prompts = list(boards.boards(split, game, options, number=400))
        shown = [first_board(replace(prompt, task=game), config) for prompt in prompts]
        assert prompts and set("".join(shown)) <= set(grid_model.CHARACTERS)
        layouts.append({re.sub("[PX]", "_", re.sub("[S√]", "G", board)) for board in shown})
    assert sum(map(len, layouts)) == len(set.union(*layouts)) > 200


def first_board(prompt: Prompt, config: RunConfig) -> str:
    """What an attempt at the prompt puts to the policy; it ends there, for want of room."""
    shown = []

    class Tokenizer:
        def encode_prompt(self, messages: Sequence[Message]) -> np.ndarray:
            shown.append(messages[-1].content)
            return np.zeros(2, np.int32)

    (task,) = config.tasks
    episodes = EpisodeRunner(
        EpisodeContext(
            encoder=PromptEncoder(cast(Any, Tokenizer())),
            generate=cast(Any, None),
            config=config.rollout,
            max_length=1,
            seed=0,
        ),
        grade=cast(Any, None),
        environments={task.name: environment_factory(str(task.environment), task.environment_options)},
    )
    asyncio.run(episodes.run(prompt, AttemptId(0, 0, 0), PolicyVersion(0, 0)))
    return shown[0]


def test_clumsy_player_varies_and_expert_does_not() -> None:
    lakes = {"number": 300, "options": {"size": 3, "turns": 6, "instructions": False, "words": "UDLR"}}

    def said_on_a_board(mistakes: float) -> float:
        rows = list(boards.moves("train", mistakes, frozen_lake=lakes))
        return len({(row["prompt"], row["response"]) for row in rows}) / len({row["prompt"] for row in rows})

    assert said_on_a_board(0.0) == 1 < said_on_a_board(0.25)


converted = sorted((Path.home() / ".cache" / "antiphon").glob("SmolLM2*/model.safetensors"))


@pytest.mark.skipif(not converted, reason="SmolLM2 has not been converted on this machine; the recipe does it")
def test_smollm2_renders_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for file in converted[0].parent.iterdir():  # all but the weights, which are large
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    tokenizer, renderer = AutoTokenizer.from_pretrained(tmp_path), Renderer(tmp_path)
    talk = [Message("user", "What is 2+3?"), Message("assistant", "5"), Message("user", "Naïve café, 3 ≠ 4\n\n ok")]
    plain = [{"role": message.role, "content": message.content} for message in talk]
    expected = tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    tokens = renderer.encode_prompt(talk)
    assert tokens.tolist() == expected
    assert renderer.decode(tokens) == tokenizer.decode(expected, skip_special_tokens=True)
    assert renderer.eos_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    pieces = [
        renderer.encode_prompt(talk[:1]),
        renderer.encode_response("5"),
        renderer.encode_observation(talk[:2], talk[2]),
    ]
    assert np.concatenate(pieces).tolist() == expected
