"""TRL's trainer on ours: every field of its configuration, the mapping of values, and rewards of its signature."""

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import trl

from antiphon.compat.trl import GRPOConfig, GRPOTrainer
from antiphon.compat.trl.config import read_fields
from antiphon.compat.trl.mapping import Sizes, map_fields
from antiphon.compat.trl.options import FORMER, MAPPED, NO_EFFECT, REFUSED, render_table
from antiphon.compat.trl.trainer import LOGGED
from antiphon.core.errors import ConfigError
from antiphon.core.types import Message, Prompt, ScoreStatus
from antiphon.record.metric_descriptions import METRICS
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.trl import TrlReward, check_functions
from tests.raising import raises_with

ROWS = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": str(n + 1)} for n in range(12)]
FIELDS = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}


def reward_length(completions, **columns):
    return [float(len(completion[0]["content"])) for completion in completions]


def trainer(model, **given):
    arguments = {"model": str(model), "reward_funcs": reward_length, "train_dataset": ROWS}
    return GRPOTrainer(**arguments | given)


@pytest.fixture
def chat_model(model, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    target = tmp_path / "chat"
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(target)
    return target


def test_every_field_of_trl_has_one_answer():
    ours = [*MAPPED, *NO_EFFECT, *REFUSED]
    assert sorted(ours) == sorted(FIELDS)


def test_former_fields_are_told_from_unknown_ones():
    assert not FORMER.keys() & FIELDS.keys()
    with raises_with(ConfigError, key="GRPOConfig.max_prompt_length", match="max_length"):
        GRPOConfig(max_prompt_length=512)


@pytest.mark.parametrize("field", [{"optim": "adafactor"}, {"gradient_accumulation_steps": 0}])
def test_values_without_a_counterpart_are_refused(field):
    (name,) = field
    with raises_with(ConfigError, key=f"GRPOConfig.{name}"):
        map_fields(read_fields(GRPOConfig(**field)), 100)


def test_a_mapping_of_splits_is_no_data_set():
    with raises_with(ConfigError, key="train_dataset", value=["train", "test"]):
        GRPOTrainer("model", len, train_dataset={"train": [{"prompt": "a"}], "test": []})


def test_defaults_are_those_of_trl():
    found = {name: option.default for name, option in MAPPED.items()}
    assert found == {name: FIELDS[name].default for name in MAPPED}


@pytest.mark.parametrize("make", [trl.GRPOConfig, GRPOConfig, dict])
def test_both_configurations_map_alike(make, tmp_path):
    given = {
        "output_dir": str(tmp_path / "mine"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_generations": 6,
        "steps_per_generation": 6,
        "num_iterations": 2,
        "max_steps": 21,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "loss_type": "dr_grpo",
        "scale_rewards": False,
        "epsilon_high": 0.28,
        "delta": 1.5,
        "save_steps": 8,
        "logging_steps": 1,
        "seed": 3,
        "beta": 0.04,
        "use_bias_correction_kl": False,
        "use_cpu": True,
        "max_grad_norm": 0.0,
    }
    found = map_fields(read_fields(make(**given)), 100)
    assert (found["name"], found["record"]["directory"], found["seed"]) == ("mine", str(tmp_path), 3)
    assert found["rollout"]["groups_per_step"] == 4 and found["rollout"]["group_size"] == 6  # 24 completions
    learner = found["learner"]
    assert (learner["minibatches"], learner["epochs"]) == (2, 2)
    assert found["steps"] == 6  # 21 optimizer steps, 4 a generation
    assert learner["optimizer"]["warmup_steps"] == 3 and learner["optimizer"]["schedule"] == "cosine"
    assert learner["optimizer"]["max_grad_norm"] == math.inf, "0 turns clipping off there"
    algorithm = found["algorithm"]
    assert (algorithm["advantage"], algorithm["aggregation"]) == ("dr_grpo", "sequence_mean_token_sum_norm")
    assert (algorithm["clip_low"], algorithm["clip_high"], algorithm["dual_clip"]) == (0.2, 0.28, 1.5)
    assert algorithm["kl"] == {"coefficient": 0.04} and found["checkpoint"]["every"] == 2


@pytest.mark.parametrize(("schedule", "warmup"), [("constant", 0), ("constant_with_warmup", 5), ("linear", 5)])
def test_the_constant_schedule_of_transformers_has_no_warmup(schedule, warmup):
    fields = read_fields(GRPOConfig(lr_scheduler_type=schedule, warmup_steps=5))
    optimizer = map_fields(fields, 100)["learner"]["optimizer"]
    assert (optimizer["schedule"], optimizer["warmup_steps"]) == (schedule.partition("_")[0], warmup)


def test_the_names_of_the_log_are_metrics_of_a_run():
    """Also those of the divergence from the reference, in the loss and in the reward."""
    assert set(LOGGED) <= set(METRICS)
    assert {ours for ours, theirs in LOGGED.items() if theirs == "kl"} == {"learner/reference_kl", "reward/kl"}


def test_epochs_become_steps_as_trl_counts_them():
    """TRL drops an incomplete last batch of prompts."""
    fields = read_fields(GRPOConfig(per_device_train_batch_size=16, num_generations=4, num_train_epochs=2))
    assert Sizes(fields).steps(fields, 11) == 4
    with raises_with(ConfigError, key="GRPOConfig.num_train_epochs"):
        Sizes(fields).steps(fields, 3)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"learning_rat": 1.0}, "learning_rat"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"loss_type": "sapo"}, "loss_type"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({"num_generations": 1}, "num_generations"),
        ({"num_generations": 3}, "generation_batch_size"),
        ({"beta": 0.1}, "use_bias_correction_kl"),
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"save_strategy": "epoch"}, "save_strategy"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "steps_per_generation"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(fields, key):
    with raises_with(ConfigError, key=f"GRPOConfig.{key}"):
        map_fields(read_fields(GRPOConfig(**fields)), 100)


