"""The rhythm of attention against whole maps, and what reading it takes."""

import asyncio
import doctest
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.sections import RhythmConfig
from antiphon.core.errors import UnsupportedError
from antiphon.core.types import ATTENTION_RHYTHM, IntArray, Pack, Sample
from antiphon.learning.config import OptimizerConfig
from antiphon.learning.model import attention_stats, pack_layout
from antiphon.learning.packing import pack_samples, split_packs
from antiphon.learning.stages import advantages, annotate
from antiphon.learning.torch_learner import TorchLearner

from .conftest import SHAPE, histories, make_learner, make_sample
from .test_gradient import siblings
from .test_stages import step_of

# Deep enough for several layers to be read, and with weights wide enough for heads to differ.
DEEP = {**SHAPE, "num_hidden_layers": 7, "initializer_range": 0.3, "max_position_embeddings": 4096}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DEEP)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**DEEP, "num_key_value_heads": 1}, head_dim=16)),
    "llama of two layers": lambda: LlamaForCausalLM(LlamaConfig(**{**DEEP, "num_hidden_layers": 2})),
}
READ = {"llama": [2, 3, 4], "qwen3": [2, 3, 4], "llama of two layers": [0, 1]}
WIDE = RhythmConfig(kind="local", window=4, horizon_low=2, horizon_high=9)


@pytest.fixture(scope="module")
def deep_models(tmp_path_factory):
    directories = {}
    for name, make in MODELS.items():
        torch.manual_seed(11)
        directories[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        make().save_pretrained(directories[name])
    return directories


def attentive(directory, config: RhythmConfig = WIDE, **options) -> TorchLearner:
    learner = make_learner(directory, **options)
    learner.begin(AlgorithmConfig(rhythm=config), OptimizerConfig(), 1)
    return learner


def of_turns(sample: Sample, *turns: tuple[int, int]) -> Sample:
    """The sample, as if sampled in these spans only."""
    places = np.arange(len(sample.segment.tokens))
    mask = np.any([(places >= start) & (places < stop) for start, stop in turns], axis=0)
    return replace(sample, segment=replace(sample.segment, loss_mask=mask))


def mixed(seed: int = 3) -> list[Sample]:
    """Single answers, siblings that share a prompt, and conversations of several turns."""
    rng = np.random.default_rng(seed)
    samples = [make_sample(rng, length, number) for number, length in enumerate((40, 2, 23, 9))]
    samples += [of_turns(make_sample(rng, 37, 50), (5, 11), (14, 15), (20, 37))]
    samples += [of_turns(make_sample(rng, 30, 51), (8, 12), (25, 27))]
    return samples + siblings(rng, 4) + histories(rng, 6)


def attended(learner: TorchLearner, samples: list[Sample], tokens_per_pack: int) -> list[np.ndarray]:
    members, packs = pack_samples(samples, tokens_per_pack)
    return split_packs(samples, members, learner.attention_stats(packs))


def maps_of(model, tokens: IntArray, layers: list[int]) -> np.ndarray:
    """The whole maps of the heads of some layers, [heads, L, L]."""
    with torch.no_grad():
        found = model(torch.from_numpy(tokens)[None].long(), output_attentions=True).attentions
    return torch.cat([found[layer][0] for layer in layers]).double().numpy()


def written_out(maps: np.ndarray, mask: np.ndarray, config: RhythmConfig) -> np.ndarray:
    """WAAD and FAI as the paper defines them, sum by sum, [L, 2]."""
    rows = [t for t in range(1, len(mask)) if mask[t]]
    spans = [np.mean([sum(a[t, s] * (t - s) for s in range(t + 1)) for t in rows]) for a in maps]
    order = sorted(range(len(maps)), key=lambda head: spans[head])
    count = max(1, round(0.3 * len(maps)))
    local, far = (np.mean([maps[head] for head in heads], axis=0) for heads in (order[:count], order[-count:]))
    result = np.zeros((len(mask), 2))
    for t in rows:
        result[t, 0] = sum(local[t, s] * min(t - s, config.window) for s in range(t + 1))
        later = [far[u, t] for u in rows if t + config.horizon_low <= u <= t + config.horizon_high]
        result[t, 1] = np.mean(later) if later else 0
    return result


def test_examples():
    for module in (attention_stats, pack_layout):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


# --- what is read --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WIDE, RhythmConfig(kind="global"), WIDE.model_copy(update={"horizon_low": 0})])
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_that_of_whole_maps(deep_models, kind, config):
    samples = mixed()
    model = AutoModelForCausalLM.from_pretrained(deep_models[kind], attn_implementation="eager")
    found = attended(attentive(deep_models[kind], config), samples, 90)
    for sample, values in zip(samples, found, strict=True):
        segment = sample.segment
        wanted = written_out(maps_of(model, segment.tokens, READ[kind]), segment.loss_mask, config)
        np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)
        assert not values[~segment.loss_mask].any() and values.dtype == np.float32


