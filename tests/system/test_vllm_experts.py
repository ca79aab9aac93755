"""Experts that vLLM records, on a CPU in Triton's interpreter: they are those of transformers, and a run replays them."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import UnsupportedError
from antiphon.core.types import ROUTED_EXPERTS, GenerateRequest, OnUpdate, Sampling
from antiphon.engines.config import EngineKind
from antiphon.engines.remote_engine import RemoteEngine
from antiphon.run.launch.engines import ENGINE_WORKER
from antiphon.weights.base import TransferContext, open_channel

TRITON = Path(__file__).parents[1] / "interpreted_triton"
DENSE = 1  # the layer without experts
PER_TOKEN = 2


@pytest.fixture(scope="module")
def interpreter(vllm_python, tmp_path_factory):
    """An interpreter with vLLM whose Triton kernels run on a CPU."""
    script = tmp_path_factory.mktemp("interpreter") / "python"
    environment = f'TRITON_INTERPRET=1 PYTHONPATH="{TRITON}{os.pathsep}$PYTHONPATH"'
    script.write_text(f'#!/bin/sh\n{environment} exec "{vllm_python or sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory, model):
    """Two models with sharp routers, so that the choice of experts matters; the second is in memory alone."""
    directory = tmp_path_factory.mktemp("mixture")
    for path in model.iterdir():
        if "token" in path.name:
            (directory / path.name).write_bytes(path.read_bytes())
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        shape = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        experts = {"num_experts": 16, "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": 32}
        config = Qwen3MoeConfig(
            vocab_size=101, num_key_value_heads=1, head_dim=32, eos_token_id=0, bos_token_id=None, pad_token_id=None,
            max_position_embeddings=512, mlp_only_layers=[DENSE], initializer_range=0.2, **shape, **experts,
        )  # fmt: skip
        found.append(Qwen3MoeForCausalLM(config).eval())
    found[0].save_pretrained(directory)
    return directory, found


def routed(model, request, completion):
    """The experts that transformers takes for each token of a completion, [C, layers, k]."""
    tokens = torch.tensor([[*request.tokens.tolist(), *completion.tokens.tolist()]])
    with torch.no_grad():
        scores = model(tokens, output_router_logits=True).router_logits
    sampled_after = slice(len(request.tokens) - 1, -1)
    return np.stack([layer[sampled_after].topk(PER_TOKEN).indices.numpy() for layer in scores], 1)


async def generate(python, directory, models, folder):
    """Requests and completions of an engine that loads the second model's weights while most of them run."""
    cluster = LocalCluster(ClusterConfig(), folder)
    config = EngineKind(kind="vllm", slots=4, max_length=400, device="cpu", routed_experts=True)
    engine = RemoteEngine(
        cluster.spawn("engine-0", ENGINE_WORKER, "vllm", str(directory), config, "shared_memory", python=python)
    )
    try:
        await engine.ready()
        prompts = [np.random.default_rng(number // 2).integers(1, 101, 40).astype(np.int32) for number in range(8)]
        requests = [
            GenerateRequest(id=str(number), tokens=prompt, sampling=Sampling(max_tokens=60, seed=number))
            for number, prompt in enumerate(prompts)
        ]
        handles = [engine.start(request) for request in requests]
        async for _ in handles[0]:
            break
        update = open_channel(TransferContext(folder)).send(models[1].named_parameters(), 1)
        handles[1].abort()
        await engine.load(update, OnUpdate.RECOMPUTE)
        return requests, [await handle.result() for handle in handles]
    finally:
        await cluster.close()


def test_experts_are_those_of_transformers(interpreter, mixtures, tmp_path):
    """Also of a request that is aborted, and of those that go on under new weights."""
    directory, models = mixtures
    requests, completions = asyncio.run(generate(interpreter, directory, models, tmp_path))
    versions = {number for completion in completions for number in completion.versions.tolist()}
    assert versions == {0, 1}
    for request, completion in zip(requests, completions, strict=True):
        found = completion.streams[ROUTED_EXPERTS] - 1
        for version, model in enumerate(models):
            drawn = completion.versions == version
            assert np.array_equal(found[drawn], routed(model, request, completion)[drawn])


def first_mismatch(project, name, python, directory, **engine):
    usual = {"kind": "vllm", "python": python, "max_length": 256, "slots": 8, "dtype": "bfloat16", "device": "cpu"}
    path = project.config(
        name=name,
        model={"path": str(directory)},
        engine={**usual, **engine},
        rollout={
            "groups_per_step": 4,
            "group_size": 4,
            "async_ratio": 0,
            "timeout": 200,
            "sampling": {"max_tokens": 40},
        },
        steps=2,
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    return project.metrics(name)[0]["learner/mismatch_kl"]


def test_a_run_replays_the_experts(project, interpreter, mixtures):
    """The engine rounds to bfloat16, so that a learner which routes anew goes to other experts now and then."""
    directory, _ = mixtures
    replayed = first_mismatch(project, "replayed", interpreter, directory, routed_experts=True)
    routed_anew = first_mismatch(project, "anew", interpreter, directory)
    assert replayed < 0.7 * routed_anew, (replayed, routed_anew)


def test_vllm_without_triton_refuses_to_record(vllm_python, mixtures, tmp_path):
    """As on any CPU without the backend for it."""
    directory, models = mixtures
    with pytest.raises(UnsupportedError) as caught:
        asyncio.run(generate(vllm_python, directory, models, tmp_path))
    assert caught.value.key == "engine.routed_experts"
