"""What every `InferenceEngine` must do, whoever makes the tokens: one suite, several engines."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from antiphon.build import ENGINE_WORKER, RECEIVE
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.engines.config import EngineConfig
from antiphon.engines.worker import WorkerEngine
from antiphon.errors import WeightsError, WorkerDied
from antiphon.simulate import clock
from antiphon.simulate.engine import EngineSpeed, SimulatedEngine
from antiphon.types import MIXED_CACHE, Completion, FinishReason, GenerateRequest, OnUpdate, Sampling, WeightsUpdate
from antiphon.weights.shared_memory import send

SLOTS = 2
LONG = 1500  # tokens that take a while


class Native:
    """In a process of its own, with a model of a few thousand parameters."""

    run = staticmethod(asyncio.run)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=2048, **shape, **ends))
        self.model.save_pretrained(folder / "model")

    @asynccontextmanager
    async def engine(self):
        cluster = LocalCluster(ClusterConfig(), self.folder)
        config = EngineConfig(device="cpu", slots=SLOTS, max_length=2048)
        try:
            model = str(self.folder / "model")
            engine = WorkerEngine(cluster.spawn("engine-0", ENGINE_WORKER, "native", model, config, RECEIVE))
            await engine.ready()
            yield engine
        finally:
            await cluster.close()

    def update(self, version: int) -> WeightsUpdate:
        return send(self.model.named_parameters(), version, self.folder)

    def spoilt(self, engine, version: int) -> WeightsUpdate:
        good = self.update(version)
        return replace(good, manifest=replace(good.manifest, digest=good.manifest.digest ^ 1))

    async def until_under_way(self, handle) -> None:
        async for _ in handle:
            return


class Simulated:
    """In virtual time."""

    run = staticmethod(clock.run)

    def __init__(self, folder: Path) -> None: ...

    @asynccontextmanager
    async def engine(self):
        yield SimulatedEngine(EngineSpeed(slots=SLOTS, iteration=0.01, load=0.1), lambda request: 1 << 20)

    def update(self, version: int) -> WeightsUpdate:
        return WeightsUpdate(version=version, location="", manifest=None)

    def spoilt(self, engine, version: int) -> WeightsUpdate:
        engine.load_failures = lambda: True
        return self.update(version)

    async def until_under_way(self, handle) -> None:
        await asyncio.sleep(0.5)


@pytest.fixture(params=[Native, Simulated], ids=["native", "simulated"])
def world(request, tmp_path):
    return request.param(tmp_path)


def request(name: str, tokens: int = 20, **changes) -> GenerateRequest:
    prompt = np.array([5, 3, 9, 4], np.int32)
    return GenerateRequest(id=name, tokens=prompt, sampling=Sampling(max_tokens=tokens, seed=len(name)), **changes)


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


@contract
async def test_weights_that_are_not_what_was_sent_are_refused(world, engine):
    with pytest.raises(WeightsError, match="not loaded"):
        await engine.load(world.spoilt(engine, 1), OnUpdate.KEEP)
    assert engine.version == 0


@contract
async def test_a_killed_engine_fails_whoever_waits_and_keeps_what_it_told(world, engine):
    handle = engine.start(request("r", tokens=LONG))
    await world.until_under_way(handle)
    await engine.health()
    engine.kill()
    with pytest.raises(WorkerDied):
        await handle.result()
    told = handle.partial()
    assert told.finish is FinishReason.ABORT and 0 < len(told.tokens) < LONG
    check(
        replace(told, timing=replace(told.timing, finished=max(told.timing.finished, told.timing.started))),
        len(told.tokens),
    )
    with pytest.raises(WorkerDied):
        await engine.start(request("late")).result()
    with pytest.raises(WorkerDied):
        await engine.load(world.update(1), OnUpdate.KEEP)
    with pytest.raises(WorkerDied):
        await engine.health()
