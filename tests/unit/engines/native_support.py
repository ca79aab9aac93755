"""Tiny models, a driver and the independent reference for the tests of the native engine."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from antiphon.core.types import (
    MIXED_CACHE,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    Sampling,
    StreamSpec,
    WeightsUpdate,
)
from antiphon.engines.config import EngineConfig
from antiphon.engines.deltas import Delta
from antiphon.engines.native.engine import NativeEngine

torch.set_num_threads(1)

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES = {  # of experts: the best of a softmax, the same with other weights, and those of the best groups by a sigmoid
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, num_experts=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_experts_per_tok=2, num_local_experts=8)),
    "glm4 moe": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **SHAPE, **EXPERTS, head_dim=8, n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1
        )
    ),
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    **MIXTURES,
}


def make_model(family: str = "llama", seed: int = 0) -> Any:
    """A random model, sharp enough that its distributions are not flat."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


@dataclass
class Host:
    """An engine, the weights of every version it may load, and what it said."""

    model: Any
    config: EngineConfig
    tokenizer: Any = None
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    deltas: dict[str, list[Delta]] = field(default_factory=dict)
    requests: dict[str, GenerateRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights[0] = copy.deepcopy(self.model.state_dict())
        self.reference = copy.deepcopy(self.model)
        self.engine = NativeEngine(self.model, self.config, receive=self._receive, tokenizer=self.tokenizer)

    def _receive(self, update: WeightsUpdate) -> Iterable[tuple[str, torch.Tensor]]:
        yield from self.weights[update.version].items()

    def publish(self, version: int, mode: OnUpdate, scale: float = 0.3) -> None:
        """Load new weights: those of version 0 with noise."""
        generator = torch.Generator().manual_seed(version)
        noisy = {}
        for name, tensor in self.weights[0].items():
            noise = torch.randn(tensor.shape, generator=generator)
            noisy[name] = tensor + scale * tensor.std() * noise if tensor.ndim > 1 else tensor
        if self.model.config.tie_word_embeddings:
            noisy["lm_head.weight"] = noisy["model.embed_tokens.weight"]
        self.weights[version] = noisy
        self.engine.load(WeightsUpdate(version=version, location="", manifest=None), mode)

    def add(self, name: str, tokens: Iterable[int], **sampling: Any) -> None:
        """Queue a request."""
        request = GenerateRequest(id=name, tokens=np.array(list(tokens), np.int32), sampling=Sampling(**sampling))
        self.engine.add(request)
        self.requests[name] = request

    def step(self, times: int = 1) -> None:
        """Step and collect."""
        for _ in range(times):
            for delta in self.engine.step():
                kept = [] if delta.restarted else self.deltas.setdefault(delta.request, [])
                kept.append(delta)
                self.deltas[delta.request] = kept

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(2000):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def tokens(self, name: str) -> list[int]:
        """The tokens of a request."""
        return self._joined(name, "tokens").tolist()

    def finish(self, name: str) -> FinishReason | None:
        """Why the request ended."""
        return self.deltas[name][-1].finish

    def _joined(self, name: str, what: str) -> np.ndarray:
        return np.concatenate([getattr(delta, what) for delta in self.deltas[name]])

    def logprob_errors(self) -> tuple[np.ndarray, np.ndarray]:
        """|engine - plain forward| of every token of every request, and whether the token is flagged as mixed."""
        errors, flags = [], []
        for name, request in self.requests.items():
            own, versions = self._joined(name, "logprobs"), self._joined(name, "versions")
            tokens = self._joined(name, "tokens").astype(np.int64)
            expected = np.zeros(len(tokens))
            for version in np.unique(versions):
                full = self.logprobs(
                    int(version), np.concatenate([request.tokens, tokens]), request.sampling.temperature
                )
                at = np.flatnonzero(versions == version)
                expected[at] = full[len(request.tokens) - 1 + at, tokens[at]]
            errors.append(np.abs(expected - own))
            flags.append(self.stream(name, MIXED_CACHE.name))
        return np.concatenate(errors), np.concatenate(flags)

    def stream(self, name: str, stream: str) -> np.ndarray:
        """What the engine told of each token of a request."""
        told = [delta.streams[StreamSpec(stream)] for delta in self.deltas[name] if len(delta.tokens)]
        return np.concatenate(told) if told else np.empty(0, np.bool_)

    @torch.no_grad()
    def logprobs(self, version: int, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probabilities [L, V] of a plain transformers forward with the weights of `version`."""
        logits = torch.from_numpy(self.logits(version, tokens))
        return torch.log_softmax(logits.double() / (temperature or 1.0), -1).numpy()

    @torch.no_grad()
    def logits(self, version: int, tokens: np.ndarray) -> np.ndarray:
        """Logits [L, V] of a plain transformers forward with the weights of `version`."""
        self.reference.load_state_dict(self.weights[version])
        return self.reference(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


def make_host(
    family: str = "llama", *, slots: int = 6, prefill_tokens: int = 24, tokenizer: Any = None, **config: Any
) -> Host:
    """A host with a tiny model on the CPU."""
    settings = EngineConfig(slots=slots, prefill_tokens=prefill_tokens, device="cpu", **config)
    return Host(make_model(family), settings, tokenizer)


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
