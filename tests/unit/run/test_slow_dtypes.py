import pytest

from antiphon.cluster.devices import cpu_multiply_rate
from antiphon.run.config import RunConfig
from antiphon.run.slow_dtypes import report_slow_dtypes

OLD = {"float32": 75e9, "bfloat16": 1.5e9, "float16": 70e9}  # a CPU that has no instructions for bfloat16
NEW = {"float32": 105e9, "bfloat16": 450e9, "float16": 400e9}


def reports(rates, **sections):
    task = {"name": "sums", "prompts": {"source": "jsonl", "path": "sums.jsonl"}, "reward": "math"}
    rollout = {"groups_per_step": 2, "sampling": {"max_tokens": 8}}
    given = {"name": "r", "steps": 1, "model": {"path": "m"}, "tasks": [task], "rollout": rollout}
    found = []
    report_slow_dtypes(RunConfig.model_validate(given | sections), found.append, rates.__getitem__)
    return found


def test_each_slow_dtype_is_named_by_its_key():
    engine = {"device": "cpu", "dtype": "float16", "also": [{"device": "cpu", "dtype": "bfloat16"}]}
    assert reports(OLD, learner={"device": "cpu", "dtype": "bfloat16"}, engine=engine) == [
        "learner.dtype: on this CPU bfloat16 is 50.0 times slower than float32",
        "engine.also.0.dtype: on this CPU bfloat16 is 50.0 times slower than float32",
    ]


@pytest.mark.parametrize(
    "rates, sections",
    [
        (NEW, {"learner": {"device": "cpu", "dtype": "bfloat16"}}),
        (OLD, {"learner": {"device": "cpu"}, "engine": {"device": "cpu"}}),
        (OLD, {"learner": {"device": "cuda", "dtype": "bfloat16"}}),
        (OLD, {"learner": {"device": "cpu", "dtype": "bfloat16"}, "cluster": {"kind": "ray"}}),
        (OLD, {"engine": {"kind": "server", "dtype": "bfloat16", "options": {"urls": ["http://127.0.0.1:1"]}}}),
    ],
    ids=["fast", "float32", "on a GPU", "on a cluster", "in a server"],
)
def test_nothing_is_reported_of_what_is_no_slower_here(rates, sections):
    assert reports(rates, **sections) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rate_is_one_that_a_cpu_can_have(dtype):
    assert 1e7 < cpu_multiply_rate(dtype) < 1e14
