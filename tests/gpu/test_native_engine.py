"""The native engine on a GPU: the same tokens and log-probabilities as on the CPU."""

import numpy as np
import pytest
import torch

from antiphon.core.types import OnUpdate
from antiphon.engines.config import EngineConfig
from tests.unit.engines.native_support import Host, make_model, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.5)])
@pytest.mark.parametrize("mode", [OnUpdate.RECOMPUTE, OnUpdate.RESTART])
def test_logprobs_belong_to_the_version_that_sampled(dtype: str, tolerance: float, mode: OnUpdate) -> None:
    host = Host(make_model("qwen3"), EngineConfig(slots=8, prefill_tokens=32, device="cuda", dtype=dtype))
    for i in range(20):
        host.add(f"r{i}", prompt(i // 4, 5 + i), max_tokens=5 + i, seed=i, top_p=0.95 if i % 5 == 0 else 1.0)
    host.step(8)
    host.publish(1, mode)
    host.run()
    errors, mixed = host.logprob_errors()
    assert not mixed.any() and len(errors) >= 290
    assert np.quantile(errors, 0.99) < tolerance
