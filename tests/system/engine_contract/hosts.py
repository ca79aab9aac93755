"""The kinds of engines that the contract's tests run, each with its models and updates, and helpers of these tests."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import AntiphonError
from antiphon.core.types import MIXED_CACHE, Completion, GenerateRequest, OnUpdate, Sampling, WeightsUpdate
from antiphon.engines.config import EngineKind
from antiphon.engines.remote_engine import RemoteEngine
from antiphon.engines.server import ServerEngine
from antiphon.run.launch.engines import ENGINE_WORKER
from antiphon.simulate import clock
from antiphon.simulate.engine import SimulatedEngine
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.weights.base import TransferContext, open_channel
from tests.servers import InferenceServer, sglang, vllm

SLOTS = 2
MAX_LENGTH = 1900  # tokens of a sequence; the model's own limit is 2048
LONG = 600  # tokens that take a while
VOCABULARY = 90
EXACT = 1e-4  # most that the log-prob of a token may be off


class Processes:
    """A host: one kind of engine with the models and updates of its tests.

    Engines have a process of their own and a model of a few thousand parameters; every version is another random one.
    One engine serves all tests, until one is the end of it: vLLM takes half a minute to start."""

    modes = tuple(OnUpdate)
    options = MappingProxyType({})  # `engine.options`
    shape = (LlamaConfig, {})
    ends = None  # token ids
    tied = True
    layers = 2

    def __init__(self, kind: str, python: str, folder: Path, runner: asyncio.Runner) -> None:
        self.kind = kind
        self.python = python
        self.folder = folder
        self._runner = runner
        self._cluster: LocalCluster | None = None
        self._engine: RemoteEngine | None = None
        self._models: dict[int, PreTrainedModel] = {}
        self.model(0).save_pretrained(folder / "model")
        characters = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(VOCABULARY)}, "!"))
        characters.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=characters).save_pretrained(folder / "model")

    def model(self, version: int) -> PreTrainedModel:
        if version not in self._models:
            torch.manual_seed(version)
            shape = {
                "hidden_size": 64,
                "intermediate_size": 32,
                "num_hidden_layers": self.layers,
                "num_attention_heads": 2,
            }
            ends = {"bos_token_id": None, "eos_token_id": self.ends, "pad_token_id": None}
            shared = {"num_key_value_heads": 1, "tie_word_embeddings": self.tied}
            kind, own = self.shape
            config = kind(vocab_size=VOCABULARY, max_position_embeddings=2048, **shape, **shared, **ends, **own)
            config.initializer_range = 0.1  # far enough from uniform for a token under wrong weights to be noticed
            self._models[version] = AutoModelForCausalLM.from_config(config)
        return self._models[version]

    def run(self, main):
        self._runner.run(self._as_new())
        try:
            return self._runner.run(main)
        except (Exception, pytest.fail.Exception):  # it may be asleep or busy, which would fail the next tests
            self._runner.run(self._discard())
            raise

    async def _discard(self) -> None:
        await self.close()
        self._engine = None

    async def _as_new(self) -> None:
        """Start the engine unless it lives, and give it the first weights again. Outside of the tests' time limit."""
        try:
            if self._engine is not None:
                await self._engine.health()
                await self._engine.load(self.update(0), self.modes[0])  # an earlier test may have left it half loaded
                return
        except AntiphonError:  # an earlier test was the end of it
            await self.close()
        self._engine = self._start()
        await self._engine.ready()

    def _start(self):
        self._cluster = LocalCluster(ClusterConfig(), self.folder)
        limits = {"slots": SLOTS, "max_length": MAX_LENGTH}
        config = EngineKind(kind=self.kind, device="cpu", options=dict(self.options), **limits)
        args = (self.kind, str(self.folder / "model"), config, "shared_memory")
        return RemoteEngine(self._cluster.spawn("engine-0", ENGINE_WORKER, *args, python=self.python))

    def kill(self, engine) -> None:
        engine.kill()

    async def close(self) -> None:
        if self._cluster is not None:
            await self._cluster.close()
            self._cluster = None

    @asynccontextmanager
    async def engine(self):
        yield self._engine

    def update(self, version: int) -> WeightsUpdate:
        return open_channel(TransferContext(self.folder)).send(self.model(version).named_parameters(), version)

    def spoilt(self, engine, version: int) -> WeightsUpdate:
        good = self.update(version)
        return replace(good, manifest=replace(good.manifest, digest=good.manifest.digest ^ 1))

    async def until_under_way(self, handle) -> None:
        async for _ in handle:
            return