def test_sums_do_not_depend_on_blocks(monkeypatch):
    torch.manual_seed(0)
    query, key = torch.randn(6, 30, 8, dtype=torch.float64), torch.randn(2, 50, 8, dtype=torch.float64)
    rows = np.sort(np.random.default_rng(0).permutation(50)[:30])
    whole = attention_stats.head_sums(query, key, rows, 0.7, WIDE)
    for size in (1, 700, 2500):
        monkeypatch.setattr(attention_stats, "BLOCK", size)
        for cut, uncut in zip(attention_stats.head_sums(query, key, rows, 0.7, WIDE), whole, strict=True):
            torch.testing.assert_close(cut, uncut)


@given(st.data())
def test_sums_over_parts_of_the_rows_add_up(data):
    """As those of ranks that have some queries each."""
    seed, count, parts = (data.draw(st.integers(1, most)) for most in (99, 12, 4))
    rng = np.random.default_rng(seed)
    rows, owner = np.sort(rng.permutation(20)[:count]), rng.integers(0, parts, count)
    query, key = (torch.from_numpy(rng.normal(size=shape)) for shape in ((4, count, 6), (2, 20, 6)))
    whole = attention_stats.head_sums(query, key, rows, 0.7, WIDE)
    found = []
    for part in range(parts):
        here = np.flatnonzero(owner == part)
        found.append(attention_stats.head_sums(query[:, here], key, rows, 0.7, WIDE, here))
    for several, one in zip(reduce(attention_stats.HeadSums.plus, found), whole, strict=True):
        torch.testing.assert_close(several, one)


def test_spans_are_mean_distances():
    torch.manual_seed(0)
    query, key, rows = torch.randn(4, 5, 8), torch.randn(4, 12, 8), np.array([2, 3, 7, 8, 11])
    found = attention_stats.head_sums(query, key, rows, 1.0, WIDE).spans
    for head in range(4):
        maps = [(query[head, i] @ key[head, : t + 1].T).softmax(-1) for i, t in enumerate(rows)]
        spans = [float((a * (t - torch.arange(t + 1))).sum()) for a, t in zip(maps, rows, strict=True)]
        assert float(found[head]) == pytest.approx(np.mean(spans), abs=1e-5)


@settings(max_examples=15)
@given(data=st.data())
def test_packing_does_not_change_it(deep_models, data):
    learner = attentive(deep_models["llama"])
    samples = mixed(data.draw(st.integers(0, 2**32 - 1)))
    alone = attended(learner, samples, 1)
    order = data.draw(st.permutations(range(len(samples))))
    packed = attended(learner, [samples[i] for i in order], data.draw(st.integers(1, 300)))
    for index, values in zip(order, packed, strict=True):
        np.testing.assert_allclose(values, alone[index], rtol=0, atol=1e-5)


def test_it_is_that_of_the_learner_as_it_is_now(deep_models):
    learner, samples = attentive(deep_models["llama"]), mixed()
    before = attended(learner, samples, 300)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.1)
    assert all(
        np.abs(now - then).max() > 1e-3 for now, then in zip(attended(learner, samples, 300), before, strict=True)
    )
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_sums_are_single_where_the_model_is_not(deep_models):
    torch.manual_seed(0)
    module, found = torch.nn.Module(), []
    module.layer_idx = 0
    query, key = torch.randn(4, 12, 8).bfloat16(), torch.randn(2, 12, 8).bfloat16()
    for half in (True, False):
        reader = attention_stats.AttentionStatsReader(small_pack(), [0], WIDE, torch.device("cpu"))
        given = (query, key) if half else (query.float(), key.float())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half), pytest.raises(attention_stats.AllLayersRead):
            reader.read(module, *given, None)
        found.append(reader.values())
    np.testing.assert_array_equal(*found)
    (values,) = attentive(deep_models["llama"], dtype="bfloat16").attention_stats([small_pack()])
    assert np.isfinite(values).all() and values.any()


