"""What an algorithm is when nothing is said, what may be said, and what the recipes set: the numbers of their sources."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.offline_config import DistillationConfig, PreferenceConfig
from antiphon.algorithms.recipes import RECIPES
from antiphon.algorithms.sections import (
    CorrectionConfig,
    FilterConfig,
    KlConfig,
    LossWeightConfig,
    RewardConfig,
    RhythmConfig,
)
from antiphon.core.types import TEACHER_LOGPROBS, VALUES


@dataclass(frozen=True)
class Setting:
    """One field: its default, values at and inside of its bounds, and values just outside."""

    default: Any
    fits: tuple[Any, ...]
    outside: tuple[Any, ...] = ()


HALF_OPEN = ((0.0, 0.99), (-0.01, 1.0))
SHARE = ((0.0, 1.0), (-0.01, 1.01))
NOT_NEGATIVE = ((0.0, 7.0), (-0.01,))
POSITIVE = ((0.01, 7.0), (0.0,))
COUNT = ((0, 1, 7), (-1,))
FLAG = ((True, False), ())

SETTINGS: dict[type[BaseModel], dict[str, Setting]] = {
    CorrectionConfig: {
        "level": Setting(None, ("token", "turn", "sequence", "product"), ("batch",)),
        "high": Setting(2.0, *POSITIVE),
        "filter_level": Setting(None, ("token", "turn", "sequence", "product"), ("batch",)),
        "keep_low": Setting(0.5, (0.0, 2.0), (-0.01,)),
        "keep_high": Setting(2.0, (0.5, 7.0), (0.0,)),
        "keep_difference": Setting(1.0, *SHARE),
        "filters": Setting((), ((FilterConfig(level="turn"),),), (({"level": "turn", "keep_low": 3.0},), ({},))),
        "proximal": Setting("computed", ("computed",), ("measured",)),
    },
    FilterConfig: {
        "keep_low": Setting(0.5, (0.0, 2.0), (-0.01,)),
        "keep_high": Setting(2.0, (0.5, 7.0), (0.0,)),
        "keep_difference": Setting(1.0, *SHARE),
    },
    RewardConfig: {
        "overlong_tokens": Setting(0, *COUNT),
        "overlong_penalty": Setting(1.0, *NOT_NEGATIVE),
        "baseline": Setting("none", ("group", "task", "batch", "running"), ("sequence",)),
        "scale": Setting("none", ("group", "task", "batch", "running"), ("sequence",)),
        "clip": Setting(0.0, *NOT_NEGATIVE),
        "whiten": Setting(False, *FLAG),
    },
    LossWeightConfig: {
        "by": Setting("none", ("difficulty", "length"), ("score",)),
        "mask_truncated": Setting(False, *FLAG),
        "mask_difficulty": Setting(None, ((0.1, 0.2),), ((0.2, 0.2), (0.3, 0.2))),
        "mask_wrong_over": Setting(0, *COUNT),
    },
    KlConfig: {
        "coefficient": Setting(0.0, *NOT_NEGATIVE),
        "place": Setting("loss", ("reward",), ("advantage",)),
        "estimator": Setting("k3", ("k1", "k2", "abs", "mse"), ("k4",)),
        "target": Setting(0.0, (0.0,), (-0.01, 0.5)),  # of place: reward alone
        "horizon": Setting(10_000.0, *POSITIVE),
    },
    RhythmConfig: {
        "kind": Setting(None, ("local", "global", "coupled", "random", "entropy"), ("all",)),
        "amplification": Setting(1.5, *POSITIVE),
        "share": Setting(0.4, (0.01, 1.0), (0.0, 1.01)),
        "positive_only": Setting(False, *FLAG),
        "window": Setting(10, (1, 7), (0,)),
        "horizon_low": Setting(10, (0, 100), (-1, 101)),
        "horizon_high": Setting(100, (10, 200), (9, -1)),
        "waad_quantile": Setting(0.5, *SHARE),
        "delta_quantile": Setting(0.6, *SHARE),
        "back": Setting(0.5, *SHARE),
        "lookback": Setting(3, (1, 7), (0,)),
    },
    AlgorithmConfig: {
        "advantage": Setting("grpo", ("gae", "mine:attribute")),
        "advantage_options": Setting({}, ({"scale": 2.0},), (3,)),
        "gamma": Setting(1.0, *SHARE),
        "turn_gamma": Setting(1.0, *SHARE),
        "gae_lambda": Setting(1.0, *SHARE),
        "step_weight": Setting(1.0, *NOT_NEGATIVE),
        "teacher_coefficient": Setting(0.0, *NOT_NEGATIVE),
        "advantage_whiten": Setting(False, *FLAG),
        "advantage_clip": Setting(0.0, *NOT_NEGATIVE),
        "agreement_mask": Setting(0.0, *HALF_OPEN),
        "disagreement_mask": Setting(0.0, (0.0,), (-0.01, 1.0, 0.5)),  # needs a reward of entropy
        "loss": Setting("ppo_clip", ("topr", "mine:attribute")),
        "loss_options": Setting({}, ({"beta": 0.1, "kinds": ("a",)},), (3,)),
        "ratio_level": Setting("token", ("sequence", "turn"), ("batch",)),
        "clip_low": Setting(0.2, *SHARE),
        "clip_high": Setting(0.2, *NOT_NEGATIVE),
        "cispo_mask": Setting(False, *FLAG),
        "dual_clip": Setting(0.0, (0.0, 1.01, 3.0), (-0.01, 0.5, 1.0)),
        "ratio_low": Setting(0.0, (0.0, 1.0), (-0.01, 1.01)),
        "ratio_high": Setting(1.0, *POSITIVE),
        "positive_weight": Setting(1.0, *NOT_NEGATIVE),
        "negative_weight": Setting(1.0, *NOT_NEGATIVE),
        "kimi_tau": Setting(0.1, *NOT_NEGATIVE),
        "aggregation": Setting("token_mean", ("sequence_mean_token_sum",), ("mean",)),
        "entropy_coefficient": Setting(0.0, (-1.0, 1.0)),
        "expert_balance": Setting(0.0, *NOT_NEGATIVE),
        "streams": Setting((), (("values",),), (("entropy",),)),
    },
    PreferenceConfig: {
        "loss": Setting("dpo", ("ipo",), ("kto",)),
        "beta": Setting(0.1, *POSITIVE),
        "label_smoothing": Setting(0.0, (0.0, 0.49), (-0.01, 0.5)),
    },
    DistillationConfig: {
        "divergence": Setting(
            "forward_kl", ("reverse_kl", "adaptive_kl", "jensen_shannon", "skewed_reverse_kl"), ("k3",)
        ),
        "skew": Setting(0.1, (0.01, 0.99), (0.0, 1.0)),
        "student_temperature": Setting(1.0, *POSITIVE),
        "teacher_temperature": Setting(1.0, *POSITIVE),
        "top_k": Setting(64, *COUNT),
        "sft_weight": Setting(0.0, *HALF_OPEN),
        "on_prompts": Setting(False, (True,)),
    },
}
REQUIRED: dict[type[BaseModel], dict[str, Any]] = {
    DistillationConfig: {"teacher": "t"},
    FilterConfig: {"level": "turn"},
}
SECTIONS = {"recipe", "reward", "weight", "rhythm", "correction", "kl", "teacher"}
ALL = [(config, name) for config, fields in SETTINGS.items() for name in fields]


@pytest.mark.parametrize("config, name", ALL, ids=lambda each: getattr(each, "__name__", each))
def test_a_setting(config, name):
    setting, required = SETTINGS[config][name], REQUIRED.get(config, {})
    made = getattr(config(**required), name)
    assert made == setting.default and type(made) is type(setting.default)
    for value in setting.fits:
        assert getattr(config(**required, **{name: value}), name) == value
    for value in setting.outside:
        with pytest.raises(ValidationError):
            config(**required, **{name: value})


@pytest.mark.parametrize("config", SETTINGS)
def test_no_setting_is_left_out(config):
    assert config.model_fields.keys() - SECTIONS - REQUIRED.get(config, {}).keys() == SETTINGS[config].keys()


TOGETHER = [
    (CorrectionConfig, {"keep_low": 2.0, "keep_high": 2.0}, ""),
    (CorrectionConfig, {"keep_low": 2.1, "keep_high": 2.0}, "keep_low"),
    (CorrectionConfig, {"proximal": "interpolated"}, "proximal"),
    (CorrectionConfig, {"proximal": "interpolated", "level": "token"}, ""),
    (CorrectionConfig, {"proximal": "interpolated", "filter_level": "turn"}, ""),
    (LossWeightConfig, {"mask_difficulty": (0.5, 0.5)}, "mask_difficulty"),
    (KlConfig, {"target": 0.1, "coefficient": 0.1, "place": "reward"}, ""),
    (KlConfig, {"target": 0.1, "coefficient": 0.1}, "target"),
    (KlConfig, {"target": 0.1, "place": "reward"}, "target"),
    (RhythmConfig, {"horizon_low": 5, "horizon_high": 4}, "horizon_low"),
    (RhythmConfig, {"horizon_low": 4, "horizon_high": 4}, ""),
    (AlgorithmConfig, {"disagreement_mask": 0.1}, "disagreement_mask"),
    (AlgorithmConfig, {"disagreement_mask": 0.1, "entropy_coefficient": 0.1}, ""),
    (AlgorithmConfig, {"dual_clip": 1.0}, "dual_clip"),
    (AlgorithmConfig, {"ratio_low": 2.0, "ratio_high": 2.0}, ""),
    (AlgorithmConfig, {"ratio_low": 2.5, "ratio_high": 2.0}, "ratio_low"),
    (AlgorithmConfig, {"recipe": "grop"}, "recipe"),
    (PreferenceConfig, {"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
    (PreferenceConfig, {"loss": "ipo"}, ""),
]


@pytest.mark.parametrize("config, given_, key", TOGETHER)
def test_what_goes_together(config, given_, key):
    if not key:
        config(**given_)
        return
    with pytest.raises(ValidationError) as refused:
        config(**given_)
    assert [mistake.key for mistake in refused.value.errors()[0]["ctx"]["error"].mistakes] == [key]


@given(
    kl=st.sampled_from([0.0, 0.1]),
    level=st.sampled_from([None, "token"]),
    filter_level=st.sampled_from([None, "turn"]),
    interpolated=st.booleans(),
    teacher=st.sampled_from([0.0, 1.0]),
    advantage=st.sampled_from(["grpo", "gae"]),
    agreement=st.sampled_from([0.0, 0.2]),
    disagreement=st.sampled_from([0.0, 0.2]),
    own=st.sampled_from([(), ("values",)]),
)
def test_what_is_asked_for(kl, level, filter_level, interpolated, teacher, advantage, agreement, disagreement, own):
    """Streams cost a forward pass each: none is computed that is not needed."""
    on = level is not None or filter_level is not None
    interpolated = interpolated and on
    correction = {"level": level, "filter_level": filter_level} | ({"proximal": "interpolated"} if interpolated else {})
    config = AlgorithmConfig(
        kl={"coefficient": kl},
        correction=correction,
        teacher_coefficient=teacher,
        advantage=advantage,
        agreement_mask=agreement,
        disagreement_mask=disagreement,
        entropy_coefficient=0.1,
        streams=own,
    )
    assert {spec.name for spec in config.required_streams} == frozenset(
        name
        for name, needed in {
            "reference_logprobs": kl > 0,
            "proximal_logprobs": on and not interpolated,
            "token_age": interpolated,
            "teacher_logprobs": teacher > 0,
            "values": advantage == "gae" or agreement > 0 or disagreement > 0 or own != (),
        }.items()
        if needed
    )


@pytest.mark.parametrize("agreement, disagreement", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.2, 0.2)])
@pytest.mark.parametrize("teacher", [0.0, 1.0])
def test_masks_need_values_and_teachers_their_log_probs(agreement, disagreement, teacher):
    masks = {"agreement_mask": agreement, "disagreement_mask": disagreement, "entropy_coefficient": 0.1}
    needed = AlgorithmConfig(**masks, teacher_coefficient=teacher).required_streams
    assert (VALUES in needed) == (agreement + disagreement > 0)
    assert (TEACHER_LOGPROBS in needed) == (teacher > 0)


def test_lists_of_lists_are_tuples():
    """A configuration file has lists where a setting is a tuple, also in a section of a section."""
    config = AlgorithmConfig(recipe="grpo", weight={"mask_difficulty": [0.1, 0.9]}, streams=["values"])
    assert config.weight.mask_difficulty == (0.1, 0.9) and config.streams == ("values",)


# What each recipe sets apart from the defaults, as its source has it.
SET = {
    "grpo": {},
    "dapo": {"clip_high": 0.28, "weight": LossWeightConfig(mask_truncated=True)},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "sequence_mean_token_sum_norm"},
    "rloo": {"advantage": "rloo", "loss": "policy_gradient", "aggregation": "sequence_mean_token_sum"},
    "gspo": {
        "ratio_level": "sequence",
        "clip_low": 0.0003,
        "clip_high": 0.0004,
        "aggregation": "sequence_mean_token_mean",
    },
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    "tis": {"loss": "tis"},
    "topr": {"advantage": "dr_grpo", "loss": "topr"},
    "decoupled_ppo": {"correction": CorrectionConfig(level="token", high=5.0)},
    "kimi": {"advantage": "dr_grpo", "loss": "kimi", "aggregation": "sequence_mean_token_sum"},
    "rhythm": {"rhythm": RhythmConfig(kind="coupled")},
    "reinforce": {"advantage": "reinforce", "loss": "policy_gradient"},
    "reinforce++": {"advantage": "reinforce_plus_plus"},
    "reinforce++_baseline": {"advantage": "reinforce_plus_plus_baseline"},
    "lite_ppo": {"advantage": "lite_ppo"},
    "raft": {"advantage": "dr_grpo", "loss": "topr", "negative_weight": 0.0},
    "weighted_topr": {"advantage": "dr_grpo", "loss": "topr", "negative_weight": 0.5},
    "ppo": {"advantage": "gae", "advantage_whiten": True},
    "asyppo": {
        "advantage": "gae",
        "clip_high": 0.28,
        "advantage_whiten": True,
        "agreement_mask": 0.2,
        "disagreement_mask": 0.2,
        "entropy_coefficient": 0.001,
    },
    "opd": {"advantage": "nothing", "teacher_coefficient": 1.0},
    "step_reinforce": {"advantage": "step_reinforce", "turn_gamma": 0.95},
    "gigpo": {"advantage": "gigpo", "turn_gamma": 0.95},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe(recipe):
    made, plain = AlgorithmConfig(recipe=recipe), AlgorithmConfig()
    found = {name: getattr(made, name) for name in AlgorithmConfig.model_fields}
    assert {name: value for name, value in found.items() if value != getattr(plain, name)} == SET[recipe] | (
        {"recipe": recipe} if recipe != "grpo" else {}
    )
