"""What every `InferenceEngine` must do, whoever makes the tokens: one suite, several engines.

For an engine of your own (`docs/engines.md`), named by the import path of its factory:

    pytest tests/system/test_engine_contract.py --engine my_package.my_engine:MyEngine
"""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.errors import (
    AntiphonError,
    RequestError,
    StateError,
    UnsupportedError,
    WeightsError,
    WorkerDiedError,
)
from antiphon.core.types import (
    MIXED_CACHE,
    Completion,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    Sampling,
    WeightsUpdate,
)
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
LONG = 1500  # tokens that take a while
VOCABULARY = 90
EXACT = 1e-4  # most that the log-prob of a token may be off


EXAMPLE = "tests.example_engine:ExampleEngine"
KINDS = ("native", "vllm", "server", "sglang", "simulated", EXAMPLE)
MIXTURES = ("native", "vllm", "server", "sglang")  # kinds that run a mixture of experts


def pytest_generate_tests(metafunc):
    own = metafunc.config.getoption("--engine")
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", [own] if own else KINDS, indirect=True, scope="module")
    if "ending" in metafunc.fixturenames:
        metafunc.parametrize("ending", [own] if own else ["native", EXAMPLE], indirect=True)
    if "mixture" in metafunc.fixturenames:
        metafunc.parametrize("mixture", MIXTURES, indirect=True)


class Processes:
    """A world: one kind of engine with the models and updates of its tests.

    Engines have a process of their own and a model of a few thousand parameters; every version is another random one.
    One engine serves all tests, until one is the end of it: vLLM takes half a minute to start."""

    modes = tuple(OnUpdate)
    shape = (LlamaConfig, {})
    ends = None  # token ids
    tied = True
    layers = 2
    refuses = {
        "native": ({"tokens": 2048}, RequestError, "holds 2048"),
        "vllm": ({"sampling": {"top_p": 0.9}}, UnsupportedError, "no top_p"),
        "server": ({"sampling": {"top_p": 0.9}}, UnsupportedError, "no top_p"),
        "sglang": ({"sampling": {"top_p": 0.9}}, UnsupportedError, "no top_p"),
    }
    refuses_at_least = ({"tokens": 2048}, RequestError, None)

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
        return self._runner.run(main)

    async def _as_new(self) -> None:
        """Start the engine unless it lives, and give it the first weights again. Outside of the tests' time limit."""
        try:
            if self._engine is not None:
                await self._engine.health()
                if self._engine.version:
                    await self._engine.load(self.update(0), OnUpdate.RESTART)
                return
        except AntiphonError:  # an earlier test was the end of it
            await self.close()
        self._engine = self._start()
        await self._engine.ready()

    def _start(self):
        self._cluster = LocalCluster(ClusterConfig(), self.folder)
        config = EngineKind(kind=self.kind, device="cpu", slots=SLOTS, max_length=2048)
        args = (self.kind, str(self.folder / "model"), config, "shared_memory")
        return RemoteEngine(self._cluster.spawn("engine-0", ENGINE_WORKER, *args, python=self.python))

    def kill(self, engine) -> None:
        engine.kill()

    async def close(self) -> None:
        if self._cluster is not None:
            await self._cluster.close()

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
        config = EngineKind(kind="server", slots=SLOTS, options=options)
        return ServerEngine(config.server_options, 0, self.folder / "model", config, "shared_memory")

    def kill(self, engine) -> None:
        self._server.kill()

    async def close(self) -> None:
        if self._engine is not None and not self._engine.dead:
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