def small_pack() -> Pack:
    (pack,) = pack_samples([make_sample(np.random.default_rng(0), 12, 0)], 12)[1]
    return pack


# --- what it takes -------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made inside, views left aside."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


@pytest.mark.parametrize("length", [256, 512, 1024])
def test_memory_is_linear_in_length(deep_models, monkeypatch, length):
    monkeypatch.setattr(attention_stats, "BLOCK", 2**14)
    learner = attentive(deep_models["llama"])
    sample = of_turns(make_sample(np.random.default_rng(0), length, 0), (16, length))
    with Largest() as largest:
        attended(learner, [sample], length)
    assert largest.elements <= 64 * length  # of a block at the shortest; of the feed-forward layer at the others


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_the_layers_above_are_not_run(deep_models, kind, checkpointing):
    learner = attentive(deep_models[kind], gradient_checkpointing=checkpointing)
    begun, ended = [], []
    for number, layer in enumerate(learner.model.model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: begun.append(number))
        layer.mlp.register_forward_hook(lambda *_, number=number: ended.append(number))
    learner.attention_stats(pack_samples(mixed(), 10**4)[1])
    assert begun == list(range(READ[kind][-1] + 1)) and ended == list(range(READ[kind][-1]))


def test_a_pack_without_loss_tokens_has_no_rhythm(deep_models):
    sample = of_turns(make_sample(np.random.default_rng(0), 8, 0), (0, 1))  # nothing predicts the first token
    (values,) = attended(attentive(deep_models["llama"]), [sample], 8)
    assert values.shape == (8, 2) and not values.any()


# --- what cannot be read -------------------------------------------------------------------------------------------------


def test_windows_are_refused(tmp_path):
    """... by training as by reading, unless no sequence is longer than they are."""
    for window in (11, 12):
        config = Qwen3Config(**DEEP, head_dim=8, use_sliding_window=True, sliding_window=window, max_window_layers=0)
        Qwen3ForCausalLM(config).save_pretrained(tmp_path / str(window))
    narrow, wide = attentive(tmp_path / "11"), attentive(tmp_path / "12")
    for look in (narrow.attention_stats, narrow.predict):
        with pytest.raises(UnsupportedError, match="window of 11"):
            look([small_pack()])  # of one sequence of 12 tokens
    assert wide.attention_stats([small_pack()])[0].any() and wide.predict([small_pack()])[0].any()


def test_layers_without_a_number_are_refused(deep_models):
    learner = attentive(deep_models["llama"])
    del learner.model.model.layers[3].self_attn.layer_idx
    with pytest.raises(UnsupportedError, match=r"\[3\]"):
        learner.attention_stats([small_pack()])


# --- in a step -----------------------------------------------------------------------------------------------------------


def test_a_step_amplifies_what_its_learner_attends_to(deep_models):
    config = RhythmConfig(kind="local", share=0.25, amplification=3.0)
    step = step_of(deep_models["llama"], AlgorithmConfig(rhythm=config, advantage_clip=1.0))
    step.pipeline.estimate_advantages = lambda groups, _: [
        [np.full(9, -2.0, np.float32) for _ in samples] for samples in groups
    ]
    asyncio.run(annotate(step))
    asyncio.run(advantages(step))
    for sample in (sample for samples in step.samples for sample in samples):
        waad = sample.streams[ATTENTION_RHYTHM][sample.segment.loss_mask, 0]
        delta = [*np.abs(waad[:-1] - waad[1:]), 0]
        chosen = sorted(range(len(waad)), key=lambda t: -delta[t])[: max(1, round(len(waad) / 4))]
        wanted = [-3.0 if t in chosen and delta[t] > 0 else -1.0 for t in range(len(waad))]
        np.testing.assert_array_equal(sample.advantages[sample.segment.loss_mask], np.float32(wanted))
        assert (sample.advantages[~sample.segment.loss_mask] == -1).all()


def test_a_step_without_it_does_not_ask(deep_models):
    step = step_of(deep_models["llama"], AlgorithmConfig(rhythm=RhythmConfig(kind="random")))
    asyncio.run(annotate(step))
    assert not any(ATTENTION_RHYTHM in sample.streams for samples in step.samples for sample in samples)
