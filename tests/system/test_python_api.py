"""Whole runs from Python: objects reach workers, the record names them, and runs are resumed with them or refused."""

import asyncio
import json
import textwrap

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import antiphon
from antiphon.core.errors import ConfigError
from tests import warm
from tests.raising import raises_with

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
ROLLOUT = {"groups_per_step": 2, "group_size": 4, "timeout": 240, "sampling": {"max_tokens": 6}}


def settings(folder, **changes):
    given = {"name": "run", "steps": 2, "rollout": ROLLOUT, "engine": {"slots": 16}}
    return {**given, "record": {"directory": str(folder / "runs"), "live": "off"}, **changes}


def make_reward(scale):
    def digits(prompt, transcript):
        return scale * sum(character.isdigit() for character in transcript.response)

    return digits


def recorded(folder):
    return yaml.safe_load((folder / "runs/run/config.yaml").read_text())


def test_a_closure_rewards_and_a_resume_needs_it(tmp_path, model):
    result = antiphon.train(settings(tmp_path), model=model, prompts=ROWS, reward=make_reward(0.1))
    assert result.exit_code == 0 and result.summary["steps"] == 2 and result.directory == tmp_path / "runs/run"
    name = recorded(tmp_path)["tasks"][0]["reward"]
    assert name.startswith(f"{__name__}:make_reward.<locals>.digits@")
    assert AutoModelForCausalLM.from_pretrained(result.model).num_parameters() > 0

    refused = warm.run("-m", "antiphon", "train", tmp_path / "runs/run/config.yaml", "--resume", "steps=3")
    assert refused.returncode != 0 and "make_reward.<locals>.digits" in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr

    again = antiphon.train(settings(tmp_path, steps=3), model=model, prompts=ROWS, reward=make_reward(0.1), resume=True)
    assert again.summary["steps"] == 3 and again.summary["lineage"] == 1  # the refused resume opened none
    with pytest.raises(ConfigError, match=r"tasks\S*reward|tasks"):
        antiphon.train(settings(tmp_path, steps=4), model=model, prompts=ROWS, reward=make_reward(0.2), resume=True)


class Corridor:
    """Ends after two turns; a digit is worth a point."""

    def reset(self, seed):
        self.turns = 2
        return "go", {}

    def step(self, action):
        self.turns -= 1
        return "on", float(any(map(str.isdigit, action))), self.turns == 0, False, {}

    def close(self):
        pass


@pytest.mark.parametrize("workers", [0, 1])
def test_objects_of_a_notebook_reach_all_workers(tmp_path, model, workers):
    """A script is as a notebook: its functions are in `__main__`. With `workers`, through one more process."""
    script = f"""
        import antiphon
        CLIP = 0.3
        class Walk:
            def reset(self, seed):
                self.turns = 2
                return "go", {{}}
            def step(self, action):
                self.turns -= 1
                return "on", float(any(map(str.isdigit, action))), self.turns == 0, False, {{}}
            def close(self): pass
        def loss(inputs, config):
            import torch
            ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
            return -inputs.advantages * ratio.clamp(1 - CLIP, 1 + CLIP), {{}}
        async def scale(step):
            for sample in step.samples: pass
        def keep(group):
            return len(group.trajectories) > 0
        rollout = {ROLLOUT!r} | {{"max_turns": 3, "workers": {workers}, "filter": keep}}
        config = {{
            "name": "run", "steps": 2, "rollout": rollout, "algorithm": {{"loss": loss}},
            "learner": {{"stages": ["annotate", "rewards", "advantages", scale, "update_actor"]}},
            "record": {{"directory": {str(tmp_path / "runs")!r}, "live": "off"}},
        }}
        result = antiphon.train(
            config, model={str(model)!r}, prompts={ROWS[:4]!r}, environment=Walk,
            reward=[("environment_return", 1.0), (lambda prompt, transcript: 0.5, 2.0)],
        )
        print("steps", result.summary["steps"])
    """
    done = warm.run("-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    assert "steps 2" in done.stdout
    task = recorded(tmp_path)["tasks"][0]
    assert task["environment"].startswith("__main__:Walk@")
    assert [part["reward"].partition("@")[0] for part in task["reward_options"]["parts"].values()] == [
        "environment_return",
        "__main__:<lambda>",
    ]


def test_a_model_object_is_trained_and_left_as_it_was(tmp_path, model):
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    given = {"model": policy, "tokenizer": tokenizer, "prompts": ROWS, "reward": make_reward(0.1)}
    changes = {"learner": {"optimizer": {"learning_rate": 1e-2}}}
    result = antiphon.train(settings(tmp_path, **changes), **given)
    trained = AutoModelForCausalLM.from_pretrained(result.model).state_dict()
    assert all((tensor == before[name]).all() for name, tensor in policy.state_dict().items())
    assert any((trained[name] != tensor).any() for name, tensor in before.items())
    assert antiphon.train(settings(tmp_path, steps=3, **changes), **given, resume=True).summary["steps"] == 3


def test_inside_an_event_loop_a_run_has_its_own(tmp_path, model):
    async def cell():
        return antiphon.train(settings(tmp_path), model=model, prompts=ROWS, reward=make_reward(0.1))

    assert asyncio.run(cell()).summary["steps"] == 2


def test_metrics_are_a_table_and_a_plot(tmp_path, model):
    import matplotlib

    matplotlib.use("Agg")
    result = antiphon.train(settings(tmp_path), model=model, prompts=ROWS, reward=make_reward(0.1))
    table = result.metrics()
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert list(table.index) == [1, 2]
    assert list(table["reward/mean"]) == [line["reward/mean"] for line in lines]
    assert list(result.plot().lines[0].get_ydata()) == list(table["reward/mean"])
    with raises_with(ConfigError, key="metric", value="reward"):
        result.plot("reward")


def test_evaluation_and_fine_tuning_take_the_same_arguments(tmp_path, model):
    given = {"model": model, "prompts": {"train": ROWS, "test": ROWS[:3]}, "reward": make_reward(1.0)}
    found = antiphon.evaluate(model, settings(tmp_path), prompts=given["prompts"], reward=given["reward"])
    assert found["prompts"] == 3
    tuned = antiphon.sft(settings(tmp_path, sft={"steps": 2, "response": "answer", "batch_size": 4}), **given)
    assert tuned.exit_code == 0 and list(tuned.metrics().index) == [1, 2]
