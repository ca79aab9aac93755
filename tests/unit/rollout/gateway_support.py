"""A tokenizer of bytes with a chat template, an engine that logs what it is given, and a gateway's session over both."""

import itertools
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from antiphon.core.types import (
    MIXED_CACHE,
    AttemptId,
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Sampling,
    Streams,
)
from antiphon.rollout.attempt import AttemptInputs
from antiphon.rollout.gateway.attempt_session import AttemptSession
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.tasks.rendering import Renderer

MARKS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
PROMPT = Prompt(id="p", task="t", messages=(Message("user", "Hi"),), seed=3)
SAMPLING = Sampling(max_tokens=64, temperature=0.7)
STARTED = PolicyVersion(0, 4)

BODY = (
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>\n"
)
OPENING = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>\n{% endif %}"
CLOSING = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def each(body: str, messages: str = "messages") -> str:
    return OPENING + "{% for message in " + messages + " %}<|{{ message.role }}|>" + body + "{% endfor %}" + CLOSING


def calls_as(written: str) -> str:
    """Calls of tools in other JSON than any policy or client writes."""
    return each(BODY.replace("call.function | tojson", written))


FORGET = BODY.replace("message.content", "message.content.split('</think>')[-1] | trim")
LAST_QUESTION = (
    "{% set at = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "plain": each(BODY),
    "strips": each(BODY.replace("message.content", "message.content | trim")),
    "numbers": each("{{ loop.index }}/{{ loop.length }} " + BODY),
    "forgets thoughts": each("{% if message.role == 'assistant' %}" + FORGET + "{% else %}" + BODY + "{% endif %}"),
    "forgets thoughts before the question": LAST_QUESTION
    + each(
        "{% if message.role == 'assistant' and loop.index0 < at.last %}" + FORGET + "{% else %}" + BODY + "{% endif %}"
    ),
    "forgets what is old": each(BODY, "messages[-3:]"),
    "shouts": each(BODY.replace("message.content", "message.content | lower")),
    "repeats": each(BODY).replace(CLOSING, "<|system|>So far: {{ messages[0].content }}<|end|>\n" + CLOSING),
    "tools last": each("{% if loop.last and tools %}{{ tools | tojson }}{% endif %}" + BODY),
    "sorts calls": calls_as("call.function | tojson(indent=1, sort_keys=True)"),
    "packs calls": calls_as("call.function | tojson(separators=(',', ':'))"),
    "lists calls": calls_as("call.function.arguments | dictsort | list | tojson"),
    "drops calls": each("{{ message.content }}<|end|>\n"),
    "shows ids": each("{{ message.tool_call_id }}" + BODY.replace("call.function", "call")),
}


def make(directory: Path, template: str | None) -> Renderer:
    """A renderer whose tokens are bytes and marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return Renderer(directory)


class Logger:
    """An engine that says what it is told to, and logs what it was given and said. No two of its tokens have the same
    log-prob, which is their name."""

    def __init__(self, renderer, *said):
        self.renderer, self.said = renderer, list(said)
        self.log = []  # (request, completion)
        self.names = itertools.count(1)

    async def __call__(self, request, on_delta=None):
        text, finish = self.said.pop(0) if self.said else ("ok", FinishReason.STOP)
        closing = self.renderer.eos_ids[:1] if finish is FinishReason.STOP else ()
        tokens = np.array([*self.renderer.encode(text).tolist(), *closing] or self.renderer.eos_ids[:1], np.int32)
        completion = Completion(
            tokens=tokens,
            logprobs=np.array([-next(self.names) for _ in tokens], np.float32),
            versions=np.full(len(tokens), 4, np.int32),
            finish=finish,
            streams=Streams({MIXED_CACHE: np.zeros(len(tokens), np.bool_)}),
        )
        self.log.append((request, completion))
        return completion


def model(renderer, engine, **more):
    return ServedModel(generate=engine, tokenizer=renderer, max_length=more.pop("max_length", 4096), **more)


def attempt_inputs(sampling=SAMPLING):
    return AttemptInputs(prompt=PROMPT, attempt=AttemptId(0, 0, 0), started=STARTED, sampling=sampling)


def attempt(renderer, engine, sampling=SAMPLING, *, max_turns=0, **more):
    return AttemptSession(model(renderer, engine, **more), attempt_inputs(sampling), max_turns=max_turns)
