import pytest

from antiphon.cluster.base import Place
from antiphon.cluster.devices import cpu_multiply_rate
from antiphon.cluster.placement import Placement
from antiphon.core.config import dump
from antiphon.run.config import RunConfig
from antiphon.run.dtypes import choose_dtypes, choose_dtypes_of_gpus, keep_dtypes, report_slow_dtypes

OLD = {"float32": 75e9, "bfloat16": 1.5e9, "float16": 70e9}  # a CPU that has no instructions for bfloat16
RAY = {"kind": "ray", "address": "10.0.0.1:6379"}
NEW = {"float32": 105e9, "bfloat16": 450e9, "float16": 400e9}


def configure(**sections):
    task = {"name": "sums", "prompts": {"source": "jsonl", "path": "sums.jsonl"}, "reward": "math"}
    rollout = {"groups_per_step": 2, "sampling": {"max_tokens": 8}}
    given = {"name": "r", "steps": 1, "model": {"path": "m"}, "tasks": [task], "rollout": rollout}
    return RunConfig.model_validate(given | sections)


def reports(rates, **sections):
    found = []
    report_slow_dtypes(configure(**sections), Placement(), found.append, rates.__getitem__)
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
        (OLD, {"learner": {"device": "cpu", "dtype": "bfloat16"}, "cluster": RAY}),
        (OLD, {"engine": {"kind": "server", "dtype": "bfloat16", "options": {"urls": ["http://127.0.0.1:1"]}}}),
    ],
    ids=["fast", "float32", "on a GPU", "on a cluster", "in a server"],
)
def test_nothing_is_reported_of_what_is_no_slower_here(rates, sections):
    assert reports(rates, **sections) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rate_is_one_that_a_cpu_can_have(dtype):
    assert 1e7 < cpu_multiply_rate(dtype) < 1e14


NOWHERE = Placement()


def chosen(rates, placement=NOWHERE, **sections):
    config, found = configure(**sections), []
    config = choose_dtypes(config, placement, found.append, rates.__getitem__)
    return [config.learner.dtype, *(kind.dtype for kind in config.engine.engine_kinds)], found


AUTO = {"device": "cpu", "dtype": "auto"}


def test_auto_is_the_faster_dtype_of_the_cpu():
    engine = AUTO | {"also": [AUTO, {"device": "cpu", "dtype": "float16"}]}
    dtypes, reports = chosen(NEW, learner=AUTO, engine=engine)
    assert dtypes == ["bfloat16", "bfloat16", "bfloat16", "float16"]
    assert reports == [
        f"{key}.dtype: auto is bfloat16: bfloat16 is 4.3 times as fast as float32 on this CPU"
        for key in ("learner", "engine", "engine.also.0")
    ]
    assert chosen(OLD, learner=AUTO, engine=engine)[0] == ["float32", "float32", "float32", "float16"]


def test_a_cpu_that_is_hardly_faster_keeps_float32():
    assert chosen({"float32": 100e9, "bfloat16": 115e9}, learner=AUTO)[0] == ["float32", "float32"]


def test_a_rate_is_measured_once():
    asked = []

    def rate(dtype):
        asked.append(dtype)
        return NEW[dtype]

    choose_dtypes(configure(learner=AUTO, engine=AUTO | {"also": [AUTO]}), Placement(), lambda message: None, rate)
    assert sorted(asked) == ["bfloat16", "float32"]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_a_cluster_is_not_measured(device, dtype):
    given = {"device": device, "dtype": "auto"}
    dtypes, _ = chosen({}, learner=given, engine=given, cluster=RAY)
    assert dtypes == [dtype, dtype]


def test_a_ray_that_the_run_starts_is_this_machine():
    dtypes, reports = chosen(NEW, learner=AUTO, cluster={"kind": "ray"})
    assert dtypes[0] == "bfloat16" and "on this CPU" in reports[0]


def test_placement_says_what_a_model_runs_on():
    """A learner on cores of a machine that has GPUs, and engines on GPUs of which this process sees none."""
    anywhere = {"device": "auto", "dtype": "auto"}
    placement = Placement(places={"learner": [Place(node="a", cores=(0,))], "engine": [Place(node="a", gpus=("0",))]})
    dtypes, reports = chosen(NEW, placement, learner=anywhere, engine=anywhere)
    assert dtypes[0] == "bfloat16" and "on this CPU" in reports[0]
    assert "GPU" in reports[1]
    assert chosen(OLD, placement, learner=anywhere)[0][0] == "float32"
    slow = configure(learner={"device": "auto", "dtype": "bfloat16"}, engine={"device": "auto", "dtype": "bfloat16"})
    found = []
    report_slow_dtypes(slow, placement, found.append, OLD.__getitem__)
    assert found == ["learner.dtype: on this CPU bfloat16 is 50.0 times slower than float32"]


def test_gpus_that_are_not_here_have_bfloat16():
    anywhere = {"device": "auto", "dtype": "auto"}
    planned = choose_dtypes_of_gpus(configure(learner=anywhere, engine=anywhere), lambda message: None)
    assert (planned.learner.dtype, planned.engine.dtype) == ("bfloat16", "bfloat16")
    assert choose_dtypes_of_gpus(configure(learner=AUTO), lambda message: None).learner.dtype == "float32", "on a CPU"


def test_auto_of_vllm_is_vllms():
    assert chosen({}, engine=AUTO | {"kind": "vllm"}) == (["float32", "auto"], [])


def test_a_resumed_run_keeps_the_dtypes_that_it_began_with(tmp_path):
    record = {"directory": str(tmp_path)}
    engine = AUTO | {"also": [AUTO]}
    config = configure(learner=AUTO, engine=engine, record=record)
    began = choose_dtypes(config, Placement(), lambda message: None, NEW.__getitem__)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text(dump(began))
    resumed = keep_dtypes(configure(learner=AUTO, engine=AUTO | {"also": [AUTO, AUTO]}, record=record))
    assert [resumed.learner.dtype, *(kind.dtype for kind in resumed.engine.engine_kinds)] == [
        *["bfloat16"] * 3,
        "auto",  # an engine that the run did not have
    ]
    other = configure(engine=AUTO | {"also": [AUTO | {"kind": "vllm"}]}, record=record)
    assert keep_dtypes(other).engine.also[0].dtype == "auto", "of another kind of engine"
    named = configure(learner={"device": "cpu", "dtype": "float32"}, record=record)
    assert keep_dtypes(named).learner.dtype == "float32"