def made(request, kind, folder, **changes):
    """A world of a kind that has processes."""
    python = request.getfixturevalue("vllm_python") if kind in ("vllm", "server") else ""
    if kind == request.config.getoption("--engine"):
        python = request.config.getoption("--engine-python")
        if modes := request.config.getoption("--engine-modes"):
            changes["modes"] = tuple(map(OnUpdate, modes.split(",")))
    of_kind = type(kind, ({"server": Server, "sglang": SGLang}.get(kind, Processes),), changes)
    with asyncio.Runner() as runner:
        world = of_kind(kind, python, folder, runner)
        yield world
        runner.run(world.close())


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    if request.param == "simulated":
        yield Simulated()
    else:
        yield from made(request, request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def mixture(request, tmp_path):
    """A world whose model is a mixture of experts."""
    own = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    yield from made(request, request.param, tmp_path, shape=(Qwen3MoeConfig, own), tied=False)


@pytest.fixture
def ending(request, tmp_path):
    """A world whose model has several end tokens."""
    yield from made(request, request.param, tmp_path, ends=list(range(30)))


def request(name: str, tokens: int = 20, *, prompt=(5, 3, 9, 4), sampling=MappingProxyType({}), **changes):
    drawn = {"max_tokens": tokens, "seed": len(name), **sampling}
    return GenerateRequest(id=name, tokens=np.array(prompt, np.int32), sampling=Sampling(**drawn), **changes)


def check(completion: Completion, tokens: int) -> None:
    """Every array is as long as the tokens, of which there are so many."""
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == tokens
    assert len(completion.streams[MIXED_CACHE]) == tokens
    assert completion.timing.queued <= completion.timing.started <= completion.timing.finished


def contract(test):
    """Run an asynchronous test in its world's own time, for at most two minutes of it."""

    def run(world):
        async def main():
            async with asyncio.timeout(120), world.engine() as engine:
                await test(world, engine)

        world.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@contract
async def test_all_requests_end_however_many_there_are(world, engine):
    handles = [engine.start(request(f"r{i}", tokens=5 + i)) for i in range(4 * SLOTS)]
    for i, completion in enumerate(await asyncio.gather(*(handle.result() for handle in handles))):
        check(completion, 5 + i)
        assert completion.finish is FinishReason.LENGTH
        assert set(completion.versions) == {0} and not completion.streams[MIXED_CACHE].any()


@contract
async def test_prompts_that_no_single_step_reads(world, engine):
    prompts = [tuple(range(i, 60)) * 10 for i in range(3 * SLOTS)]
    handles = [engine.start(request(f"r{i}", prompt=prompt)) for i, prompt in enumerate(prompts)]
    whole = await asyncio.gather(*(handle.result() for handle in handles))
    alone = await engine.start(request("r5", prompt=prompts[5])).result()
    for completion in whole:
        check(completion, 20)
    assert np.array_equal(alone.tokens, whole[5].tokens)


@contract
async def test_deltas_come_to_the_result(world, engine):
    handle = engine.start(request("r", tokens=LONG))
    deltas = [delta async for delta in handle]
    whole = await handle.result()
    assert np.array_equal(np.concatenate([delta.tokens for delta in deltas]), whole.tokens)
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1) and deltas[-1].finish is whole.finish


@contract
async def test_what_is_aborted_gives_what_there_is(world, engine):
    running = [engine.start(request(f"r{i}", tokens=LONG)) for i in range(SLOTS)]
    queued = engine.start(request("queued"))
    await world.until_under_way(running[0])
    for handle in (queued, running[0]):
        handle.abort()
    cut, nothing = await running[0].result(), await queued.result()
    assert cut.finish is nothing.finish is FinishReason.ABORT
    assert 0 < len(cut.tokens) < LONG
    check(cut, len(cut.tokens))
    check(nothing, 0)
    check(await engine.start(request("next")).result(), 20)
    check(await running[1].result(), LONG)


@contract
async def test_the_urgent_go_first(world, engine):
    ended = []

    async def follow(name, **changes):
        await engine.start(request(name, tokens=50, **changes)).result()
        ended.append(name)

    async with asyncio.TaskGroup() as owner:
        for i in range(3 * SLOTS):
            owner.create_task(follow(f"r{i}"))
        owner.create_task(follow("urgent", priority=-1))
    assert ended.index("urgent") < 2 * SLOTS


@pytest.mark.parametrize("mode", list(OnUpdate))
def test_weights_that_come_in_the_middle(world, mode):
    async def main():
        async with asyncio.timeout(120), world.engine() as engine:
            handle = engine.start(request("r", tokens=LONG))
            await world.until_under_way(handle)
            if mode not in world.modes:
                with pytest.raises(UnsupportedError):
                    await engine.load(world.update(1), mode)
                assert set((await handle.result()).versions) == {0}
                return
            await engine.load(world.update(1), mode)
            assert engine.version == 1
            after = await engine.start(request("after")).result()
            completion = await handle.result()
        assert set(after.versions) == {1} and not after.streams[MIXED_CACHE].any()
        check(completion, LONG)
        assert np.all(np.diff(completion.versions) >= 0)
        drawn = {OnUpdate.RESTART: {1}, OnUpdate.DRAIN: {0}}.get(mode, {0, 1})
        assert set(completion.versions) == drawn
        flagged = completion.streams[MIXED_CACHE]
        assert np.array_equal(flagged, completion.versions == 1) if mode is OnUpdate.KEEP else not flagged.any()

    world.run(main())


