"""Protocols of servers by name, and errors of a protocol of the user's own."""

import asyncio

import pytest

from antiphon.core.errors import ConfigError, UnsupportedError, UserCodeError
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
