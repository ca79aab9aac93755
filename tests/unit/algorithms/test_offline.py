"""Losses of pairs, and divergences from a teacher, against formulas written out independently, in plain Python."""

import doctest
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.algorithms import distillation_losses as distillation
from antiphon.algorithms import preference_losses as preference
from antiphon.algorithms.distillation_losses import DIVERGENCES, group_outcomes
from antiphon.algorithms.preference_losses import bradley_terry, dpo, ipo

numbers = st.floats(-15, 15)
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6)
betas = st.floats(0.01, 2)
smoothings = st.floats(0, 0.49)
skews = st.floats(0.01, 0.99)
shapes = st.tuples(st.integers(1, 4), st.integers(2, 7), st.integers(0, 2**16))


def columns(rows):
    return (torch.tensor(column, dtype=torch.float64, requires_grad=True) for column in zip(*rows, strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@given(pairs, betas, smoothings)
def test_dpo(rows, beta, smoothing):
    chosen, rejected = columns(rows)
    want = [
        -(1 - smoothing) * math.log(sigmoid(beta * (c - r))) - smoothing * math.log(1 - sigmoid(beta * (c - r)))
        if abs(beta * (c - r)) < 20
        else None
        for c, r in rows
    ]
    for got, expected in zip(dpo(chosen, rejected, beta, smoothing).tolist(), want, strict=True):
        assert expected is None or got == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert torch.autograd.gradcheck(lambda c, r: dpo(c, r, beta, smoothing), (chosen, rejected))


@given(pairs, betas)
def test_ipo_and_bradley_terry(rows, beta):
    chosen, rejected = columns(rows)
    assert ipo(chosen, rejected, beta).tolist() == pytest.approx([(c - r - 0.5 / beta) ** 2 for c, r in rows])
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx([math.log1p(math.exp(r - c)) for c, r in rows])
    for loss in (lambda c, r: ipo(c, r, beta), bradley_terry):
        assert torch.autograd.gradcheck(loss, (chosen, rejected))


@given(st.floats(-1e6, 1e6), smoothings)
def test_no_difference_is_too_large(difference, smoothing):
    for loss in (lambda c, r: dpo(c, r, 1.0, smoothing), lambda c, r: ipo(c, r, 1.0), bradley_terry):
        chosen, rejected = columns([(difference, 0.0)])
        value = loss(chosen, rejected).sum()
        value.backward()
        assert math.isfinite(value.item()) and math.isfinite(chosen.grad.item()) and chosen.grad == -rejected.grad


def test_coin_flip_labels_teach_nothing():
    chosen, rejected = columns([(1.0, -1.0)])
    smoothing = sigmoid(-2.0)  # the policy says so already
    dpo(chosen, rejected, 1.0, smoothing).sum().backward()
    assert chosen.grad.item() == pytest.approx(0, abs=1e-12)


# --- divergences ---------------------------------------------------------------------------------------------------------


def distributions(shape, spread=3.0):
    """Log-probs of a teacher and a student."""
    n, k, seed = shape
    drawn = torch.from_numpy(np.random.default_rng(seed).normal(0, spread, (2, n, k)))
    return drawn.log_softmax(-1)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def mixed(p, q, share):
    return [share * a + (1 - share) * b for a, b in zip(p, q, strict=True)]


def adaptive(p, q):
    """By hand: the likeliest tokens of p that have at most half of the mass are the head."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    held, gaps = 0.0, {"head": 0.0, "tail": 0.0}
    for place, i in enumerate(order):
        held += p[i]
        gaps["head" if held <= 0.5 or not place else "tail"] += abs(p[i] - q[i])
    share = gaps["head"] / (gaps["head"] + gaps["tail"]) if any(gaps.values()) else 0.0
    return share * kl(p, q) + (1 - share) * kl(q, p)


WRITTEN_OUT = {
    "adaptive_kl": lambda p, q, s: adaptive(p, q),
    "forward_kl": lambda p, q, s: kl(p, q),
    "reverse_kl": lambda p, q, s: kl(q, p),
    "jensen_shannon": lambda p, q, s: (kl(p, mixed(p, q, 0.5)) + kl(q, mixed(p, q, 0.5))) / 2,
    "total_variation": lambda p, q, s: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    "skewed_forward_kl": lambda p, q, s: kl(p, mixed(p, q, s)),
    "skewed_reverse_kl": lambda p, q, s: kl(q, mixed(q, p, s)),
}
MOST = {
    "jensen_shannon": lambda s: math.log(2),
    "total_variation": lambda s: 1.0,
    "skewed_forward_kl": lambda s: -math.log(s),
    "skewed_reverse_kl": lambda s: -math.log(s),
}


FIXED = [name for name in DIVERGENCES if name != "adaptive_kl"]  # whose mixture does not depend on the distributions


@pytest.mark.parametrize("name", DIVERGENCES)
@given(shape=shapes, skew=skews)
def test_divergence(name, shape, skew):
    teacher, student = distributions(shape)
    found = DIVERGENCES[name](teacher, student, skew)
    rows = zip(teacher.exp().tolist(), student.exp().tolist(), strict=True)
    assert found.tolist() == pytest.approx([WRITTEN_OUT[name](p, q, skew) for p, q in rows], rel=1e-6, abs=1e-9)
    assert (found >= -1e-12).all() and (found <= MOST.get(name, lambda _: math.inf)(skew) + 1e-12).all()
    assert DIVERGENCES[name](teacher, teacher, skew).tolist() == pytest.approx([0] * len(teacher), abs=1e-12)


@pytest.mark.parametrize("name", FIXED)
@given(shape=shapes, skew=skews)
def test_its_gradient(name, shape, skew):
    teacher, student = distributions(shape, spread=1.0)
    logits = student.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: DIVERGENCES[name](teacher, x.log_softmax(-1), skew), logits)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_what_one_model_rules_out_is_finite(name):
    certain = torch.tensor([[0.0, -1e4, -1e4], [-1e4, 0.0, -1e4]])
    other = certain.flip(0).requires_grad_()
    found = DIVERGENCES[name](certain, other, 0.1)
    found.sum().backward()
    assert torch.isfinite(found).all() and torch.isfinite(other.grad).all()


@given(shape=shapes)
def test_the_mixture_of_adaptive_kl_has_no_gradient(shape):
    teacher, student = distributions(shape, spread=1.0)
    logits = student.clone().requires_grad_()
    found = DIVERGENCES["adaptive_kl"](teacher, logits.log_softmax(-1), 0.1)
    (ours,) = torch.autograd.grad(found.sum(), logits)
    both = [DIVERGENCES[name](teacher, logits.log_softmax(-1), 0.1) for name in ("forward_kl", "reverse_kl")]
    forward, reverse = (torch.autograd.grad(each.sum(), logits)[0] for each in both)
    with torch.no_grad():
        apart = both[0] - both[1]
        share = torch.where(apart.abs() > 1e-6, (found - both[1]) / apart, 0.5)[:, None]
    torch.testing.assert_close(ours, share * forward + (1 - share) * reverse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FIXED)
@given(shape=shapes, skew=skews, some=st.integers(1, 6))
def test_grouping_loses_and_never_adds(name, shape, skew, some):
    teacher, student = distributions(shape)
    tokens = teacher.topk(min(some, teacher.shape[1] - 1)).indices
    fewer = [group_outcomes(logprobs, tokens) for logprobs in (teacher, student)]
    for logprobs in fewer:
        assert logprobs.exp().sum(-1).tolist() == pytest.approx([1.0] * len(teacher))
    whole, part = DIVERGENCES[name](teacher, student, skew), DIVERGENCES[name](*fewer, skew)
    assert (part <= whole + 1e-9).all()
    if tokens.shape[1] == teacher.shape[1] - 1:  # the others are one
        assert part.tolist() == pytest.approx(whole.tolist(), abs=1e-9)


def test_the_gradient_of_a_group():
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    tokens = logits.topk(2).indices
    assert torch.autograd.gradcheck(lambda x: group_outcomes(x.log_softmax(-1), tokens), logits)


@pytest.mark.parametrize("module", [preference, distillation])
def test_examples_in_docstrings(module):
    torch.set_printoptions(precision=4)
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
