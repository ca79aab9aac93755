"""What a run takes over from a user's own loss, advantage and stages, and what it refuses before it starts."""

import numpy as np
import pytest

from antiphon.algorithms.declarations import advantage, loss, stage
from antiphon.core.config import load
from antiphon.core.errors import ConfigError
from antiphon.core.types import (
    ATTENTION_RHYTHM,
    ENTROPY_WEIGHT,
    KL_REWARD,
    MIXED_CACHE,
    OLD_VALUE,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    ROUTED_EXPERTS,
    TEACHER_LOGPROBS,
    TOKEN_AGE,
    VALUES,
    StreamSpec,
)
from antiphon.run.config import RunConfig
from antiphon.run.config_checks.user_functions import add_declared_needs, check_import_paths
from tests.raising import raises_with

SURPRISE = StreamSpec("surprise")
FROM_ENGINE = StreamSpec("drafted", "bool", producer="engine")
FROM_REFERENCE = StreamSpec("reference_entropy", producer="reference")


@advantage(needs=[VALUES], grouped=True)
def own_advantage(groups, config, *, scale=1.0):
    return [[np.zeros(len(sample.segment.tokens)) for sample in group] for group in groups]


def reads(*specs):
    @loss(needs=specs, zero_at_zero_advantage=True)
    def own_loss(inputs, config):
        return -inputs.advantages * inputs.logprobs, {}

    return own_loss


own_loss = reads(REFERENCE_LOGPROBS)
reads_surprise, reads_drafted, reads_reference_entropy = map(reads, (SURPRISE, FROM_ENGINE, FROM_REFERENCE))
reads_teachers, reads_attention, reads_age = map(reads, (TEACHER_LOGPROBS, ATTENTION_RHYTHM, TOKEN_AGE))
reads_kl_reward, reads_entropy_weight, reads_experts = map(reads, (KL_REWARD, ENTROPY_WEIGHT, ROUTED_EXPERTS))
reads_values, reads_old_value, reads_mixed = map(reads, (VALUES, OLD_VALUE, MIXED_CACHE))


@loss()
def with_options(inputs, config, *, beta, gamma=0.5):
    return -inputs.advantages * inputs.logprobs, {}


def undeclared_loss(inputs, config):
    return -inputs.advantages * inputs.logprobs, {}


@stage(produces=[SURPRISE])
async def add_surprise(step, *, model="", temperature=1.0):
    pass


@stage(needs=[PROXIMAL_LOGPROBS])
async def reads_proximal(step):
    pass


HERE = __name__
OWN = {"advantage": f"{HERE}:own_advantage", "loss": f"{HERE}:own_loss"}
STAGES = ["annotate", "rewards", "advantages", "update_critics", "update_actor"]


def own(name, **sections):
    return make_config(algorithm={"loss": f"{HERE}:{name}"} | sections.pop("algorithm", {}), **sections)


def stages_with(name, place):
    return {"stages": [*STAGES[:place], f"{HERE}:{name}", *STAGES[place:]]}


def make_config(**sections):
    task = {"name": "sums", "prompts": {"source": "jsonl", "path": "problems.jsonl"}, "reward": "exact_match"}
    rollout = {"groups_per_step": 4, "sampling": {"max_tokens": 16}}
    base = {"name": "own", "steps": 2, "model": {"path": "model"}, "tasks": [task], "rollout": rollout}
    return RunConfig.model_validate(base | sections)


def refused(config):
    with pytest.raises(ConfigError) as error:
        add_declared_needs(config)
    (mistake,) = error.value.mistakes
    return mistake


# --- streams ---------------------------------------------------------------------------------------------------------


def test_declared_needs_become_streams_of_the_run():
    """Reading the configuration imports nothing, so it does not know of them yet."""
    config = make_config(algorithm=OWN, learner={"minibatches": 2}, critic={"count": 1})
    assert not config.counts["reference"] and not config.algorithm.streams
    declared = add_declared_needs(config)
    assert set(declared.algorithm.streams) == {"values", "reference_logprobs"}
    assert declared.counts["reference"] == 1


def test_a_grouped_advantage_needs_siblings():
    config = make_config(
        algorithm={"advantage": f"{HERE}:own_advantage"},
        critic={"count": 1},
        rollout={"groups_per_step": 4, "group_size": 1, "sampling": {"max_tokens": 16}},
    )
    assert refused(config).key == "rollout.group_size"


