"""Which experts are chosen, and how a choice is replayed, against the routers' definitions."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from transformers import PhimoeConfig, PhimoeForCausalLM

from antiphon.algorithms.routing import Balance, Routers, balance_loss, find_routers
from antiphon.core.errors import UnsupportedError
from tests.unit.engines.native_support import MIXTURES, VOCABULARY, make_host, make_model, prompt

TOKENS = torch.randint(VOCABULARY, (1, 23), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=MIXTURES)
def model(request):
    return make_model(request.param)


def test_watching_changes_nothing_and_sees_the_choice(model):
    seen = []
    for router in find_routers(model):
        router.register_forward_hook(lambda *call: seen.append(call[-1][-1]))
    expected = model(TOKENS).logits
    del seen[:]
    routers = Routers(find_routers(model))
    assert torch.equal(model(TOKENS).logits, expected)
    assert torch.equal(routers.chosen(), torch.stack(seen, dim=1))


def test_replayed_choice_selects_the_experts(model):
    other = make_model_like(model, noise=0.5)
    first, second = Routers(find_routers(model)), Routers(find_routers(other))
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
        for router in find_routers(other):
            router.weight.add_(noise * router.weight.std() * torch.randn_like(router.weight))
    return other


def test_each_token_is_told_for_itself(model):
    """-1 leaves a token to the router; what is chosen for one is not seen by another of the same layer."""
    routers = Routers(find_routers(model))
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
    routers = Routers(find_routers(model))
    router = find_routers(model)[0]
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
    with pytest.raises(UnsupportedError, match="the model has no routers"):
        Routers(find_routers(make_model("llama")))
    with pytest.raises(UnsupportedError, match="no routers"):
        make_host("qwen3", routed_experts=True)


def test_routers_that_choose_in_another_way_are_refused():
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = PhimoeForCausalLM(PhimoeConfig(vocab_size=VOCABULARY, intermediate_size=48, num_local_experts=4, **shape))
    Routers(find_routers(model))
    with pytest.raises(UnsupportedError, match=r"PhimoeTopKRouter does not choose its experts by torch\.topk"):
        model(TOKENS)


def test_the_engine_tells_who_computed_each_token(model):
    """Whatever else is in the batch: the experts at the position before it, in a plain forward of its sequence."""
    family = next(name for name, make in MIXTURES.items() if type(make()) is type(model))
    host = make_host(family, slots=3, prefill_tokens=5, routed_experts=True)
    for number in range(7):
        host.add(str(number), prompt(number // 2, 4 + number // 2), max_tokens=3 + number, seed=number)
    host.run()
    routers = Routers(find_routers(host.reference))
    for name, request in host.requests.items():
        sequence = np.concatenate([request.tokens, host.tokens(name)])
        host.reference(torch.from_numpy(sequence.astype(np.int64))[None])
        expected = routers.chosen()[len(request.tokens) - 1 : -1].numpy() + 1
        assert np.array_equal(host.stream(name, "routed_experts"), expected)


def test_the_balance_is_that_of_each_sequence_by_its_definition():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(30, 6, dtype=torch.double, generator=generator).softmax(-1)
    indices = scores.topk(2).indices
    chosen = torch.zeros_like(scores).scatter(1, indices, 1.0)
    sequences = [list(range(12)), [*range(5), *range(12, 30)]]
    members = torch.stack([torch.tensor([float(token in sequence) for token in range(30)]) for sequence in sequences])
    expected = 0.0
    for sequence in sequences:
        for expert in range(6):
            often = 6 / (2 * len(sequence)) * sum(expert in indices[token].tolist() for token in sequence)
            expected += often * sum(scores[token, expert].item() for token in sequence) / len(sequence)
    assert balance_loss(scores, chosen, members).item() == pytest.approx(expected, abs=1e-12)
    even = torch.full((6, 6), 1 / 6)
    assert balance_loss(even, torch.eye(6) + torch.eye(6).roll(1, 0), torch.ones(1, 6)).item() == pytest.approx(1.0)


def test_a_probability_of_zero_is_one_and_no_logit():
    """An expert that no token can reach: two of three share all tokens evenly, each with a half of every token."""
    scores = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    chosen = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert balance_loss(scores, chosen, torch.ones(1, 2)).item() == pytest.approx(3 * (0.5 * 0.5 + 0.5 * 0.5))


@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral"])
def test_routers_add_the_gradient_of_the_balance_loss(family):
    """Against the same loss, written out, of a model that nothing is attached to."""
    model = make_model(family)
    other, spread = copy.deepcopy(model), []
    members = torch.zeros(2, 23)
    members[0, :9], members[1, 9:] = 1, 1

    def tell(router, given, result):
        scores = linear(given[0].reshape(23, -1), router.weight).float().softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
        spread.append(balance_loss(scores, chosen, members))

    for router in find_routers(other):
        router.register_forward_hook(tell)
    routers = Routers(find_routers(model))
    routers.balance = Balance(members, 30.0, lambda rows: rows)
    model(TOKENS).logits.square().mean().backward()
    (other(TOKENS).logits.square().mean() + 30.0 * sum(spread)).backward()
    for (name, own), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if theirs.grad is not None:
            assert torch.allclose(own.grad, theirs.grad, rtol=1e-4, atol=1e-5 * float(theirs.grad.abs().max())), name


def test_a_router_that_balances_by_a_bias_is_not_told_to():
    routers = Routers(find_routers(model := make_model("glm4 moe")))
    routers.balance = Balance(torch.ones(1, 23), 1.0, lambda rows: rows)
    with pytest.raises(UnsupportedError, match="by a bias of its own"):
        model(TOKENS)