class Server(Processes):
    """An engine on a server that was not started by it: it gets a new engine whenever the one before is dead."""

    modes = tuple(mode for mode in OnUpdate if mode is not OnUpdate.KEEP)
    tied = False  # vLLM cannot load a head that is tied, on a CPU and by itself
    layers = 6  # a server does not wait for who reads: it must not be done before an update is on its way
    flavour = "vllm"
    _server: InferenceServer | None = None

    def _serve(self) -> InferenceServer:
        return vllm(self.python, self.folder / "model", self.folder / "log")

    def _start(self):
        if self._server is None or not self._server.lives:
            self._server = self._serve()
        options = {"urls": [self._server.url], "flavour": self.flavour}
        config = EngineKind(kind="server", slots=SLOTS, max_length=MAX_LENGTH, options=options)
        return ServerEngine(config.server_options, 0, self.folder / "model", config, "shared_memory")

    def kill(self, engine) -> None:
        self._server.kill()

    async def close(self) -> None:
        if self._server is not None and self._server.lives:
            self._server.kill()


class SGLang(Server):
    """What stands in for SGLang's server, telling what is new: with all there is each time, long requests take minutes."""

    tied = True
    flavour = "sglang"

    def _serve(self) -> InferenceServer:
        return sglang(self.folder / "model", self.folder / "log", "--incremental")


class Simulated:
    """In virtual time."""

    modes = tuple(OnUpdate)
    run = staticmethod(clock.run)

    @asynccontextmanager
    async def engine(self):
        yield SimulatedEngine(EngineSpeed(slots=SLOTS, iteration=0.01, load=0.1), lambda request: 1 << 20)

    def update(self, version: int) -> WeightsUpdate:
        return WeightsUpdate(version=version, location="", manifest=None)

    def spoilt(self, engine, version: int) -> WeightsUpdate:
        engine.load_failures = lambda: True
        return self.update(version)

    def kill(self, engine) -> None:
        engine.kill()

    async def until_under_way(self, handle) -> None:
        await asyncio.sleep(0.5)


def request(name: str, tokens: int = 20, *, prompt=(5, 3, 9, 4), sampling=MappingProxyType({}), **changes):
    drawn = {"max_tokens": tokens, "seed": len(name), **sampling}
    return GenerateRequest(id=name, tokens=np.array(prompt, np.int32), sampling=Sampling(**drawn), **changes)


def check(completion: Completion, tokens: int) -> None:
    """Every array is as long as the tokens, of which there are so many."""
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == tokens
    assert len(completion.streams[MIXED_CACHE]) == tokens
    assert completion.timing.queued <= completion.timing.started <= completion.timing.finished


def contract(test):
    """Run an asynchronous test in its host's own time, for at most two minutes of it."""

    def run(host):
        async def main():
            async with asyncio.timeout(120), host.engine() as engine:
                await test(host, engine)

        host.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def expected_logprobs(host, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Log-probs of transformers at each token of a completion, [C, V], under the weights that the engine says drew it."""
    tokens = torch.tensor([[*request.tokens.tolist(), *completion.tokens.tolist()]])
    expected = np.empty((len(completion.tokens), VOCABULARY), np.float32)
    for version in set(completion.versions.tolist()):
        with torch.no_grad():
            logits = host.model(version)(tokens).logits[0, len(request.tokens) - 1 : -1].float()
        logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1).numpy()
        drawn = completion.versions == version
        expected[drawn] = logprobs[drawn]
    return expected


def logprob_errors(host, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """How far each token's log-prob is from that of transformers, under the weights that the engine says drew it."""
    expected = expected_logprobs(host, request, completion)
    return np.abs(expected[np.arange(len(expected)), completion.tokens] - completion.logprobs)