def test_built_in_functions_change_nothing():
    config = make_config(algorithm="grpo")
    assert add_declared_needs(config) is config


@pytest.mark.parametrize("name", ["reads_attention", "reads_age", "own_loss"])
def test_a_stream_that_a_step_can_compute_is_computed(name):
    config = add_declared_needs(own(name))
    assert len(config.algorithm.streams) == 1
    assert {spec.name for spec in config.algorithm.required_streams} == set(config.algorithm.streams)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("reads_mixed", {}),
        ("reads_drafted", {"engine": {"kind": "mine:Engine"}}),
        ("reads_drafted", {"engine": {"also": [{"kind": "mine:Engine"}]}}),
        ("reads_teachers", {"teachers": [{"path": "teacher"}]}),
        ("reads_values", {"critic": {"count": 1}}),
        ("reads_experts", {"engine": {"routed_experts": True}}),
        ("reads_kl_reward", {"algorithm": {"kl": {"coefficient": 0.1, "place": "reward"}}}),
        ("reads_surprise", {"learner": stages_with("add_surprise", 4)}),
        ("undeclared_loss", {"learner": stages_with("add_surprise", 0)}),
        ("own_loss", {"learner": stages_with("reads_proximal", 1)}),
    ],
)
def test_streams_that_are_computed_first_are_accepted(name, sections):
    add_declared_needs(own(name, **sections))


@pytest.mark.parametrize(
    ("name", "sections", "valid"),
    [
        ("reads_teachers", {}, "teachers: [{path: …}]"),
        ("reads_values", {}, "critic: {count: 1}"),
        ("reads_kl_reward", {}, "algorithm.kl: {coefficient: 0.1, place: reward}"),
        ("reads_entropy_weight", {}, "algorithm.disagreement_mask: 0.2"),
        ("reads_experts", {}, "engine.routed_experts: true"),
        ("reads_drafted", {}, "engine.kind: an engine of your own that returns it"),
        ("reads_drafted", {"engine": {"kind": "vllm"}}, "engine.kind: an engine of your own that returns it"),
        ("reads_old_value", {}, "proximal_logprobs"),
        ("reads_surprise", {}, "reference_logprobs"),
        ("reads_surprise", {"learner": stages_with("add_surprise", 5)}, "token_age"),
        ("reads_reference_entropy", {}, "stage"),
        ("own_loss", {"learner": {"stages": ["rewards", "advantages", "update_actor"]}}, "mixed_cache"),
    ],
)
def test_a_stream_that_nothing_computes_is_refused(name, sections, valid):
    mistake = refused(own(name, **sections))
    assert (mistake.key, mistake.value) == ("algorithm.loss", f"{HERE}:{name}")
    assert valid in mistake.valid


def test_a_stage_needs_what_comes_before_it():
    mistake = refused(own("own_loss", learner=stages_with("reads_proximal", 0)))
    assert (mistake.key, mistake.value) == ("learner.stages.0", f"{HERE}:reads_proximal")


def test_an_unused_critic_is_refused_once_needs_are_known():
    """An own function may read the values, so reading the configuration cannot tell."""
    with pytest.raises(ValueError, match="critic"):
        make_config(critic={"count": 1})
    assert refused(own("own_loss", critic={"count": 1})).key == "critic"
    assert refused(own("own_loss", teachers=[{"path": "t"}])).key == "algorithm.teacher_coefficient"


def test_streams_may_be_named_in_the_configuration():
    """... for a loss without a declaration."""
    algorithm = {"streams": [f"{HERE}:SURPRISE", "reference_logprobs"]}
    config = own("undeclared_loss", algorithm=algorithm, learner=stages_with("add_surprise", 4))
    assert add_declared_needs(config) is config and config.counts["reference"] == 1
    mistake = refused(own("undeclared_loss", algorithm=algorithm))
    assert (mistake.key, mistake.value) == ("algorithm.streams.0", f"{HERE}:SURPRISE")


