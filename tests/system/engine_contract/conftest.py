"""The engines that the contract is tested with: the built-in kinds and the example, or one that `--engine` names."""

import asyncio
import json

import pytest
from transformers import Qwen3MoeConfig

from antiphon.core.types import OnUpdate
from tests.system.engine_contract.hosts import Processes, Server, SGLang, Simulated

EXAMPLE = "tests.example_engine:ExampleEngine"
KINDS = ("native", "vllm", "server", "sglang", "simulated", EXAMPLE)
MIXTURES = ("native", "vllm", "server", "sglang")  # kinds that run a mixture of experts


def pytest_generate_tests(metafunc):
    own = metafunc.config.getoption("--engine")
    if "host" in metafunc.fixturenames:
        metafunc.parametrize("host", [own] if own else KINDS, indirect=True, scope="session")
    if "ending" in metafunc.fixturenames:
        metafunc.parametrize("ending", [own] if own else ["native", EXAMPLE], indirect=True)
    if "mixture" in metafunc.fixturenames:
        metafunc.parametrize("mixture", MIXTURES, indirect=True)


def made(request, kind, folder, **changes):
    """A host of a kind that has processes."""
    python = request.getfixturevalue("vllm_python") if kind in ("vllm", "server") else ""
    if kind == request.config.getoption("--engine"):
        python = request.config.getoption("--engine-python")
        if modes := request.config.getoption("--engine-modes"):
            changes["modes"] = tuple(map(OnUpdate, modes.split(",")))
        changes["options"] = json.loads(request.config.getoption("--engine-options"))
    of_kind = type(kind, ({"server": Server, "sglang": SGLang}.get(kind, Processes),), changes)
    with asyncio.Runner() as runner:
        host = of_kind(kind, python, folder, runner)
        yield host
        runner.run(host.close())


@pytest.fixture(scope="session")
def host(request, tmp_path_factory):
    if request.param == "simulated":
        yield Simulated()
    else:
        yield from made(request, request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def mixture(request, tmp_path):
    """A host whose model is a mixture of experts."""
    own = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    yield from made(request, request.param, tmp_path, shape=(Qwen3MoeConfig, own), tied=False)


@pytest.fixture
def ending(request, tmp_path):
    """A host whose model has several end tokens."""
    yield from made(request, request.param, tmp_path, ends=list(range(30)))
