"""What the engine promises besides numbers: sharing, stops, aborts, updates, limits, memory."""

import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.core.errors import RequestError, StateError, UnsupportedError, UserCodeError, WeightsError
from antiphon.core.types import (
    MIXED_CACHE,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    Sampling,
    Streams,
    StreamSpec,
    WeightsUpdate,
)
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine
from antiphon.engines.native.weights import copy_weights
from tests.unit.engines.native_support import VOCABULARY, Host, make_host, make_model, prompt


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


def read(host: Host) -> int:
    return host.engine.counters.read_tokens


# --- sharing -----------------------------------------------------------------------------------------------------------


def test_siblings_that_arrive_together_are_read_once() -> None:
    host = make_host(slots=6, prefill_tokens=512)
    shared = prompt(0, 30)
    for i in range(5):
        host.add(f"s{i}", shared, max_tokens=5, seed=i)
    host.step()
    assert read(host) == 30 and all(len(host.tokens(f"s{i}")) == 1 for i in range(5))
    host.run()
    assert read(host) == 30
    errors, _ = host.logprob_errors()
    assert errors.max() < 1e-4


@pytest.mark.parametrize("budget", [7, 512])
def test_late_siblings_do_not_prefill_again(budget: int) -> None:
    host = make_host(slots=2, prefill_tokens=budget)
    for i in range(6):
        host.add(f"s{i}", prompt(0, 30), max_tokens=4, seed=i)
    host.step(9)
    host.add("late", prompt(0, 30), max_tokens=4, seed=9)
    host.run()
    assert read(host) == 30
    assert host.logprob_errors()[0].max() < 1e-4


def test_shared_prefixes_and_conversations_prefill_once() -> None:
    host = make_host(slots=4, prefill_tokens=512)
    system = prompt(0, 40)
    host.add("a", system + prompt(1, 10), max_tokens=6)
    host.add("b", system + prompt(2, 10), max_tokens=6)
    host.run()
    assert read(host) == 60 or read(host) == 59  # the last token of a prompt whose rest is shared counts as decoding
    before = read(host)
    turn = system + prompt(1, 10) + host.tokens("a") + prompt(3, 5)
    host.add("a2", turn, max_tokens=6)
    host.run()
    # The last token that was sampled had no keys and values yet.
    assert read(host) - before == 1 + 5
    assert host.logprob_errors()[0].max() < 1e-4


def test_an_old_or_mixed_cache_is_not_shared() -> None:
    host = make_host(slots=4, prefill_tokens=512)
    host.add("old", prompt(0, 30), max_tokens=2)
    host.add("running", prompt(1, 30), max_tokens=20)
    host.step(3)
    before = read(host)
    host.publish(1, OnUpdate.KEEP)
    host.add("like old", prompt(0, 30), max_tokens=4)
    host.add("like running", prompt(1, 30), max_tokens=4)
    host.run()
    assert read(host) - before == 60
    errors, mixed = host.logprob_errors()
    assert errors[~mixed].max() < 1e-4 and mixed.sum() == 17


def test_half_prefilled_prompt_is_not_shared_after_an_update() -> None:
    host = make_host(slots=4, prefill_tokens=25)
    host.add("half read", prompt(0, 30), max_tokens=4)
    host.add("unread", prompt(1, 8), max_tokens=4)
    host.step()
    host.publish(1, OnUpdate.KEEP)
    host.add("same", prompt(0, 30), max_tokens=4, seed=1)
    host.add("same beginning", prompt(0, 28) + prompt(5, 9), max_tokens=4)
    host.run()
    assert host.logprob_errors()[0][4:].max() < 1e-4
    flagged = {name: host.stream(name, "mixed_cache").any() for name in host.deltas}
    assert flagged == {"half read": True, "unread": False, "same": False, "same beginning": False}