@pytest.mark.parametrize("name", ["no_such_module_here:SURPRISE", f"{HERE}:SURPRIZE", f"{HERE}:HERE"])
def test_a_name_of_no_stream_is_refused(name):
    mistake = refused(own("undeclared_loss", algorithm={"streams": [name]}))
    assert (mistake.key, mistake.value) == ("algorithm.streams.0", name)


def test_a_missing_function_is_named_with_its_key():
    assert refused(make_config(algorithm={"loss": f"{HERE}:los"})).key == "algorithm.loss"
    assert refused(make_config(algorithm={"advantage": f"{HERE}:x"})).key == "algorithm.advantage"
    assert refused(make_config(learner={"stages": [*STAGES, f"{HERE}:x"]})).key == "learner.stages.5"


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "learner", "key", "value", "valid"),
    [
        ({"loss_options": {"beta": 1, "gama": 2}}, {}, "algorithm.loss_options.gama", 2, ("beta", "gamma")),
        ({"loss_options": {"gamma": 2}}, {}, "algorithm.loss_options", {"gamma": 2}, ("beta", "gamma")),
        ({"loss": "kimi", "loss_options": {"tau": 1}}, {}, "algorithm.loss_options.tau", 1, ()),
        ({"loss": "kimi", "advantage_options": {"scale": 1}}, {}, "algorithm.advantage_options.scale", 1, ()),
        (
            {"loss": "kimi"},
            stages_with("add_surprise", 4) | {"stage_options": {f"{HERE}:add_surprise": {"modle": "m"}}},
            f"learner.stage_options.{HERE}:add_surprise.modle",
            "m",
            ("model", "temperature"),
        ),
    ],
)
def test_options_are_the_keyword_only_parameters(algorithm, learner, key, value, valid):
    mistake = refused(own("with_options", algorithm=algorithm, learner=learner))
    assert (mistake.key, mistake.value, mistake.valid) == (key, value, valid)


def test_options_are_accepted_and_kept_in_the_configuration():
    stages = stages_with("add_surprise", 4) | {"stage_options": {f"{HERE}:add_surprise": {"model": "m"}}}
    config = own("with_options", algorithm={"loss_options": {"beta": 0.1}}, learner=stages)
    kept = RunConfig.model_validate_json(add_declared_needs(config).model_dump_json())
    assert kept.algorithm.loss_options == {"beta": 0.1}
    assert kept.learner.stage_options == {f"{HERE}:add_surprise": {"model": "m"}}


def test_options_of_no_stage_are_refused_as_the_file_is_read():
    with pytest.raises(ValueError, match=r"learner\.stage_options\.mine:stage"):
        make_config(learner={"stage_options": {"mine:stage": {"model": "m"}}})


@pytest.mark.parametrize("kind", ["tests.exampel_engine:ExampleEngine", "tests.example_engine:ExampelEngine"])
@pytest.mark.parametrize("key", ["engine.kind", "engine.also.0.kind"])
def test_engine_that_leads_nowhere_is_refused_before_a_start(kind, key):
    engine = {"kind": kind} if key == "engine.kind" else {"also": [{"kind": kind}]}
    with raises_with(ConfigError, key=key, value=kind):
        check_import_paths(make_config(engine=engine))


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.advantage",
        "algorithm.loss",
        "learner.stages.0",
        "rollout.filter",
        "rollout.sampler",
        "tasks.0.agent.function",
        "tasks.0.environment",
        "tasks.0.group_reward",
        "tasks.0.prompts.source",
        "tasks.0.reward",
        "tasks.0.test.source",
    ],
)
def test_path_that_leads_nowhere_is_refused_before_a_start(tmp_path, key):
    file = tmp_path / "run.yaml"
    file.write_text(make_config().model_dump_json(exclude_defaults=True))
    where, name = (key.removesuffix(".0"), "[nowhere:f]") if key.endswith(".0") else (key, "nowhere:f")
    turns = ["rollout.max_turns=4"] if "environment" in key else []
    config = load(file, [f"{where}={name}", *turns], model=RunConfig)
    with raises_with(ConfigError, key=key, value="nowhere:f"):
        check_import_paths(config)


def test_engine_of_another_interpreter_is_not_looked_for():
    check_import_paths(make_config(engine={"kind": "tests.exampel_engine:Engine", "python": "envs/other/bin/python"}))
    check_import_paths(make_config(engine={"kind": "tests.example_engine:ExampleEngine"}))