def test_a_refused_field_of_trls_own_object_is_found(tmp_path):
    args = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, repetition_penalty=1.2)
    with raises_with(ConfigError, key="GRPOConfig.repetition_penalty", value=1.2):
        read_fields(args)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"callbacks": [object()]}, "GRPOTrainer.callbacks"),
        ({"reward_function": reward_length}, "GRPOTrainer.reward_function"),
        ({"reward_funcs": None}, "reward_funcs"),
        ({"reward_funcs": "some/reward-model"}, "reward_funcs.0"),
        ({"reward_funcs": [reward_length, lambda completions: [0.0]]}, "reward_funcs.1"),
        ({"reward_funcs": lambda completion_ids, **columns: [0.0]}, "reward_funcs.0"),
        ({"train_dataset": None}, "train_dataset"),
        ({"train_dataset": [{"question": "?"}]}, "train_dataset"),
        ({"args": 3}, "args"),
        ({"args": {"reward_weights": [1.0, 2.0]}}, "GRPOConfig.reward_weights"),
        ({"peft_config": {"r": 4, "use_dora": True}}, "peft_config.use_dora"),
    ],
)
def test_wrong_arguments_are_refused_by_name(chat_model, given, key):
    with raises_with(ConfigError, key=key):
        trainer(chat_model, **given)


def test_the_trainer_builds_the_run_of_its_arguments(chat_model, tmp_path):
    args = GRPOConfig(str(tmp_path / "out"), num_train_epochs=1, max_completion_length=16)
    config = trainer(chat_model, args=args, eval_dataset=ROWS[:2], config={"rollout": {"async_ratio": 1.0}}).config
    (task,) = config.tasks
    assert config.model.path == str(chat_model) and config.steps == 12
    assert config.rollout.group_size == 8 and config.rollout.async_ratio == 1
    assert task.test is not None and task.test.split == "test"


def test_plain_prompts_use_no_chat_template(chat_model):
    rows = [{"prompt": row["prompt"][0]["content"]} for row in ROWS]
    config = trainer(chat_model, train_dataset=rows, reward_funcs=lambda completions, **columns: [1.0]).config
    assert config.model.path != str(chat_model) and "@" in config.model.path


def score(functions, weights, row, text):
    prompt = Prompt(id="1", task="task", messages=(Message("user", "?"),), payload=row)
    reward = TrlReward(functions, weights)
    return reward(prompt, Transcript([Message("user", "?"), Message("assistant", text)]))


def test_rewards_get_columns_and_are_summed_with_weights():
    seen = {}

    def first(prompts, completions, solution, **columns):
        seen.update(prompts=prompts, completions=completions, solution=solution, columns=columns)
        return [1.0]

    async def second(completions, **columns):
        return [0.5]

    row = {**ROWS[0], "level": 3, "completion": "left out"}
    found = score([first, second], [1.0, 4.0], row, "hello")
    assert found.value == 3.0 and found.parts == {"first": 1.0, "second": 0.5}
    assert seen == {
        "prompts": [row["prompt"]],
        "completions": [[{"role": "assistant", "content": "hello"}]],
        "solution": ["1"],
        "columns": {"level": [3]},
    }


def test_a_reward_of_none_is_left_out_of_the_sum():
    row = {"prompt": "text"}
    some = functools.partial(lambda completions, value, **columns: [value], value=2.0)
    none = lambda completions, **columns: [None]  # noqa: E731 - as users write them
    assert score([some, none], [1.0, 1.0], row, "x").value == 2.0
    assert score([none], [1.0], row, "x").status is ScoreStatus.UNGRADED


@pytest.mark.parametrize("returned", [[1.0, 2.0], [], 1.0])
def test_a_reward_of_another_length_raises(returned):
    with pytest.raises((TypeError, ValueError)):
        score([lambda completions, **columns: returned], [1.0], {"prompt": "text"}, "x")


def test_trls_own_rewards_are_taken():
    from trl.rewards import accuracy_reward, think_format_reward

    check_functions([accuracy_reward, think_format_reward], list(ROWS[0]))
    row = {**ROWS[0], "solution": r"\frac{1}{3}"}
    assert score([accuracy_reward], [1.0], row, r"\boxed{\frac{1}{3}}").value == 1.0
    assert score([accuracy_reward], [1.0], row, r"\boxed{\frac{1}{2}}").value == 0.0


def test_the_page_has_every_field_as_the_code_has_it():
    page = Path(__file__).parents[3] / "docs" / "from_trl.md"
    assert render_table() in page.read_text(encoding="utf-8")
