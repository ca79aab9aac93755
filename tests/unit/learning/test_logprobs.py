"""Chunked log-probs and entropies against torch's own, values and derivatives."""

import pytest
import torch

from antiphon.learning.model.logprobs import token_logprobs


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (11,), generator=generator)
    temperatures = torch.rand(11, generator=generator, dtype=torch.float64) + 0.5
    return hidden, weight, targets, temperatures


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_values_are_those_of_log_softmax(inputs, chunk):
    hidden, weight, targets, temperatures = inputs
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures, chunk)
    whole = torch.log_softmax(hidden @ weight.T / temperatures[:, None], -1)
    torch.testing.assert_close(logprobs, whole[torch.arange(11), targets])
    torch.testing.assert_close(entropies, -(whole.exp() * whole).sum(-1))


@pytest.mark.parametrize("chunk", [4, 100])
def test_derivatives_are_right(inputs, chunk):
    hidden, weight, targets, temperatures = inputs
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, temperatures, chunk), (hidden, weight))


@pytest.fixture
def support(inputs):
    """Of 1 to 6 tokens, that which was sampled among them; the last two tokens have the whole vocabulary."""
    generator = torch.Generator().manual_seed(2)
    others = torch.stack([torch.randperm(13, generator=generator)[:6] for _ in range(11)]) + 1
    found = others * (torch.arange(6) < torch.arange(11)[:, None] % 6 + 1)
    found[:, 0] = inputs[2] + 1
    found[-2:] = 0
    return found.int()


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_support_is_all_that_could_be_sampled(inputs, support, chunk):
    hidden, weight, targets, temperatures = inputs
    found = token_logprobs(hidden, weight, targets, temperatures, chunk, None, support)
    logits, wanted = hidden @ weight.T / temperatures[:, None], []
    for row, tokens, target in zip(logits, support.tolist(), targets.tolist(), strict=True):
        kept = sorted({token - 1 for token in tokens if token}) or [*range(13)]
        own = row[kept].log_softmax(-1)
        wanted.append((own[kept.index(target)], -(own.exp() * own).sum()))
    wanted = [torch.stack(column) for column in zip(*wanted, strict=True)]
    torch.testing.assert_close([*found], wanted)
    ours, theirs = (torch.autograd.grad((p.sin() - 0.3 * e).sum(), (hidden, weight)) for p, e in (found, wanted))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [4, 100])
def test_under_autocast_products_alone_are_rounded(inputs, chunk):
    hidden, weight = (tensor.detach().float().requires_grad_() for tensor in inputs[:2])
    targets, temperatures = inputs[2], inputs[3].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_logprobs(hidden, weight, targets, temperatures, chunk)
    whole = ((hidden.bfloat16() @ weight.bfloat16().T).float() / temperatures[:, None]).log_softmax(-1)
    wanted = whole[torch.arange(11), targets], -(whole.exp() * whole).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad((p - 0.3 * e).sum(), (hidden, weight)) for p, e in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)