def test_short_prompt_does_not_evict_a_long_conversation() -> None:
    host = make_host(slots=2, prefill_tokens=512)
    conversation = prompt(0, 90)
    host.add("conversation", conversation, max_tokens=2)
    host.run()
    host.add("short", conversation[:10] + prompt(1, 3), max_tokens=2)
    host.run()
    before = read(host)
    host.add("next turn", conversation + host.tokens("conversation") + prompt(2, 4), max_tokens=2)
    host.run()
    assert read(host) - before == 1 + 4


def test_the_cache_grows_with_its_sequences() -> None:
    host = make_host(slots=3, prefill_tokens=512)
    for i, length in enumerate((100, 60, 4)):
        host.add(f"r{i}", prompt(i, length), max_tokens=60 - 25 * i, seed=i)
    host.run()
    assert len(host.tokens("r0")) == 60 and host.logprob_errors()[0].max() < 1e-4


def test_recomputation_shares_too_and_keeps_to_its_budget() -> None:
    host = make_host(slots=4, prefill_tokens=16)
    for i in range(4):
        host.add(f"s{i}", prompt(0, 30), max_tokens=12, seed=i)
    host.step(6)
    had = {name: host.tokens(name) for name in host.requests}
    host.publish(1, OnUpdate.RECOMPUTE)
    while host.engine.busy:
        before = read(host)
        host.step()
        assert read(host) - before <= 16
    assert all(
        host.tokens(name)[: len(tokens)] == tokens and len(host.tokens(name)) == 12 for name, tokens in had.items()
    )
    assert host.logprob_errors()[0].max() < 1e-4


# --- sampling ----------------------------------------------------------------------------------------------------------


def test_samples_follow_the_softmax() -> None:
    host = make_host(slots=64, prefill_tokens=512)
    for i in range(3000):
        host.add(f"r{i}", prompt(0, 8), max_tokens=1, seed=i, temperature=1.3)
    host.run()
    counts = np.bincount([host.tokens(f"r{i}")[0] for i in range(3000)], minlength=VOCABULARY)
    expected = 3000 * np.exp(host.logprobs(0, np.array(prompt(0, 8)), 1.3)[-1])
    common = expected > 5
    chi = ((counts - expected)[common] ** 2 / expected[common]).sum() + (
        (counts - expected)[~common].sum() ** 2 / max(expected[~common].sum(), 1e-9)
    )
    assert chi < common.sum() + 4 * np.sqrt(2 * common.sum())
    assert read(host) == 8


def test_sample_depends_on_neither_batch_nor_engine() -> None:
    alone = make_host(slots=1)
    alone.add("r", prompt(0, 9), max_tokens=20, seed=7)
    alone.run()
    crowd = make_host(slots=8)
    for i in range(12):
        crowd.add(f"n{i}", prompt(i, 5 + i), max_tokens=3 + i, seed=i)
    crowd.step(2)
    crowd.add("r", prompt(0, 9), max_tokens=20, seed=7)
    crowd.run()
    assert crowd.tokens("r") == alone.tokens("r")
    again = make_host(slots=2)
    again.add("r", prompt(0, 9) + alone.tokens("r")[:8], max_tokens=12, seed=7)
    again.run()
    assert again.tokens("r") == alone.tokens("r")[8:]


# --- streams of one's own ----------------------------------------------------------------------------------------------

ENTROPY = StreamSpec("entropy", producer="engine")
LOGIT = StreamSpec("logit", shape=(1,), producer="engine")


class WithEntropy(NativeEngine):
    """The entropy of the distribution that each token is drawn from, and a logit."""

    def compute_streams(self, logits, requests):
        temperatures = torch.tensor([request.sampling.temperature for request in requests])
        entropy = torch.distributions.Categorical(logits=logits / temperatures[:, None]).entropy()
        return {ENTROPY: entropy.numpy(), LOGIT: logits[:, 3:4].numpy()}


