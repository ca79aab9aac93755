"""What every engine must do when new weights come, and when it leaves its device to the learner."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from antiphon.core.errors import StateError, UnsupportedError, WeightsError
from antiphon.core.types import MIXED_CACHE, FinishReason, OnUpdate
from antiphon.weights.base import TransferContext, open_channel
from tests.system.engine_contract.hosts import (
    EXACT,
    LONG,
    SLOTS,
    VOCABULARY,
    Simulated,
    check,
    contract,
    logprob_errors,
    request,
)


@pytest.mark.parametrize("mode", list(OnUpdate))
def test_weights_that_come_in_the_middle(host, mode):
    async def main():
        async with asyncio.timeout(120), host.engine() as engine:
            update = host.update(1)  # before the request: it takes as long as many tokens
            handle = engine.start(request("r", tokens=LONG))
            await host.until_under_way(handle)
            if mode not in host.modes:
                with pytest.raises(UnsupportedError):
                    await engine.load(update, mode)
                assert set((await handle.result()).versions) == {0}
                return
            await engine.load(update, mode)
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

    host.run(main())


@pytest.mark.parametrize("mode", list(OnUpdate))
def test_every_load_of_the_same_version_ends(host, mode):
    """One after another, and at once; each when the weights that it brought are in use, or later ones."""
    if mode not in host.modes:
        pytest.skip("the engine refuses this mode")

    async def main():
        async with asyncio.timeout(120), host.engine() as engine:
            await engine.load(host.update(1), mode)
            await engine.load(host.update(1), mode)
            again = host.update(1)
            running = engine.start(request("r", tokens=LONG))
            await host.until_under_way(running)
            await asyncio.gather(engine.load(again, mode), engine.load(again, mode))
            assert engine.version == 1
            if mode is OnUpdate.DRAIN:
                assert running.partial().finish is FinishReason.LENGTH or isinstance(host, Simulated)
            check(await running.result(), LONG)
            after = await engine.start(request("after")).result()
        assert set(after.versions) == {1}

    host.run(main())


def test_a_load_ends_with_its_own_weights_in_use(host):
    """Of the same version as the weights that are there: these are waited for no less."""
    if isinstance(host, Simulated):
        pytest.skip("simulated weights have a version and nothing else")
    if OnUpdate.DRAIN not in host.modes:
        pytest.skip("the engine refuses this mode")

    async def main():
        async with asyncio.timeout(120), host.engine() as engine:
            await engine.load(host.update(1), OnUpdate.DRAIN)
            other = replace(host.update(2), version=1)
            running = engine.start(request("r", tokens=LONG))
            await host.until_under_way(running)
            await engine.load(other, OnUpdate.DRAIN)
            assert running.partial().finish is FinishReason.LENGTH, "a load that drains ends after what runs"
            asked = request("after")
            after = await engine.start(asked).result()
        drawn_by_two = replace(after, versions=np.full(len(after.tokens), 2, np.int32))
        assert logprob_errors(host, asked, drawn_by_two).max() < EXACT

    host.run(main())


@pytest.mark.parametrize("mode", list(OnUpdate))
def test_log_probs_are_those_of_the_weights_that_drew_the_token(host, mode):
    """Also of a prompt that was read under other weights before, by others that are still running."""
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    if mode not in host.modes:
        pytest.skip("the engine refuses this mode")
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 300)
    sampling = {"temperature": 0.7, "seed": 5}

    async def main():
        async with asyncio.timeout(120), host.engine() as engine:
            running = request("r", tokens=LONG, prompt=prompt, sampling=sampling)
            later = [request(f"later{i}", prompt=prompt, sampling=sampling | {"seed": i}) for i in range(2)]
            update = host.update(1)
            handle = engine.start(running)
            await host.until_under_way(handle)
            await engine.load(update, mode)
            return [(each, await engine.start(each).result()) for each in later] + [(running, await handle.result())]

    told = host.run(main())
    assert all(set(completion.versions) == {1} for _, completion in told[:-1])
    for each, completion in told:
        errors, mixed = logprob_errors(host, each, completion), completion.streams[MIXED_CACHE]
        assert errors[~mixed].max() < EXACT
        if mixed.any():
            assert errors[mixed].max() > 100 * EXACT, "what is flagged really differs"


@contract
async def test_weights_that_are_not_what_was_sent_are_refused(host, engine):
    with pytest.raises(WeightsError, match="not loaded"):
        await engine.load(host.spoilt(engine, 1), host.modes[0])
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
async def test_weights_that_are_not_all_there_are_refused(host, engine):
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens are drawn from nothing")
    whole = list(host.model(1).named_parameters())
    for number, part in enumerate((whole[1:], whole[:-1], [*whole, ("another", whole[0][1])])):
        with pytest.raises(WeightsError):
            await engine.load(open_channel(TransferContext(host.folder)).send(part, 1), host.modes[0])
        assert engine.version == 0
        asked = request(f"r{number}")
        await engine.load(host.update(number + 2), host.modes[0])
        assert logprob_errors(host, asked, await engine.start(asked).result()).max() < EXACT
        await engine.load(host.update(0), host.modes[0])


@contract
async def test_sleep_frees_the_device_or_is_unsupported(host, engine):
    if isinstance(host, Simulated):
        pytest.skip("simulated tokens need no cache")
    if host.kind in ("server", "sglang"):
        with pytest.raises(UnsupportedError, match="does not leave its device"):
            await engine.sleep()
    else:
        with suppress(UnsupportedError):
            await engine.sleep()
        await engine.wake()
    check(await engine.start(request("r")).result(), 20)


@contract
async def test_sleeping_engine_loads_weights_and_queues_requests(host, engine):
    if isinstance(host, Simulated) or host.kind in ("server", "sglang"):
        pytest.skip("it has nothing to give back, or does not leave its device")
    try:
        await engine.sleep()
    except UnsupportedError as error:
        pytest.skip(f"it keeps its device: {error}")
    await engine.wake()
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 300)
    asked = [request(f"r{number}", prompt=prompt, sampling={"seed": number}) for number in range(SLOTS)]
    running = engine.start(request("running", tokens=LONG, prompt=prompt))
    await host.until_under_way(running)
    with pytest.raises(StateError):
        await engine.sleep()
    running.abort()
    await running.result()
    for version in (1, 0):
        await engine.sleep()
        handles = [engine.start(each) for each in asked]
        with pytest.raises(WeightsError, match="not loaded"):
            await engine.load(host.spoilt(engine, version + 2), host.modes[0])
        await engine.load(host.update(version), host.modes[0])
        assert not any(len(handle.partial().tokens) for handle in handles)
        await engine.wake()
        for each, handle in zip(asked, handles, strict=True):
            completion = await handle.result()
            check(completion, 20)
            assert set(completion.versions) == {version} and not completion.streams[MIXED_CACHE].any()
            assert logprob_errors(host, each, completion).max() < EXACT
