"""Which experts are chosen, and how a choice is replayed, against the routers' definitions."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from transformers import PhimoeConfig, PhimoeForCausalLM

from antiphon.algorithms.routing import Routers
from antiphon.errors import UnsupportedError
from tests.unit.engines.native_support import MIXTURES, VOCABULARY, make_host, make_model, prompt

TOKENS = torch.randint(VOCABULARY, (1, 23), generator=torch.Generator().manual_seed(3))


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


@pytest.fixture(params=MIXTURES)
def model(request):
    return make_model(request.param)


def test_watching_changes_nothing_and_sees_the_choice(model):
    seen = []
    for router in routers_of(model):
        router.register_forward_hook(lambda *call: seen.append(call[-1][-1]))
    expected = model(TOKENS).logits
    del seen[:]
    routers = Routers(model)
    assert torch.equal(model(TOKENS).logits, expected)
    assert torch.equal(routers.chosen(), torch.stack(seen, dim=1))


def test_a_choice_that_is_replayed_is_what_the_experts_are_taken_by(model):
    other = make_model_like(model, noise=0.5)
    first, second = Routers(model), Routers(other)
    model(TOKENS)
    fresh = other(TOKENS).logits
    own = second.chosen()
    assert (first.chosen() != own).any(), "the two would choose differently"
    second.replayed = first.chosen()
    replayed = other(TOKENS).logits
    assert torch.equal(second.chosen(), first.chosen())
    assert not torch.allclose(replayed, fresh)
    second.replayed = own
    assert torch.allclose(other(TOKENS).logits, fresh, atol=1e-6)
    second.replayed = torch.full_like(own, -1)
    assert torch.equal(other(TOKENS).logits, fresh)


def make_model_like(model, noise):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for router in routers_of(other):
            router.weight.add_(noise * router.weight.std() * torch.randn_like(router.weight))
    return other


def test_each_token_is_told_for_itself(model):
    """-1 leaves a token to the router; what is chosen for one is not seen by another of the same layer."""
    routers = Routers(model)
    model(TOKENS)
    own = routers.chosen()
    routers.replayed = torch.full_like(own, -1)
    routers.replayed[-1] = (own[-1] + 1) % 8
    model(TOKENS)
    assert torch.equal(routers.chosen()[:-1], own[:-1])
    assert torch.equal(routers.chosen()[-1], routers.replayed[-1])


def test_experts_are_weighed_by_the_router_that_is_trained():
    """Qwen3's weights are the softmax over all experts at those chosen; its gradient is that of finite differences."""
    model = make_model("qwen3 moe").double()
    routers = Routers(model)
    router = routers_of(model)[0]
    hidden = torch.randn(5, 32, dtype=torch.float64)
    routers.replayed = torch.tensor([[1, 6], [0, 2], [7, 3], [5, 4], [2, 6]])[:, None].expand(-1, 2, -1)
    given = routers.replayed[:, 0]

    def weights(weight):
        return torch.func.functional_call(router, {"weight": weight}, (hidden,))[1]

    logits = linear(hidden, router.weight).detach().numpy()
    exact = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    exact = np.take_along_axis(exact, given.numpy(), axis=-1)
    if router.norm_topk_prob:
        exact /= exact.sum(-1, keepdims=True)
    assert np.allclose(weights(router.weight).detach().numpy(), exact)
    # the model takes the softmax in float32
    assert torch.autograd.gradcheck(weights, router.weight.detach().requires_grad_(True), eps=1e-3, atol=2e-3)


def test_a_model_without_experts_has_none_to_record():
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no routers"):
        Routers(make_model("llama"))
    with pytest.raises(UnsupportedError, match="no routers"):
        make_host("qwen3", routed_experts=True)


def test_routers_that_choose_in_another_way_are_refused():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = PhimoeForCausalLM(PhimoeConfig(vocab_size=VOCABULARY, intermediate_size=48, num_local_experts=4, **shape))
    Routers(model)
    with pytest.raises(UnsupportedError, match=r"PhimoeTopKRouter does not choose its experts by torch\.topk"):
        model(TOKENS)


def test_the_engine_tells_who_computed_each_token(model):
    """Whatever else is in the batch: the experts at the position before it, in a plain forward of its sequence."""
    family = next(name for name, make in MIXTURES.items() if type(make()) is type(model))
    host = make_host(family, slots=3, prefill_tokens=5, routed_experts=True)
    for number in range(7):
        host.add(str(number), prompt(number // 2, 4 + number // 2), max_tokens=3 + number, seed=number)
    host.run()
    routers = Routers(host.reference)
    for name, request in host.requests.items():
        sequence = np.concatenate([request.tokens, host.tokens(name)])
        host.reference(torch.from_numpy(sequence.astype(np.int64))[None])
        expected = routers.chosen()[len(request.tokens) - 1 : -1].numpy() + 1
        assert np.array_equal(host.stream(name, "routed_experts"), expected)
