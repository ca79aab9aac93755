"""Protocols of servers by name, and errors of a protocol of the user's own."""

import asyncio
from contextlib import nullcontext

import numpy as np
import pytest

from antiphon.core.errors import ConfigError, UnsupportedError, UserCodeError
from antiphon.core.types import GenerateRequest, Sampling
from antiphon.engines.request_checks import PENALTIES, check_sampling_supported
from antiphon.engines.server_protocols import SGLangProtocol, VLLMProtocol, open_protocol

HERE = "tests.unit.engines.test_server_protocols"


class Own(SGLangProtocol):
    """Does not understand the server's words."""

    def parse_chunk(self, answer, seen):
        return answer["words"]

    async def push_weights(self, call, folder, weights_id):
        await call("POST", "/reload", {"folder": folder}).nothing

    async def weights_id(self, call):
        raise UnsupportedError("the server keeps no id")


def place(method):
    return f"test_server_protocols.py:{method.__code__.co_firstlineno + 1})"


def test_flavours_have_protocols_with_the_address():
    for flavour, kind in (("vllm", VLLMProtocol), ("sglang", SGLangProtocol), (f"{HERE}:Own", Own)):
        protocol = open_protocol(flavour, "http://server")
        assert type(protocol) is kind and protocol.url == "http://server"
    with pytest.raises(ConfigError) as caught:
        open_protocol("slang", "http://server")
    assert caught.value.key == "engine.options.flavour" and "sglang" in caught.value.suggestions


@pytest.mark.parametrize(
    ("flavour", "sent"), [("openai", ["presence_penalty", "frequency_penalty"]), ("vllm", [*PENALTIES]), ("sglang", [])]
)
def test_penalties_are_sent_to_servers_that_have_them(flavour, sent):
    """To others they are neutral: the engine refuses requests with penalties."""
    sampling = Sampling(max_tokens=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.6)
    request = GenerateRequest(id="r", tokens=np.array([4], np.int32), sampling=sampling)
    protocol = open_protocol(flavour, "http://server")
    body = protocol.request_body("model", request, [], "weights")
    found = body | body.get("sampling_params", {})
    assert protocol.penalties == {*sent}
    for name, neutral in PENALTIES.items():
        assert found.get(name, neutral) == (getattr(sampling, name) if name in sent else neutral)
    with pytest.raises(UnsupportedError) if flavour != "vllm" else nullcontext():
        check_sampling_supported(sampling, "the server", penalties=protocol.penalties)


def test_counted_output_cannot_be_continued_elsewhere():
    for penalty, refused in (("repetition_penalty", False), ("presence_penalty", True), ("frequency_penalty", True)):
        sampling = Sampling(max_tokens=5, **{penalty: 0.5})
        check_sampling_supported(sampling, "the server", penalties=PENALTIES)
        with pytest.raises(UnsupportedError) if refused else nullcontext():
            check_sampling_supported(sampling, "the server", penalties=PENALTIES, sampled=1)


def test_errors_of_an_own_protocol_name_the_method_and_the_line():
    own = open_protocol(f"{HERE}:Own", "http://server")
    with pytest.raises(UserCodeError) as caught:
        own.parse_chunk({"text": "hello"}, 0)
    assert caught.value.key == "engine.options.flavour" and f"{HERE}:Own.parse_chunk" in str(caught.value)
    assert str(caught.value).endswith(place(Own.parse_chunk))
    with pytest.raises(UserCodeError) as caught:
        asyncio.run(own.push_weights(lambda *words: object(), "folder", "1"))
    assert str(caught.value).endswith(place(Own.push_weights))


def make_own(url):
    return Own(url)


class Refuses(Own):
    def __init__(self, url):
        raise ValueError("no address")


def test_what_is_no_protocol_is_refused():
    for name in ("make_own", "place"):
        with pytest.raises(ConfigError) as caught:
            open_protocol(f"{HERE}:{name}", "http://server")
        assert caught.value.key == "engine.options.flavour" and "OpenAIProtocol" in str(caught.value)
    with pytest.raises(UserCodeError, match="no address"):
        open_protocol(f"{HERE}:Refuses", "http://server")


def test_errors_that_an_own_protocol_means_are_passed_on():
    with pytest.raises(UnsupportedError, match="keeps no id"):
        asyncio.run(open_protocol(f"{HERE}:Own", "http://server").weights_id(None))


def test_errors_of_a_shipped_protocol_are_bugs():
    with pytest.raises(KeyError):
        open_protocol("sglang", "http://server").parse_chunk({"text": "hello"}, 0)
