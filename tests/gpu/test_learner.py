"""The learner on a GPU: the gradient is that of a CPU, and the memory is given back."""

import numpy as np
import pytest
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.learning.backends.offloaded_storages import OffloadedStorages
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import LearnerConfig, LoraConfig, OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.torch_learner import TorchLearner
from tests.unit.learning.conftest import make_learner, make_sample, model_directories
from tests.unit.learning.test_gradient import gradient_of, relative, siblings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

__all__ = ["model_directories"]  # a fixture
KINDS = ["tied llama", "qwen3"]  # whose queries and keys are in half precision under autocast, and are not


def samples():
    rng = np.random.default_rng(3)
    return [make_sample(rng, length, i) for i, length in enumerate((40, 2, 9, 17, 5))] + siblings(rng, 4)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_a_cpu(model_directories, kind, dtype, tolerance):
    algorithm = AlgorithmConfig(entropy_coefficient=0.01)
    batch = build_batch([samples()], BatchOptions(aggregation="token_mean", max_tokens=1, tokens_per_pack=64))
    gradients, said = [], []
    for device, precision in (("cpu", "float32"), ("cuda", dtype)):
        learner = make_learner(model_directories[kind], device=device, dtype=precision, logits_chunk=17)
        gradients.append(gradient_of(learner, samples(), algorithm, 64).cpu())
        learner.model.zero_grad()
        said.append(learner.step(batch))
    assert relative(*reversed(gradients)) < tolerance
    for name in ("loss", "entropy", "grad_norm", "mismatch_kl"):
        assert said[1][name] == pytest.approx(said[0][name], rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prompt_does_not_change_a_gradient(model_directories, kind, dtype, tolerance, checkpointing):
    options = {"device": "cuda", "dtype": dtype, "gradient_checkpointing": checkpointing}
    learner = make_learner(model_directories[kind], **options)
    shared, plain = (
        gradient_of(learner, samples(), AlgorithmConfig(), 10**6, share=share).cpu() for share in (True, False)
    )
    assert relative(shared, plain) < tolerance


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model with an embedding and a head of 16 MiB each: large enough to have pieces of the device to themselves."""
    directory = tmp_path_factory.mktemp("large")
    shape = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=4)).save_pretrained(directory)
    return str(directory)


def begun(model):
    learner = TorchLearner(model, LearnerConfig(device="cuda", dtype="bfloat16"), seed=0)
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-4), 4)
    return learner


def lesson(seed):
    rng = np.random.default_rng(seed)
    texts = [tuple(rng.integers(0, 8192, length).astype(np.int32) for length in (20, 9)) for _ in range(8)]
    return supervised_batch(texts, 128)


def test_offloaded_learner_frees_memory_and_continues(large):
    learner, other = begun(large), begun(large)
    for each in (learner, other):
        each.step(lesson(0))
    weights = sum(parameter.numel() for parameter in learner.model.parameters()) * 4
    used, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    learner.offload()
    assert torch.cuda.memory_allocated() <= used - 3 * weights  # and two moments
    assert torch.cuda.memory_reserved() <= held - weights  # for others; the rest may lie beside what stays
    assert not any(parameter.is_cuda for parameter in learner.model.parameters())
    learner.reload()
    want, found = other.step(lesson(1)), learner.step(lesson(1))
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(want[name], rel=1e-2), name


def test_a_restored_learner_goes_on(large, tmp_path):
    learner, other = begun(large), begun(large)
    learner.step(lesson(0))
    learner.emit = lambda event: None
    learner.save(tmp_path / "step_000001")
    while learner.advance():
        pass
    other.restore(tmp_path / "step_000001")
    for seed in (1, 2):
        want, found = learner.step(lesson(seed)), other.step(lesson(seed))
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(want[name], rel=1e-2), name


def test_the_base_of_adapters_takes_half_of_the_memory(large, tmp_path):
    LlamaForCausalLM.from_pretrained(large).bfloat16().save_pretrained(tmp_path)
    before = torch.cuda.memory_allocated()
    config = LearnerConfig(device="cuda", dtype="bfloat16", lora=LoraConfig(rank=2), tokens_per_pack=128)
    learner = TorchLearner(str(tmp_path), config, seed=0)
    parameters = [*learner.model.parameters()]
    assert all(parameter.is_cuda for parameter in parameters)
    used, weights = torch.cuda.memory_allocated() - before, sum(parameter.numel() for parameter in parameters)
    embedding = learner.model.get_input_embeddings().weight.numel()
    assert used < 1.05 * (2 * weights + 2 * embedding)
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-4), 4)
    assert np.isfinite(learner.step(lesson(0))["loss"])


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model whose layers keep more than their weights take."""
    directory = tmp_path_factory.mktemp("deep")
    shape = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8}
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(directory)
    return str(directory)