def test_streams_of_a_subclass_belong_to_their_tokens() -> None:
    """Prompts that share a prefix, prompts read in pieces, siblings that are read once, more requests than slots."""
    host = make_host(slots=3, prefill_tokens=7)
    host.engine = WithEntropy(host.model, host.config, receive=host._receive)
    for i in range(6):
        host.add(f"r{i}", prompt(i // 2, 5 + 6 * (i // 2)), max_tokens=4 + i, seed=i, temperature=0.5 + i / 4)
        host.step(i % 2)
    host.run()
    for name, request in host.requests.items():
        tokens = [*request.tokens.tolist(), *host.tokens(name)]
        streams = Streams.join([delta.streams for delta in host.deltas[name]])
        with torch.no_grad():
            logits = host.reference(torch.tensor([tokens])).logits[0, len(request.tokens) - 1 : -1]
        probabilities = (logits / request.sampling.temperature).softmax(-1).double()
        np.testing.assert_allclose(streams[ENTROPY], -(probabilities * probabilities.log()).nansum(-1), atol=1e-4)
        np.testing.assert_allclose(streams[LOGIT], logits[:, 3:4], atol=1e-4)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({ENTROPY: np.zeros(1, np.float64)}, "float64"),
        ({ENTROPY: np.zeros((1, 2), np.float32)}, "(2,)"),
        ({ENTROPY: np.zeros(2, np.float32)}, "'entropy': 2"),
        (None, "NoneType"),
        ({ENTROPY: [0.0]}, "list"),
        ({"entropy": np.zeros(1, np.float32)}, "str"),
        ({ENTROPY: np.float32(0)}, "float32"),
        ({MIXED_CACHE: np.zeros(1, np.bool_)}, "one of Antiphon's own"),
        (ZeroDivisionError("by nothing"), "ZeroDivisionError: by nothing"),
    ],
)
def test_wrong_streams_of_a_subclass_end_the_run_with_their_place(found, told) -> None:
    class Wrong(NativeEngine):
        def compute_streams(self, logits, requests):
            if isinstance(found, Exception):
                raise found
            return found

    host = make_host(slots=1)
    host.engine = Wrong(host.model, host.config, receive=host._receive)
    host.add("r", prompt(0, 5), max_tokens=2)
    with pytest.raises(UserCodeError) as caught:
        host.run()
    assert told in str(caught.value) and "test_native_engine.py:" in str(caught.value)


def test_other_streams_at_a_later_call_are_refused() -> None:
    class Alternates(NativeEngine):
        calls = 0

        def compute_streams(self, logits, requests):
            Alternates.calls += 1
            return {} if Alternates.calls % 2 else {ENTROPY: np.zeros(len(requests), np.float32)}

    host = make_host(slots=1)
    host.engine = Alternates(host.model, host.config, receive=host._receive)
    host.add("r", prompt(0, 5), max_tokens=3)
    with pytest.raises(UserCodeError, match=r"\['entropy'\], and \[\] before"):
        host.run()


# --- ends --------------------------------------------------------------------------------------------------------------


def test_stop_tokens_strings_and_the_models_own_end() -> None:
    plain = make_host(tokenizer=Letters())
    plain.add("r", prompt(0, 9), max_tokens=30, seed=3)
    plain.run()
    tokens = plain.tokens("r")
    text = Letters().decode(tokens)
    at = next(i for i in range(8, 30) if tokens[i] not in tokens[:i] and text[i - 2 : i + 1] not in text[:i])
    plain.add("token", prompt(0, 9), max_tokens=30, seed=3, stop_tokens=(tokens[at],))
    plain.add("string", prompt(0, 9), max_tokens=30, seed=3, stop=("no such text", text[at - 2 : at + 1]))
    plain.run()
    model = make_model()
    model.generation_config.eos_token_id = [tokens[at], VOCABULARY - 1]
    ending = Host(model, EngineConfig(slots=2, device="cpu"))
    ending.add("end", prompt(0, 9), max_tokens=30, seed=3)
    ending.run()
    for host, name in ((plain, "token"), (plain, "string"), (ending, "end")):
        assert host.tokens(name) == tokens[: at + 1]
        assert host.finish(name) is FinishReason.STOP
    assert plain.finish("r") is FinishReason.LENGTH


