"""AdamW with moments of 8 bits: it learns as with float32, in a quarter of their memory, and goes on from both kinds."""

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.errors import ConfigError
from antiphon.learning.config import OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from tests.raising import raises_with

from .conftest import SHAPE, make_learner
from .test_learner import examples

BATCH = supervised_batch(examples(), 40)
EIGHT = "8bit"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a model whose matrices are large enough to have their moments quantised, but for the embedding."""
    torch.manual_seed(7)
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 128})).save_pretrained(directory)
    return directory


def opened(directory, moments, steps=0, rate=1e-2, **config):
    learner = make_learner(directory, tokens_per_pack=40, **config)
    optimizer = OptimizerConfig(learning_rate=rate, moments=moments, schedule="linear", weight_decay=0.1)
    learner.begin(AlgorithmConfig(loss="sft"), optimizer, 60)
    learner.losses = [learner.step(BATCH)["loss"] for _ in range(steps)]
    return learner


def bytes_of(learner):
    """Of the state of each parameter."""
    for parameter, state in learner.optimizer.state.items():
        yield parameter, sum(value.nbytes for key, value in state.items() if key.startswith("exp_avg"))


def weights(learner):
    return {name: tensor.detach().clone() for name, tensor in learner.model.named_parameters()}


def test_it_learns_as_with_moments_in_float32(model):
    plain, quantised = (opened(model, moments, 60).losses for moments in ("float32", EIGHT))
    assert plain[0] > 3 and plain[-1] < 0.1 and quantised[-1] < 0.1
    assert quantised[:12] == pytest.approx(plain[:12], rel=0.05)


def test_its_step_is_that_of_torch_until_moments_are_rounded(model):
    """The first step: its moments are those of the gradient alone."""
    plain, quantised = (weights(opened(model, moments, 1)) for moments in ("float32", EIGHT))
    for name, tensor in plain.items():
        torch.testing.assert_close(quantised[name], tensor, rtol=0, atol=1e-6)


def test_large_moments_take_a_byte_each(model):
    found, tables = {True: 0, False: 0}, 2 * 4 * 256  # of the values that bytes stand for
    for parameter, size in bytes_of(opened(model, EIGHT, 1)):
        large = parameter.numel() >= 4096
        byte = OptimizerConfig(moments=EIGHT).moment_bytes
        assert size == (2 * parameter.numel() * byte + tables if large else 2 * parameter.nbytes)
        found[large] += 1
    assert all(found.values())


@pytest.mark.parametrize(("before", "after"), [(EIGHT, EIGHT), (EIGHT, "float32"), ("float32", EIGHT)])
def test_it_goes_on_from_a_checkpoint(model, tmp_path, before, after):
    learner = opened(model, before, 3)
    learner.emit = print
    learner.save(tmp_path)
    learner._writer.finish()
    other = opened(model, after)
    other.restore(tmp_path)
    kept = torch.load(tmp_path / "training_state" / "0.pt", weights_only=True)["moments"]
    assert {value.dtype for state in kept.values() for value in state.values()} == {torch.float32}
    fresh = opened(model, after, 1)
    assert sorted(size for _, size in bytes_of(other)) == sorted(size for _, size in bytes_of(fresh))
    said, heard = learner.step(BATCH), other.step(BATCH)
    assert heard["lr"] == said["lr"]
    same = before == after
    for name, tensor in weights(learner).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=0, atol=0 if same else 2e-3)


def test_moments_leave_the_device_and_come_back(model):
    learner, other = (opened(model, EIGHT, 2) for _ in range(2))
    learner.offload()
    learner.reload()
    learner.step(BATCH), other.step(BATCH)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(weights(learner)[name], tensor, rtol=0, atol=0)


def test_a_missing_package_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises_with(ConfigError, value="bitsandbytes"):
        opened(model, EIGHT)