def test_activations_in_host_memory_leave_room_on_the_device(deep):
    rng = np.random.default_rng(0)
    texts = [tuple(rng.integers(0, 64, length).astype(np.int32) for length in (512, 512)) for _ in range(2)]
    ((pack,),) = (update.packs[0] for update in supervised_batch(texts, 2048).updates)
    kept, gradients = [], []
    for offloaded in (False, True):
        how = {"gradient_checkpointing": True, "activation_offload": offloaded}
        learner = TorchLearner(deep, LearnerConfig(device="cuda", **how), seed=0)
        before = torch.cuda.memory_allocated()
        hidden, _ = learner._hidden_states(pack)
        kept.append(torch.cuda.memory_allocated() - before)
        hidden.square().sum().backward()
        gradients.append([parameter.grad.cpu() for parameter in learner.model.base_model.parameters()])
        del hidden
    assert all(map(torch.equal, *gradients))
    of_a_layer = 2048 * 256 * 4
    assert kept[0] >= 8 * of_a_layer and kept[1] <= kept[0] - 7 * of_a_layer


@pytest.mark.driver
def test_moments_of_8_bits_are_those_of_a_cpu(large):
    learners = []
    for device in ("cpu", "cuda"):
        learner = TorchLearner(large, LearnerConfig(device=device), seed=0)
        learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-4, moments="8bit"), 4)
        for seed in range(3):
            learner.step(lesson(seed))
        learners.append(learner)
    moments = [dict(learner._optimizer_moments()) for learner in learners]
    for name in moments[0]:
        ours, theirs = (own[name]["exp_avg"]().cpu() for own in reversed(moments))
        assert relative(ours, theirs) < 0.05, name


@pytest.mark.driver
def test_a_quantised_base_is_that_of_a_cpu(large):
    said = []
    for device in ("cpu", "cuda"):
        learner = TorchLearner(large, LearnerConfig(device=device, lora=LoraConfig(rank=2, quantize="nf4")), seed=0)
        learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-3), 4)
        said.append([learner.step(lesson(seed))["loss"] for seed in range(3)])
    assert said[1] == pytest.approx(said[0], rel=1e-3)


@pytest.mark.driver
def test_an_offloaded_learner_has_little_on_the_device(large):
    """FSDP on one rank, which NCCL is part of."""
    learner = TorchLearner(large, LearnerConfig(device="cuda", cpu_offload=True), seed=0)
    learner.join(0, learner.host("127.0.0.1"))
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-4), 4)
    other = begun(large)
    for seed in range(2):
        want, found = other.step(lesson(seed)), learner.step(lesson(seed))
        assert found["loss"] == pytest.approx(want["loss"], rel=1e-2)
    del other
    assert not any(parameter.is_cuda for parameter in learner.model.parameters())
    distributed.destroy_process_group()


def test_storages_leave_the_device_and_come_back_to_their_views():
    """As those of DeepSpeed and Megatron do, whose buffers many tensors are views of."""
    buffer, scratch = torch.arange(1e6, device="cuda"), torch.ones(1_000_000, device="cuda")
    view, used, offloaded = buffer[7:], torch.cuda.memory_allocated(), OffloadedStorages()
    offloaded.take([scratch], buffer.device, copy=False)
    offloaded.take([view, buffer], buffer.device)
    assert torch.cuda.memory_allocated() <= used - 8_000_000
    offloaded.restore()
    assert view.is_cuda and view[:2].tolist() == [7.0, 8.0] and not scratch.any()
    buffer.fill_(3.0)
    assert view[-1].item() == 3.0