def test_abort_keeps_what_there_is() -> None:
    host = make_host(slots=2)
    for i in range(4):
        host.add(f"r{i}", prompt(i, 5), max_tokens=20, seed=i)
    host.step(4)
    host.engine.abort("r0")
    host.engine.abort("r3")
    host.engine.abort("never heard of")
    assert host.engine.busy
    host.step()
    assert host.finish("r0") is FinishReason.ABORT and len(host.tokens("r0")) == 4
    assert host.finish("r3") is FinishReason.ABORT and host.tokens("r3") == []
    host.run()
    assert len(host.tokens("r1")) == len(host.tokens("r2")) == 20
    host.add("r0", prompt(0, 5), max_tokens=2)  # its id is free again


def test_what_cannot_be_run_is_refused_with_numbers() -> None:
    host = make_host(max_length=50)
    with pytest.raises(RequestError, match=r"45 prompt tokens .* up to 6 more, 51 in all; the engine holds 50"):
        host.add("long", prompt(0, 45), max_tokens=6)
    host.add("fits", prompt(0, 45), max_tokens=5)
    with pytest.raises(RequestError, match="'fits'"):
        host.add("fits", prompt(0, 4), max_tokens=5)
    for name, tokens, sampling in (
        ("empty", [], {"max_tokens": 3}),
        ("nothing", [1], {"max_tokens": 0}),
        ("unknown token", [VOCABULARY], {"max_tokens": 3}),
        ("no tokenizer", [1], {"max_tokens": 3, "stop": ("x",)}),
    ):
        with pytest.raises(RequestError, match=name):
            host.add(name, tokens, **sampling)
    host.run()
    assert len(host.tokens("fits")) == 5


def test_priority_goes_first() -> None:
    host = make_host(slots=1)
    for name, priority in (("late", 5), ("first", -1), ("second", 5)):
        request = GenerateRequest(
            id=name, tokens=np.array([1], np.int32), sampling=Sampling(max_tokens=2), priority=priority
        )
        host.engine.add(request)
        host.requests[name] = request
    host.run()
    assert list(host.deltas) == ["first", "late", "second"]


# --- updates -----------------------------------------------------------------------------------------------------------


def test_restart_says_so_and_begins_again() -> None:
    host = make_host()
    host.add("r", prompt(0, 9), max_tokens=8, seed=1)
    host.step(3)
    host.publish(4, OnUpdate.RESTART)
    first = host.engine.step()
    assert first[0].restarted and len(first[0].tokens) == 0 and first[1].versions.tolist() == [4]
    assert host.engine.version == 4


def test_drain_finishes_on_the_old_weights_and_admits_nothing() -> None:
    host = make_host(slots=2)
    for i in range(3):
        host.add(f"r{i}", prompt(i, 5), max_tokens=6)
    host.step(2)
    host.publish(1, OnUpdate.DRAIN)
    assert host.engine.version == 0
    host.run()
    versions = {name: {int(v) for d in deltas for v in d.versions} for name, deltas in host.deltas.items()}
    assert versions == {"r0": {0}, "r1": {0}, "r2": {1}}
    host.publish(2, OnUpdate.DRAIN)  # nothing runs: at once
    assert host.engine.version == 2 and not host.engine.busy


def test_wrong_weights_are_named_and_block_the_engine() -> None:
    host = make_host("qwen2")
    good = dict(host.weights[0])
    bad = {
        "does not have": good | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)},
        "shape": good | {"model.norm.weight": torch.zeros(3)},
        "lacks model.norm.weight": {name: tensor for name, tensor in good.items() if name != "model.norm.weight"},
    }
    for message, tensors in bad.items():
        host.weights[1] = tensors
        with pytest.raises(WeightsError, match=message):
            host.engine.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.KEEP)
        with pytest.raises(WeightsError, match="half way"):
            host.step()
    host.publish(2, OnUpdate.KEEP)
    host.add("r", prompt(0, 9), max_tokens=8)
    host.run()
    assert host.logprob_errors()[0].max() < 1e-4


