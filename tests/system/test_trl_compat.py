"""TRL's trainer on ours: the README's example of TRL as printed, and what a script does around a trainer."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import antiphon
from antiphon.compat.trl import GRPOConfig, GRPOTrainer
from antiphon.core.errors import ConfigError
from antiphon.learning.model.tiny import make_tokenizer, write_tiny_model
from tests import warm

PAGE = Path(__file__).parents[2] / "docs" / "from_trl.md"
README = {"trl-lib/DeepMath-103K": "data", "Qwen/Qwen2.5-0.5B-Instruct": "model"}


@pytest.fixture
def folder(tmp_path):
    tokenizer = make_tokenizer("0123456789+= ")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    write_tiny_model(tmp_path / "model", 0, tokenizer, hidden_size=32, layers=1, max_length=1024)
    (tmp_path / "data").mkdir()
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": str(n + 1)} for n in range(2)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_trls_readme_runs_with_the_import_changed(folder):
    """But for the paths of model and data: there is no hub. Its defaults are three epochs, a group of eight a step."""
    source = next(re.finditer(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))[1]
    for name, path in README.items():
        assert name in source
        source = source.replace(name, str(folder / path))
    done = warm.run("-c", source, directory=folder)
    assert done.returncode == 0, done.stderr
    run = antiphon.open_run(folder / "trainer_output")
    assert run.summary["steps"] == 6 and len(run.attempts("trained")) == 6 * 8
    assert run.config["rollout"]["sampling"]["max_tokens"] == 512


def digits_reward(completions, **columns):
    return [sum(map(str.isdigit, completion)) / 8 for completion in completions]


def test_a_model_object_is_trained_saved_and_resumed(folder):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        AutoTokenizer.from_pretrained(folder / "model"),
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    args = GRPOConfig(str(folder / "out"), max_steps=2, learning_rate=1e-2, max_completion_length=8, save_steps=1)
    rows = [{"prompt": f"{n}+1="} for n in range(10)]
    trainer = GRPOTrainer(model, digits_reward, args, rows, processing_class=tokenizer)
    output = trainer.train()
    assert output.global_step == 2 and [line["step"] for line in trainer.state.log_history] == [1, 2]
    assert all({"reward", "loss", "completions/mean_length"} <= line.keys() for line in trainer.state.log_history)
    assert any((model.state_dict()[name] != tensor).any() for name, tensor in before.items())
    trainer.save_model(folder / "saved")
    trainer.save_model(trainer.result.directory)  # as scripts end: training_args.output_dir
    assert (trainer.result.directory / "final_model" / "config.json").is_file()
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    assert all((saved[name] == tensor).all() for name, tensor in model.state_dict().items())

    path = str(folder / "model")
    args = GRPOConfig(str(folder / "path"), max_steps=1, max_completion_length=8, save_steps=1)
    GRPOTrainer(path, digits_reward, args, rows).train()
    again = GRPOTrainer(path, digits_reward, args, rows, config={"steps": 3})
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert antiphon.open_run(folder / "path").summary["lineage"] == 1


def length_reward(completions, **columns):
    return [float(len(completion)) for completion in completions]


def test_a_reward_that_a_check_would_refuse_is_taken_as_in_trl(folder):
    """As one part of several it makes sense, and TRL has no such check; ours is there for those who ask."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
    args = GRPOConfig(str(folder / "out"), max_steps=1, max_completion_length=4)
    GRPOTrainer(str(folder / "model"), length_reward, args, rows).train()
    checked = GRPOTrainer(str(folder / "model"), length_reward, args, rows, config={"check": {"prompts": 2}})
    with pytest.raises(ConfigError, match=r"check\.prompts"):
        checked.train()


def test_saving_before_training_is_refused(folder):
    trainer = GRPOTrainer(str(folder / "model"), digits_reward, None, [{"prompt": "1+1="}])
    with pytest.raises(ConfigError, match="train"):
        trainer.save_model(folder / "saved")
