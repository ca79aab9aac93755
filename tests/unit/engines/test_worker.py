"""What an engine's process demands of the engine in it, and how it names what is missing."""

import numpy as np
import pytest

from antiphon.core.errors import REFUSALS, UnsupportedError, UserCodeError
from antiphon.core.types import MIXED_CACHE, ROUTED_EXPERTS, OnUpdate, Streams, WeightsUpdate
from antiphon.engines.config import EngineKind
from antiphon.engines.deltas import Delta
from antiphon.engines.worker import EngineWorker

HERE = "tests.unit.engines.test_worker"
UPDATE = WeightsUpdate(version=1, location="", manifest=None)
EVERY = {MIXED_CACHE: np.zeros(1, np.bool_), ROUTED_EXPERTS: np.ones((1, 2, 1), np.int16)}


class Engine:
    """Returns one token, with the streams that its options name."""

    version = loads = 0
    capacity, max_length, vocabulary = 1, 8, 10
    busy = True

    def __init__(self, model, config, receive):
        self._streams = Streams({spec: EVERY[spec] for spec in EVERY if spec.name in config.options["streams"]})

    def step(self):
        one = np.ones(1, np.int32)
        empty = Delta.empty("earlier")
        self.busy = False
        tokens = Delta(
            request="r", tokens=one, logprobs=np.zeros(1, np.float32), versions=one * 0, streams=self._streams
        )
        return [empty, tokens]

    def start_profile(self, memory):
        self.profiled = [memory]

    def write_profile(self, folder, name):
        self.profiled += [folder, name]

    def load(self, update, mode):
        if mode is OnUpdate.KEEP:
            raise UnsupportedError("I recompute only")
        if mode is OnUpdate.DRAIN:
            raise UnsupportedError("no room", key="engine.options.room", value=3)


def open_worker(streams=(), key="engine.kind", **fields):
    config = EngineKind(kind=f"{HERE}:Engine", options={"streams": list(streams)}, **fields)
    worker = EngineWorker(config.kind, "", config, "shared_memory", key)
    worker.emit = lambda event: None
    return worker


@pytest.mark.parametrize(
    ("streams", "experts", "key"),
    [
        ([], False, "engine.also.0.kind"),
        (["routed_experts"], False, "engine.also.0.kind"),
        (["mixed_cache"], True, "engine.routed_experts"),
    ],
)
def test_tokens_without_a_required_stream_end_the_run(streams, experts, key):
    worker = open_worker(streams, "engine.also.0.kind", routed_experts=experts)
    with pytest.raises(UserCodeError, match=f"{HERE}:Engine") as caught:
        worker.advance()
    assert not isinstance(caught.value, REFUSALS), "not of a request alone"
    assert caught.value.key == key


@pytest.mark.parametrize("experts", [False, True])
def test_tokens_with_all_streams_are_sent(experts):
    worker, sent = open_worker(["mixed_cache", "routed_experts"], routed_experts=experts), []
    worker.emit = sent.append
    worker.advance()
    assert [len(delta.tokens) for deltas in sent for delta in deltas if delta.request == "r"] == [1]


@pytest.mark.parametrize(
    ("mode", "key", "value"), [(OnUpdate.KEEP, "rollout.on_update", "keep"), (OnUpdate.DRAIN, "engine.options.room", 3)]
)
def test_mode_that_an_engine_refuses_is_named(mode, key, value):
    with pytest.raises(UnsupportedError) as caught:
        open_worker().load(UPDATE, mode)
    assert (caught.value.key, caught.value.value) == (key, value)


def test_mode_that_an_engine_supports_is_loaded():
    open_worker().load(UPDATE, OnUpdate.RECOMPUTE)


def test_an_engine_may_profile_itself(tmp_path):
    worker = open_worker()
    worker.start_profile(True)
    worker.write_profile(tmp_path, "engine-0")
    assert worker.core.profiled == [True, tmp_path, "engine-0"] and not [*tmp_path.iterdir()]
