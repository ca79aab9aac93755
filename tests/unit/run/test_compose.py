"""Configurations that are made in Python: objects in the place of names, and keyword arguments for keys."""

import itertools

import datasets
import pytest

import antiphon
from antiphon.core.errors import ConfigError
from antiphon.core.objects import is_attached_name
from antiphon.core.registry import import_path
from antiphon.run.compose import require_attached_objects
from antiphon.tasks.prompts import load_prompts
from tests.raising import raises_with

ROLLOUT = {"groups_per_step": 2, "sampling": {"max_tokens": 4}}
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def importable(prompt, transcript):
    return 1.0


class Corridor:
    def reset(self, seed):
        return "go", {}


def base(**changes):
    task = {"name": "sums", "prompts": {"source": "jsonl", "path": "x.jsonl"}}
    return {"name": "run", "steps": 1, "model": {"path": "m"}, "tasks": [task], "rollout": ROLLOUT, **changes}


def found(name):
    assert is_attached_name(name)
    return import_path(name)


def test_objects_stand_for_names_anywhere():
    def loss(inputs):
        return inputs

    def stage(step):
        return None

    def keep(group):
        return True

    config = antiphon.load_config(
        base(
            algorithm={"loss": loss, "advantage": importable},
            learner={"stages": ["annotate", "rewards", "advantages", stage, "update_actor"]},
            rollout={**ROLLOUT, "filter": keep},
        )
    )
    assert found(config.algorithm.loss) is loss and found(config.rollout.filter) is keep
    assert found(config.learner.stages[3]) is stage
    assert config.algorithm.advantage == f"{__name__}:importable"


def test_keyword_arguments_are_keys_of_the_only_task():
    given = base()
    given["tasks"][0] |= {"reward": "regex", "reward_options": {"pattern": "x"}}
    config = antiphon.load_config(
        given,
        **{"rollout.max_turns": 2},
        reward=lambda prompt, transcript: 0.5,
        environment=Corridor,
        prompts=ROWS,
        model="other",
    )
    (task,) = config.tasks
    assert found(task.reward)(None, None) == 0.5 and task.reward_options == {}
    assert task.environment == f"{__name__}:Corridor" and config.model.path == "other"
    assert [prompt.payload["answer"] for prompt in load_prompts(task, task.prompts, 0)] == ["2", "4"]


def test_the_task_may_be_left_out():
    config = antiphon.load_config(name="run", steps=1, model="m", prompts=ROWS, reward=importable, rollout=ROLLOUT)
    assert [task.name for task in config.tasks] == ["task"]


def test_several_rewards_are_summed_with_weights():
    def long(prompt, transcript):
        return 1.0

    config = antiphon.load_config(base(), reward=[importable, (long, 0.25), importable, "math"])
    (task,) = config.tasks
    parts = task.reward_options["parts"]
    assert task.reward == "composed" and list(parts) == ["importable", "long", "importable_2", "math"]
    assert [part["weight"] for part in parts.values()] == [1.0, 0.25, 1.0, 1.0]
    assert found(parts["long"]["reward"]) is long and parts["math"]["reward"] == "math"


def test_keys_that_no_path_can_have_are_kept():
    options = {"a.b": 1, "c=d": {" e ": 2}, "f": {"g h": 3}}
    config = antiphon.load_config(
        base(), reward=importable, sft={"steps": 1, "prompts": {"source": "jsonl", "options": options}}
    )
    assert config.sft.prompts.options == options


@pytest.mark.parametrize("config", [3, [1], b"run.yaml"])
def test_what_is_no_configuration_is_one_error(config):
    with raises_with(ConfigError, value=config):
        antiphon.load_config(config)


def test_pairs_that_are_no_weighted_rewards_are_one_error():
    with raises_with(ConfigError, key="tasks.0.reward.0", value="math"):
        antiphon.load_config(base(), reward=[("math", "math")])


@pytest.mark.parametrize("kind", ["data set", "splits", "function"])
def test_prompts_come_from_data_in_memory(kind):
    data = datasets.Dataset.from_list(ROWS)
    given = {
        "data set": data,
        "splits": datasets.DatasetDict(train=data, test=data.select([1])),
        "function": lambda split: iter(ROWS),
    }[kind]
    config = antiphon.load_config(base(), prompts=given)
    (task,) = config.tasks
    assert [prompt.messages[0].content for prompt in load_prompts(task, task.prompts, 0)] == ["1+1=", "2+2="]
    assert (task.test is not None) == (kind == "splits")
    if task.test is not None:
        assert [prompt.payload["answer"] for prompt in load_prompts(task, task.test, 0)] == ["4"]


def test_of_a_stream_no_more_is_read_than_asked_for():
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield {"prompt": f"{number}+0=", "answer": str(number)}

    stream = datasets.IterableDataset.from_generator(endless).select_columns(["prompt", "answer"])
    config = antiphon.load_config(base(), prompts=stream, overrides=["tasks.0.prompts.limit=3"])
    (task,) = config.tasks
    assert [prompt.payload["answer"] for prompt in load_prompts(task, task.prompts, 0)] == ["0", "1", "2"]
    assert len(read) < 2000


def test_rows_inside_a_task_are_prompts():
    config = antiphon.load_config(base(tasks=[{"name": "sums", "prompts": ROWS, "test": ROWS[:1], "reward": "math"}]))
    (task,) = config.tasks
    assert len(load_prompts(task, task.prompts, 0)) == 2 and len(load_prompts(task, task.test, 0)) == 1


def test_a_mapping_changes_only_its_keys():
    config = antiphon.load_config(base(), rollout={"async_ratio": 0.0}, **{"learner.optimizer.learning_rate": 0.5})
    assert config.rollout.async_ratio == 0 and config.rollout.groups_per_step == 2
    assert config.learner.optimizer.learning_rate == 0.5


def test_a_file_may_be_changed_by_objects(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: run\nsteps: 1\nmodel: {path: m}\ntasks: [{name: sums, prompts: {source: jsonl, path: x}}]\n"
        "rollout: {groups_per_step: 2, sampling: {max_tokens: 4}}\n"
    )
    config = antiphon.load_config(path, ["steps=3"], reward=importable, prompts=ROWS)
    assert config.steps == 3 and config.tasks[0].reward == f"{__name__}:importable"
    again = antiphon.load_config(config, steps=4)
    assert again == config.model_copy(update={"steps": 4})


def test_arguments_for_one_task_need_one_task():
    two = [{"name": name, "prompts": ROWS} for name in "ab"]
    with raises_with(ConfigError, key="reward"):
        antiphon.load_config(base(tasks=two), reward=importable)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"prompts": 3}, "tasks.0.prompts"),
        ({"model": object()}, "model"),
        ({"tokenizer": object()}, "tokenizer"),
        ({"steps": importable}, "steps"),
        ({"stepz": 3}, "stepz"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(changes, key):
    with raises_with(ConfigError, key=key):
        antiphon.load_config(base(), **changes)


def test_a_recorded_object_is_asked_for_by_its_key():
    config = antiphon.load_config(base(), **{"tasks.0.reward": "__main__:mine@0123456789ab"})
    with raises_with(ConfigError, key="tasks.0.reward", value="__main__:mine@0123456789ab"):
        require_attached_objects(config, has_model=False)
    model = antiphon.load_config(base(), model="transformers:Model@0123456789ab")
    require_attached_objects(model, has_model=True)
    with raises_with(ConfigError, key="model.path"):
        require_attached_objects(model, has_model=False)
