"""Dropout of adapters: which numbers it drops, when, and that nothing but the text decides it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.errors import UnsupportedError
from antiphon.learning.config import OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.model import lora
from antiphon.learning.model.dropout import TextDropout, hash_texts
from antiphon.learning.packing import pack_samples
from tests.raising import raises_with

from .conftest import histories, make_learner
from .test_learner import examples
from .test_lora import LORA, packs, saved

RATE = 0.3
DROPPED = LORA.model_copy(update={"dropout": RATE})


def opened(directory, steps=0, added=DROPPED, **config):
    learner = make_learner(directory, lora=added, **config)
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2), 9)
    for _ in range(steps):
        learner.step(supervised_batch(examples(), 100))
    return learner


def gradient(learner, tokens=1000) -> dict[str, np.ndarray]:
    """The gradient of the adapters over packs of so many tokens."""
    learner.model.zero_grad()
    for update in supervised_batch(examples(), tokens).updates:
        for pack in update.packs[0]:
            learner._backward(pack)
    return {name: p.grad.numpy().copy() for name, p in learner.model.named_parameters() if p.grad is not None}


def masks(dropout, columns=512) -> np.ndarray:
    """The columns of each row that are kept."""
    return dropout(torch.ones(len(dropout.keys), columns)).numpy() > 0


def keys(seed=0, update=0, count=400) -> torch.Tensor:
    (pack,) = pack_samples(histories(np.random.default_rng(1), count), 10**6)[1]
    return torch.from_numpy(hash_texts(pack, seed, update)).unique()


def test_the_rate_is_dropped_and_the_rest_scaled():
    dropout = TextDropout(RATE, "0.q_proj")
    dropout.keys = keys()
    out = dropout(torch.full((len(dropout.keys), 512), 2.0))
    assert out.unique().tolist() == pytest.approx([0.0, 2 / (1 - RATE)])
    spread = (RATE * (1 - RATE) / out.numel()) ** 0.5
    assert (out == 0).double().mean().item() == pytest.approx(RATE, abs=4 * spread)
    for axis, others in ((0, 512), (1, len(out))):  # no row and no column is favoured
        shares = (out == 0).double().mean(axis)
        assert shares.std().item() == pytest.approx((RATE * (1 - RATE) * others / out.numel()) ** 0.5, rel=0.2)


@pytest.mark.parametrize("other", ["layer", "update", "seed", "row", "column"])
def test_masks_are_independent(other):
    """Of two layers, updates, seeds, rows, or columns, as often both drop as chance would have it."""
    one, two = TextDropout(RATE, "0.q_proj"), TextDropout(RATE, "1.q_proj" if other == "layer" else "0.q_proj")
    one.keys = two.keys = keys()
    if other in ("update", "seed"):
        (first,) = pack_samples(histories(np.random.default_rng(1), 400), 10**6)[1]
        two.keys = torch.from_numpy(hash_texts(first, *((0, 1) if other == "update" else (1, 0))))
        one.keys = torch.from_numpy(hash_texts(first, 0, 0))
    mine, theirs = masks(one), masks(two)
    if other == "row":
        mine, theirs = mine[1:], mine[:-1]
    if other == "column":
        mine, theirs = mine[:, 1:], mine[:, :-1]
    correlation = np.corrcoef(mine.ravel(), theirs.ravel())[0, 1]
    assert abs(correlation) < 5 / mine.size**0.5


def test_without_keys_nothing_is_dropped_and_other_rows_are_refused():
    dropout, x = TextDropout(RATE, "layer"), torch.randn(3, 5)
    assert dropout(x) is x
    dropout.keys = torch.zeros(4, dtype=torch.int32)
    with raises_with(UnsupportedError, key="learner.lora.dropout", value=RATE):
        dropout(x)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 9), tokens=st.integers(14, 200), share=st.booleans())
def test_a_mask_follows_from_the_text_alone(seed, count, tokens, share):
    """However samples are packed, and if prefixes are shared: a text has one hash, and others have others."""
    samples, found = histories(np.random.default_rng(seed), count), dict[tuple[int, ...], int]()
    for limit, shared in ((tokens, share), (10**6, not share)):
        for pack in pack_samples(samples, limit, share=shared)[1]:
            hashes, ends = hash_texts(pack, 7, 3), np.cumsum(pack.lengths)
            texts: list[list[int]] = []
            for end, length, parent in zip(ends, pack.lengths, pack.parents, strict=True):
                texts.append(texts[parent][:] if parent >= 0 else [])
                for place in range(end - length, end):
                    texts[-1].append(int(pack.tokens[place]))
                    assert found.setdefault(tuple(texts[-1]), int(hashes[place])) == hashes[place]
    assert len({*found.values()}) == len(found)


def test_the_gradient_is_that_of_peft_with_these_masks(model_directories):
    """Of peft's own layers, in place of whose dropout the same masks stand, sequence by sequence."""
    learner = opened(model_directories["llama"], steps=1)
    ours = gradient(learner)
    targets = [name.removesuffix(".weight") for name in lora.adapter_pairs(learner.model.named_parameters())]
    base = AutoModelForCausalLM.from_pretrained(model_directories["llama"])
    theirs = get_peft_model(base, PeftConfig(r=2, lora_alpha=8.0, lora_dropout=RATE, target_modules=targets))
    own = {f"base_model.model.{name}": p for name, p in learner.model.named_parameters() if lora.is_adapter(name)}
    assert not theirs.load_state_dict(own, strict=False).unexpected_keys
    state = {"here": slice(0)}
    for name, layer in learner.model.named_modules():
        if hasattr(layer, "lora_A"):

            def drop(x, dropout=layer.lora_dropout[lora.NAME]):
                kept = dropout(torch.ones(len(dropout.keys), x.shape[-1]))
                return x * kept[state["here"]]

            other = theirs.get_submodule(f"base_model.model.{name}").lora_dropout[lora.NAME]
            assert other.p == RATE
            other.forward = drop
    ((pack,),) = [update.packs[0] for update in supervised_batch(examples(), 1000).updates]
    theirs.train()
    for start, length in zip(np.cumsum(pack.lengths) - pack.lengths, pack.lengths, strict=True):
        here = state["here"] = slice(start, start + length)
        tokens = torch.from_numpy(pack.tokens[here]).long()
        logprobs = theirs(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        (torch.from_numpy(pack.coefficients[here][1:]) * -logprobs).sum().backward()
    for name, found in ours.items():
        np.testing.assert_allclose(
            found, theirs.get_parameter(f"base_model.model.{name}").grad.numpy(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    ("how", "exact"),
    [({"gradient_checkpointing": True}, True), ({"gradient_checkpointing": True, "activation_offload": True}, True)],
)
def test_layers_that_are_computed_again_drop_the_same(model_directories, how, exact):
    plain, again = (opened(model_directories["qwen3"], steps=1, **config) for config in ({}, how))
    for (name, one), (_, other) in zip(gradient(plain).items(), gradient(again).items(), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_another_pack_in_between_changes_no_mask(model_directories):
    """As in a pipeline, which has several packs under way: each is computed again with the masks that it had."""
    learner = opened(model_directories["llama"], steps=1, gradient_checkpointing=True)
    packed = [pack for update in supervised_batch(examples(), 40).updates for pack in update.packs[0]]
    losses, expected = [], gradient(learner, 40)
    learner.shards.backward = losses.append
    learner.model.zero_grad()
    for pack in packed:
        learner._backward(pack)
    assert len(losses) > 1
    for loss in losses:
        loss.backward()
    for name, parameter in learner.model.named_parameters():
        if parameter.grad is not None:
            np.testing.assert_allclose(parameter.grad.numpy(), expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_packs_do_not_change_the_gradient(model_directories, model):
    learner = opened(model_directories[model], steps=1)
    whole, parts = gradient(learner, 1000), gradient(learner, 20)
    for name, found in parts.items():
        np.testing.assert_allclose(found, whole[name], rtol=1e-3, atol=1e-6)


def test_only_updates_drop(model_directories):
    learner = opened(model_directories["llama"], steps=2)
    plain = opened(model_directories["llama"], added=LORA)
    for name, parameter in plain.model.named_parameters():
        parameter.data.copy_(learner.model.get_parameter(name))
    for method in ("predict", "predict_base", "logprobs_and_entropies"):
        for ours, theirs in zip(getattr(learner, method)(packs()), getattr(plain, method)(packs()), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    with torch.no_grad():  # as packs without advantage are measured
        (ours, theirs) = (each._backward(packs()[0]) for each in (learner, plain))
    assert ours["loss"] == theirs["loss"]
    ours, theirs = (each._backward(packs()[0]) for each in (learner, plain))
    assert ours["loss"] != theirs["loss"] and ours["mismatch_kl"] != theirs["mismatch_kl"]


def test_each_update_drops_others(model_directories):
    learner = opened(model_directories["llama"], steps=1)
    first = gradient(learner)
    assert all((first[name] == again).all() for name, again in gradient(learner).items())
    learner.scheduler.last_epoch += 1
    assert all((first[name] != other).any() for name, other in gradient(learner).items())


def test_a_restored_learner_drops_the_same(model_directories, tmp_path):
    learner, other = opened(model_directories["llama"], steps=3), opened(model_directories["llama"])
    other.restore(saved(learner, tmp_path / "step"))
    assert PeftConfig.from_pretrained(tmp_path / "step" / "adapter").lora_dropout == RATE
    for _ in range(2):
        ours, theirs = (each.step(supervised_batch(examples(7), 100)) for each in (learner, other))
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}
