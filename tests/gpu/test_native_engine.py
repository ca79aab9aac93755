"""The native engine on a GPU: the same tokens and log-probabilities as on the CPU."""

import numpy as np
import pytest
import torch

from antiphon.core.types import OnUpdate
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.sampling import SamplingParams, sample
from tests.unit.engines.native_support import Host, make_model, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.5)])
@pytest.mark.parametrize("mode", [OnUpdate.RECOMPUTE, OnUpdate.RESTART])
def test_logprobs_belong_to_the_version_that_sampled(dtype: str, tolerance: float, mode: OnUpdate) -> None:
    host = Host(make_model("qwen3"), EngineConfig(slots=8, prefill_tokens=32, device="cuda", dtype=dtype))
    for i in range(20):
        how = {"top_p": 0.95 if i % 5 == 0 else 1.0, "temperature": 0.7 if i % 3 == 0 else 1.0}
        host.add(f"r{i}", prompt(i // 4, 5 + i), max_tokens=5 + i, seed=i, **how)
    host.step(8)
    host.publish(1, mode)
    host.run()
    errors, mixed = host.logprob_errors()
    assert not mixed.any() and len(errors) >= 290
    assert np.quantile(errors, 0.99) < tolerance


def test_the_first_gpu_is_taken_and_left():
    (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()  # libraries keep some memory
    before = torch.cuda.memory_allocated()
    host = Host(make_model("qwen3"), EngineConfig(slots=4, prefill_tokens=32))
    assert next(host.model.parameters()).is_cuda
    host.add("before", prompt(0, 20), max_tokens=8)
    host.run()
    reserved = torch.cuda.memory_reserved()
    host.engine.sleep()
    assert torch.cuda.memory_allocated() == before and torch.cuda.memory_reserved() < reserved
    host.engine.wake()
    host.add("after", prompt(0, 20), max_tokens=8)
    host.run()
    assert host.tokens("after") == host.tokens("before")


def test_support_that_is_recorded_is_that_of_a_cpu():
    mass = torch.rand(5, 300, generator=torch.Generator().manual_seed(3)).exp()
    count = len(mass)
    draw = SamplingParams(
        uniform=np.linspace(0.05, 0.95, count),
        temperature=np.array([1.0, 0.7, 0.0, 1.3, 1.0]),
        top_p=np.array([0.9, 1.0, 1.0, 0.5, 0.8], np.float32),
        top_k=np.array([0, 5, 0, 0, 9]),
        min_p=np.array([0.0, 0.0, 0.0, 0.1, 0.0], np.float32),
        support=np.array([64, 0, 0, 64, 0]),
    )
    here, there = (sample(mass.log().to(device), draw) for device in ("cpu", "cuda"))
    assert (here.tokens == there.tokens).all() and (here.support == there.support).all()
    np.testing.assert_allclose(there.logprobs, here.logprobs, atol=1e-4)
