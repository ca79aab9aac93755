"""`check_loss` lets every right loss pass and says of each wrong one what is wrong with it."""

import re
from itertools import count

import pytest
import torch

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import loss
from antiphon.algorithms.recipes import RECIPES
from antiphon.algorithms.registry import LOSSES
from antiphon.algorithms.testing import check_loss
from antiphon.algorithms.token_loss import token_loss
from antiphon.core.types import PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, StreamSpec

FLAGS, TEACHER = StreamSpec("flags", "bool"), StreamSpec("teacher", "float32", (2,))


@pytest.mark.parametrize("name", sorted(LOSSES.known))
def test_the_built_in_losses(name):
    check_loss(LOSSES.resolve(name))


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_what_a_recipe_comes_to(recipe):
    """... with all terms around the loss."""
    config = AlgorithmConfig.model_validate({"recipe": recipe, "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01})
    chosen = LOSSES.resolve(config.loss)
    check_loss(
        lambda inputs, config: token_loss(chosen, inputs, config),
        config,
        streams=(REFERENCE_LOGPROBS, PROXIMAL_LOGPROBS),
        seeds=(7,),
    )


def plain(inputs, config):
    return -inputs.advantages * inputs.logprobs, {}


def distilled(inputs, config):
    """Reads streams of its own, one of them a row a token."""
    assert inputs.streams[FLAGS].dtype == torch.bool and inputs.streams[TEACHER].shape == (*inputs.logprobs.shape, 2)
    nearest = inputs.streams[TEACHER].amax(-1)
    return torch.where(inputs.streams[FLAGS], (inputs.logprobs - nearest).square(), -inputs.logprobs), {}


def test_own_streams_have_numbers_of_both_signs():
    seen = []

    def reads(inputs, config):
        seen.append(inputs.streams[TEACHER])
        return plain(inputs, config)

    check_loss(reads, streams=(TEACHER,))
    whole = torch.cat([each.flatten() for each in seen])
    assert whole.min() < -1 and whole.max() > 1


class Doubled(torch.autograd.Function):
    """With a right backward pass."""

    slope = 2

    @staticmethod
    def forward(ctx, values):
        return 2 * values

    @classmethod
    def backward(cls, ctx, gradient):
        return cls.slope * gradient


class Slipped(Doubled):
    slope = 3


def stopped(how):
    """A loss whose weight is out of the graph."""

    def loss(inputs, config):
        weight = how((inputs.logprobs - inputs.old_logprobs).clamp(-5, 5).exp())
        return -weight * inputs.advantages * inputs.logprobs, {"weight": weight.expand(len(inputs.logprobs))}

    return loss


@torch.no_grad()
def halved(ratio):
    return ratio.clone().mul_(0.5)


def straight_through(inputs, config):
    rounded = inputs.logprobs.round()
    return -inputs.advantages * (inputs.logprobs + (rounded - inputs.logprobs).detach()), {}


def branching(inputs, config):
    weight = (inputs.logprobs > inputs.old_logprobs).to(inputs.logprobs.dtype) + 0.5
    return -weight * inputs.advantages * Doubled.apply(inputs.logprobs), {"above": weight > 1}


@pytest.mark.parametrize(
    "loss",
    [plain, stopped(torch.detach), stopped(halved), stopped(lambda ratio: ratio.data), straight_through, branching],
)
def test_stopped_gradients_and_branches_are_no_mistakes(loss):
    check_loss(loss)


def test_streams():
    check_loss(distilled, streams=(FLAGS, TEACHER))


calls = count()


def in_place(tensor):
    return lambda inputs, config: (tensor(inputs).clamp_(-1, 1) * inputs.logprobs, {})


def metric(value):
    return lambda inputs, config: (-inputs.logprobs, {"mine": value(inputs)})


def leaking(inputs, config):
    """Its values are right, its gradients reach over to the other sequences."""
    mean = inputs.logprobs.mean()
    return -inputs.logprobs + mean - mean.detach(), {}


WRONG = {
    "a number": (
        lambda i, c: (i.logprobs.mean(), {}),
        r"shape: values are torch.float32 \(\), expected torch.float32 \(12,\)",
    ),
    "values alone": (lambda i, c: -i.logprobs, "shape: returned tensor"),
    "another shape": (lambda i, c: (i.logprobs[None], {}), r"shape: .* \(1, 12\)"),
    "another precision": (lambda i, c: (i.logprobs.float(), {}), r"shape: .*float32 \(19,\), expected torch.float64"),
    "a list": (lambda i, c: ([0.0], {}), r"shape: values are \[0.0\]"),
    "a constant": (lambda i, c: (i.advantages * i.old_logprobs, {}), "shape: values are not differentiable"),
    "NaN without a ratio": (
        lambda i, c: ((r := (i.logprobs - i.old_logprobs).exp()) * r.log(), {}),
        "finite: values: nan where the log-prob is -1000, sampled with -0.001, the advantage -1",
    ),
    "a slope of NaN where another branch is taken": (
        lambda i, c: (torch.where(i.logprobs < i.old_logprobs, i.logprobs, (i.logprobs - i.old_logprobs).sqrt()), {}),
        "finite: gradients of logprobs: nan where the log-prob is -1000, sampled with -0.001",
    ),
    "an infinite ratio": (
        lambda i, c: (-(i.logprobs - i.old_logprobs).exp() * i.advantages, {}),
        "finite: values: inf where the log-prob is -0.001, sampled with -1000, the advantage -1",
    ),
    "advantages changed": (in_place(lambda i: i.advantages), "inputs: advantages were"),
    "log-probs changed": (lambda i, c: (i.logprobs.clamp_(min=-1), {}), "inputs: logprobs were"),
    "a stream changed": (in_place(lambda i: i.streams[REFERENCE_LOGPROBS]), r"inputs: streams\['reference_logprobs'\]"),
    "another at each call": (
        lambda i, c: (-i.logprobs * next(calls), {}),
        "repeatable: a second call has other values",
    ),
    "order": (
        lambda i, c: (i.logprobs.cumsum(0), {}),
        r"order: another order of the sequences has other values \(seed 0\)",
    ),
    "a mean over the pack": (
        lambda i, c: (-i.logprobs / len(i.logprobs), {}),
        r"micro-batches: a sequence alone in its pack has other values \(seed 0\): token 0: .*, expected ",
    ),
    "a mean taken off": (lambda i, c: (i.logprobs.mean() - i.logprobs, {}), "micro-batches: .* other values"),
    "a gradient of others": (leaking, "micro-batches: .* other gradients of logprobs"),
    "a metric of the pack": (
        metric(lambda i: i.logprobs.mean().expand(len(i.logprobs))),
        "micro-batches: .* other metric 'mine'",
    ),
    "a metric for all": (metric(lambda i: i.logprobs.mean()), r"metrics: 'mine' is \(\), expected \(12,\)"),
    "a metric of Python's": (metric(lambda i: 1.0), "metrics: 'mine' is 1.0"),
    "a metric of NaN": (metric(lambda i: i.logprobs.sqrt()), "metrics: 'mine': nan where the log-prob is -1000"),
    "a name that is none": (lambda i, c: (-i.logprobs, {0: i.logprobs}), "metrics: 0 is no string"),
    "metrics that come and go": (
        lambda i, c: (-i.logprobs, {"many": i.logprobs} if len(i.logprobs) == 19 else {}),
        "metrics: other names",
    ),
    "a slip in a backward pass": (
        lambda i, c: (Slipped.apply(i.logprobs), {}),
        r"gradient: not that of small steps in logprobs \(seed 0\): token \d+: 3, expected 2",
    ),
    "a slip in the entropy's": (
        lambda i, c: (Slipped.apply(i.entropies) - i.logprobs, {}),
        "gradient: not that of small steps in entropies",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name):
    loss, message = WRONG[name]
    with pytest.raises(AssertionError, match="^" + message):
        check_loss(loss, streams=(REFERENCE_LOGPROBS,))


def test_a_seed_is_named_and_can_be_chosen():
    with pytest.raises(AssertionError, match=re.escape("(seed 11)")):
        check_loss(WRONG["order"][0], seeds=(11,))


def test_a_false_declaration_is_found():
    @loss(zero_at_zero_advantage=True)
    def likelihood(inputs, config):
        return -inputs.logprobs, {}

    with pytest.raises(AssertionError) as refused:
        check_loss(likelihood)
    assert str(refused.value).startswith("declared: zero_at_zero_advantage")


def test_declared_streams_are_drawn():
    @loss(needs=[REFERENCE_LOGPROBS])
    def near_the_reference(inputs, config):
        return (inputs.logprobs - inputs.streams[REFERENCE_LOGPROBS]).square(), {}

    check_loss(near_the_reference, seeds=(0,))