class SlowTensor(torch.Tensor):
    """A tensor whose copy into another goes on for a while after `begin`."""

    begin, ended = Event(), Event()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            cls.begin.wait(10)
            time.sleep(0.2)  # the length of the copy
            cls.ended.set()
        return super().__torch_function__(func, types, args, kwargs or {})


def test_failed_load_copies_nothing_afterwards() -> None:
    host = make_host("qwen2")
    name, tensor = next(iter(host.weights[0].items()))

    def stopping() -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor.as_subclass(SlowTensor)
        SlowTensor.begin.set()
        yield "model.norm.weight", torch.zeros(3)

    with pytest.raises(WeightsError, match="shape"):
        copy_weights(host.model, stopping())
    assert SlowTensor.ended.is_set()


@pytest.mark.parametrize("dropped", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_need_only_one_of_their_names(dropped: str) -> None:
    host = make_host("llama")
    host.add("r", prompt(0, 9), max_tokens=8)
    host.step(2)
    host.weights[1] = {name: tensor * 0.9 for name, tensor in host.weights[0].items() if name != dropped}
    host.engine.load(WeightsUpdate(version=1, location="", manifest=None), OnUpdate.RECOMPUTE)
    host.run()
    host.weights[1] = {name: tensor * 0.9 for name, tensor in host.weights[0].items()}
    assert host.logprob_errors()[0].max() < 1e-4


# --- memory and models -------------------------------------------------------------------------------------------------


def test_sleep_gives_the_cache_back() -> None:
    host = make_host()
    host.add("r", prompt(0, 9), max_tokens=8)
    host.step()
    with pytest.raises(StateError, match="1 requests"):
        host.engine.sleep()
    host.run()
    host.engine.sleep()
    host.engine.wake()
    host.add("again", prompt(0, 9), max_tokens=8, seed=3)
    host.run()
    host.engine.sleep()
    host.add("waits", prompt(0, 9), max_tokens=8, seed=2)
    assert not host.engine.busy and host.engine.step() == []
    host.publish(1, OnUpdate.KEEP)
    host.engine.wake()
    host.run()
    assert {int(v) for d in host.deltas["waits"] for v in d.versions} == {1}
    assert host.logprob_errors()[0].max() < 1e-4


def test_a_directory_and_half_precision(tmp_path) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    engine = NativeEngine(tmp_path, EngineConfig(slots=2, device="cpu", dtype="bfloat16"), receive=lambda update: ())
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    engine.add(GenerateRequest(id="r", tokens=np.array(prompt(0, 20), np.int32), sampling=Sampling(max_tokens=6)))
    deltas = [delta for _ in range(6) for delta in engine.step()]
    tokens = np.concatenate([delta.tokens for delta in deltas])
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt(0, 20), *tokens.tolist()]])).logits[0, 19:25]
    expected = torch.log_softmax(logits, -1)[range(6), tokens.tolist()].numpy()
    assert np.abs(np.concatenate([delta.logprobs for delta in deltas]) - expected).max() < 0.5


def test_models_that_it_cannot_run_are_refused() -> None:
    def engine_for(model) -> NativeEngine:
        return NativeEngine(model, EngineConfig(slots=2, device="cpu"), receive=lambda update: ())

    dynamic = make_model()
    dynamic.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedError, match="dynamic"):
        engine_for(dynamic)
    with pytest.raises(UnsupportedError, match="float33"):
        NativeEngine(make_model(), EngineConfig(slots=2, device="cpu", dtype="float33"), receive=lambda update: ())
    with pytest.raises(UnsupportedError, match=r"engine\.device.*'gpu'"):
        NativeEngine(make_model(), EngineConfig(slots=2, device="gpu"), receive=lambda update: ())