@pytest.mark.parametrize("mode", list(OnUpdate))
def test_every_load_of_the_same_version_ends(world, mode):
    """One after another, and at once; each when the weights that it brought are in use, or later ones."""
    if mode not in world.modes:
        pytest.skip("is refused")

    async def main():
        async with asyncio.timeout(120), world.engine() as engine:
            await engine.load(world.update(1), mode)
            await engine.load(world.update(1), mode)
            running = engine.start(request("r", tokens=LONG))
            await world.until_under_way(running)
            again = world.update(1)
            await asyncio.gather(engine.load(again, mode), engine.load(again, mode))
            assert engine.version == 1
            if mode is OnUpdate.DRAIN:
                assert running.partial().finish is FinishReason.LENGTH or isinstance(world, Simulated)
            check(await running.result(), LONG)
            after = await engine.start(request("after")).result()
        assert set(after.versions) == {1}

    world.run(main())


def test_a_load_ends_with_its_own_weights_in_use(world):
    """Of the same version as the weights that are there: these are waited for no less."""
    if isinstance(world, Simulated):
        pytest.skip("simulated weights have a version and nothing else")

    async def main():
        async with asyncio.timeout(120), world.engine() as engine:
            await engine.load(world.update(1), OnUpdate.DRAIN)
            running = engine.start(request("r", tokens=LONG))
            await world.until_under_way(running)
            await engine.load(replace(world.update(2), version=1), OnUpdate.DRAIN)
            assert running.partial().finish is FinishReason.LENGTH, "a load that drains ends after what runs"
            asked = request("after")
            after = await engine.start(asked).result()
        drawn_by_two = replace(after, versions=np.full(len(after.tokens), 2, np.int32))
        assert logprob_errors(world, asked, drawn_by_two).max() < EXACT

    world.run(main())


def logprob_errors(world, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """How far each token's log-prob is from that of transformers, under the weights that the engine says drew it."""
    tokens = torch.tensor([[*request.tokens.tolist(), *completion.tokens.tolist()]])
    rows = torch.arange(len(request.tokens) - 1, tokens.shape[1] - 1)
    expected = np.empty(len(completion.tokens), np.float32)
    for version in set(completion.versions.tolist()):
        with torch.no_grad():
            logits = world.model(version)(tokens).logits[0, rows].float()
        logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
        drawn = logprobs.gather(-1, tokens[0, rows + 1, None])[:, 0].numpy()
        expected = np.where(completion.versions == version, drawn, expected)
    return np.abs(expected - completion.logprobs)


@pytest.mark.parametrize("mode", list(OnUpdate))
def test_log_probs_are_those_of_the_weights_that_drew_the_token(world, mode):
    """Also of a prompt that was read under other weights before, by others that are still running."""
    if isinstance(world, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    if mode not in world.modes:
        pytest.skip("is refused")
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 300)
    sampling = {"temperature": 0.7, "seed": 5}

    async def main():
        async with asyncio.timeout(120), world.engine() as engine:
            running = request("r", tokens=LONG, prompt=prompt, sampling=sampling)
            later = [request(f"later{i}", prompt=prompt, sampling=sampling | {"seed": i}) for i in range(2)]
            handle = engine.start(running)
            await world.until_under_way(handle)
            await engine.load(world.update(1), mode)
            return [(each, await engine.start(each).result()) for each in later] + [(running, await handle.result())]

    told = world.run(main())
    assert all(set(completion.versions) == {1} for _, completion in told[:-1])
    for each, completion in told:
        errors, mixed = logprob_errors(world, each, completion), completion.streams[MIXED_CACHE]
        assert errors[~mixed].max() < EXACT
        if mixed.any():
            assert errors[mixed].max() > 100 * EXACT, "what is flagged really differs"


@contract
async def test_temperatures_and_seeds(world, engine):
    if isinstance(world, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    asked = [
        request(f"{temperature}-{seed}-{repeat}", sampling={"temperature": temperature, "seed": seed})
        for temperature in (0.0, 0.5, 1.0, 2.0)
        for seed in (3, 1 << 40)
        for repeat in range(2)
    ]
    told = await asyncio.gather(*(engine.start(each).result() for each in asked))
    for each, completion in zip(asked, told, strict=True):
        assert logprob_errors(world, each, completion).max() < EXACT
    same = [np.array_equal(one.tokens, other.tokens) for one, other in pairwise(told)]
    assert all(same[::2]), "the same seed draws the same"
    assert same[1::4] == [True, False, False, False], "another seed draws otherwise, but greedy draws nothing"


@contract
async def test_stops_end_a_request_and_are_part_of_it(world, engine):
    if isinstance(world, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    stops = {"stop_tokens": tuple(range(30))}, {"stop": tuple(chr(33 + token) for token in range(30))}
    for number, stop in enumerate(stops):
        told = await engine.start(request(f"r{number}", tokens=LONG, sampling=stop)).result()
        assert told.finish is FinishReason.STOP
        assert told.tokens[-1] < 30 and np.all(told.tokens[:-1] >= 30)
        check(told, len(told.tokens))


def test_end_tokens_of_the_model_end_a_request(ending):
    """They do when the model samples them, whatever the prompt holds; at the limit, too, the reason is the end token."""
    ends = np.array(ending.ends)

    async def main():
        async with ending.engine() as engine:
            asked = request("r", tokens=LONG, prompt=(5, 60, 7))
            whole = await engine.start(asked).result()
            check(whole, len(whole.tokens))
            assert whole.finish is FinishReason.STOP
            assert np.flatnonzero(np.isin(whole.tokens, ends)).tolist() == [len(whole.tokens) - 1]
            assert logprob_errors(ending, asked, whole).max() < EXACT
            limited = await engine.start(request("s", tokens=len(whole.tokens), prompt=(5, 60, 7))).result()
            assert np.array_equal(limited.tokens, whole.tokens) and limited.finish is FinishReason.STOP

    ending.run(main())


@contract
async def test_weights_that_are_not_what_was_sent_are_refused(world, engine):
    with pytest.raises(WeightsError, match="not loaded"):
        await engine.load(world.spoilt(engine, 1), OnUpdate.RECOMPUTE)
    assert engine.version == 0


def test_a_mixture_of_experts_is_published(mixture):
    """Its learner stacks experts, and files, which some engines go by, do not."""

    async def main():
        async with mixture.engine() as engine:
            for version in (1, 0):
                await engine.load(mixture.update(version), OnUpdate.RECOMPUTE)
                asked = request(f"r{version}", sampling={"temperature": 0.7})
                completion = await engine.start(asked).result()
                assert set(completion.versions) == {version}
                assert logprob_errors(mixture, asked, completion).max() < EXACT
            with pytest.raises(WeightsError):
                some = [
                    (name, tensor)
                    for name, tensor in mixture.model(1).named_parameters()
                    if "1.mlp.experts" not in name
                ]
                await engine.load(open_channel(TransferContext(mixture.folder)).send(some, 2), OnUpdate.RECOMPUTE)

    played = main()
    if mixture.kind == "server":  # on a CPU
        with pytest.raises(UnsupportedError, match="pack experts"):
            mixture.run(played)
        played.close()
    else:
        mixture.run(played)


@contract
async def test_weights_that_are_not_all_there_are_refused(world, engine):
    if isinstance(world, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    whole = list(world.model(1).named_parameters())
    for number, part in enumerate((whole[1:], whole[:-1], [*whole, ("another", whole[0][1])])):
        with pytest.raises(WeightsError):
            await engine.load(open_channel(TransferContext(world.folder)).send(part, 1), OnUpdate.RECOMPUTE)
        assert engine.version == 0
        asked = request(f"r{number}")
        await engine.load(world.update(number + 2), OnUpdate.RECOMPUTE)
        assert logprob_errors(world, asked, await engine.start(asked).result()).max() < EXACT
        await engine.load(world.update(0), OnUpdate.RECOMPUTE)


@contract
async def test_a_cache_is_given_back_and_taken_again_or_kept_openly(world, engine):
    if isinstance(world, Simulated):
        pytest.skip("simulated tokens need no cache")
    if world.kind in ("server", "sglang"):
        with pytest.raises(UnsupportedError, match="does not leave its device"):
            await engine.sleep()
    else:
        with suppress(UnsupportedError):
            await engine.sleep()
        await engine.wake()
    check(await engine.start(request("r")).result(), 20)


@contract
async def test_sleeping_engine_loads_weights_and_queues_requests(world, engine):
    if isinstance(world, Simulated) or world.kind in ("server", "sglang"):
        pytest.skip("it has nothing to give back, or does not leave its device")
    try:
        await engine.sleep()
    except UnsupportedError as error:
        pytest.skip(f"it keeps its device: {error}")
    await engine.wake()
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 300)
    asked = [request(f"r{number}", prompt=prompt, sampling={"seed": number}) for number in range(SLOTS)]
    running = engine.start(request("running", tokens=LONG, prompt=prompt))
    await world.until_under_way(running)
    with pytest.raises(StateError):
        await engine.sleep()
    running.abort()
    await running.result()
    for version in (1, 0):
        await engine.sleep()
        handles = [engine.start(each) for each in asked]
        with pytest.raises(WeightsError, match="not loaded"):
            await engine.load(world.spoilt(engine, version + 2), OnUpdate.KEEP)
        await engine.load(world.update(version), OnUpdate.KEEP)
        assert not any(len(handle.partial().tokens) for handle in handles)
        await engine.wake()
        for each, handle in zip(asked, handles, strict=True):
            completion = await handle.result()
            check(completion, 20)
            assert set(completion.versions) == {version} and not completion.streams[MIXED_CACHE].any()
            assert logprob_errors(world, each, completion).max() < EXACT


INVALID = {  # for any engine
    "no prompt": {"prompt": ()},
    "no tokens": {"tokens": 0},
    "fewer than no tokens": {"tokens": -3},
    "half a token": {"sampling": {"max_tokens": 2.5}},
    "temperature below 0": {"sampling": {"temperature": -1.0}},
    "temperature nan": {"sampling": {"temperature": float("nan")}},
    "temperature inf": {"sampling": {"temperature": float("inf")}},
    "temperature that makes logits infinite": {"sampling": {"temperature": 1e-40}},
    "temperature that is text": {"sampling": {"temperature": "hot"}},
    "top_p 0": {"sampling": {"top_p": 0.0}},
    "top_p above 1": {"sampling": {"top_p": 1.5}},
    "top_k below 0": {"sampling": {"top_k": -1}},
    "top_k beyond 64 bits": {"sampling": {"top_k": 1 << 70}},
    "min_p above 1": {"sampling": {"min_p": 2.0}},
    "seed that is no whole number": {"sampling": {"seed": 0.5}},
    "stop that is no text": {"sampling": {"stop": ("\ud83d",)}},
}
TOO_MUCH = {  # for one whose model has an end
    "token below 0": {"prompt": (5, -1)},
    "token beyond the vocabulary": {"prompt": (5, VOCABULARY)},
    "prompt longer than the model": {"prompt": (5,) * 2048},
    "reply longer than the model": {"tokens": 2048},
}


@contract
async def test_invalid_requests_fail_alone(world, engine):
    running = engine.start(request("running", tokens=LONG))
    for name, change in (INVALID | ({} if isinstance(world, Simulated) else TOO_MUCH)).items():
        with pytest.raises(RequestError):
            await engine.start(request(name, **change)).result()
    for odd in (np.zeros((2, 2), np.int32), np.array([0.5]), [1, 2, 3]):
        with pytest.raises(RequestError):
            await engine.start(replace(request("odd"), tokens=odd)).result()
    twin = engine.start(request("running"))
    with pytest.raises(RequestError):
        await twin.result()
    twin.abort()
    await engine.health()
    check(await engine.start(request("next")).result(), 20)
    check(await running.result(), LONG)


@contract
async def test_what_an_engine_cannot_do_as_asked_it_refuses(world, engine):
    """Of the request alone; the engine goes on."""
    if isinstance(world, Simulated):
        pytest.skip("simulated tokens can be had in any way")
    change, error, match = world.refuses.get(world.kind, world.refuses_at_least)
    with pytest.raises(error, match=match):
        await engine.start(request("r", **change)).result()
    check(await engine.start(request("next")).result(), 20)


@contract
async def test_killed_engine_fails_waiters_and_keeps_its_deltas(world, engine):
    handle = engine.start(request("r", tokens=LONG))
    await world.until_under_way(handle)
    await engine.health()
    world.kill(engine)
    with pytest.raises(WorkerDiedError):
        await handle.result()
    told = handle.partial()
    assert told.finish is FinishReason.ABORT and 0 < len(told.tokens) < LONG
    check(
        replace(told, timing=replace(told.timing, finished=max(told.timing.finished, told.timing.started))),
        len(told.tokens),
    )
    with pytest.raises(WorkerDiedError):
        await engine.start(request("late")).result()
    with pytest.raises(WorkerDiedError):
        await engine.load(world.update(1), OnUpdate.RECOMPUTE)
    with pytest.raises(WorkerDiedError):
        await engine.health()
