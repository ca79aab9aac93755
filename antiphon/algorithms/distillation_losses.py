"""Divergences between the next-token distributions of a teacher p and a student q.

Pure functions of log-probs, one value a token. Both are whole distributions over K outcomes: all of the vocabulary, or the
teacher's likeliest tokens and one outcome for all others together, see `grouped`. Grouping can only lower a divergence.

Temperatures are those of the log-probs; no loss is multiplied with their square.
"""

import math
from collections.abc import Callable, Mapping

import torch

HEAD_MASS = 0.5  # of the teacher's likeliest tokens, in `adaptive_kl`
# Of teacher [N, K], student [N, K] and skew.
Divergence = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def forward_kl(teacher: torch.Tensor, student: torch.Tensor, skew: float = 0.0) -> torch.Tensor:
    """KL(p ‖ q) of each token [N]: the student is to cover all that the teacher may say.

    Source: Hinton et al. 2015, "Distilling the knowledge in a neural network".

    >>> teacher, student = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> forward_kl(teacher, student)  # 0.5 log 2 + 0.5 log 2/3
    tensor([0.1438])
    """
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(teacher: torch.Tensor, student: torch.Tensor, skew: float = 0.0) -> torch.Tensor:
    """KL(q ‖ p) of each token [N]: the student is to say nothing that the teacher would not.

    Source: Gu et al. 2024, "MiniLLM", here without sampling.

    >>> teacher, student = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> reverse_kl(teacher, student)  # 0.25 log 0.5 + 0.75 log 1.5
    tensor([0.1308])
    """
    return forward_kl(student, teacher)


def jensen_shannon(teacher: torch.Tensor, student: torch.Tensor, skew: float = 0.0) -> torch.Tensor:
    """KL(p ‖ m) / 2 + KL(q ‖ m) / 2 of each token [N], m = (p + q) / 2: at most log 2.

    Source: Lin 1991, "Divergence measures based on the Shannon entropy".

    >>> teacher, student = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> jensen_shannon(teacher, student)  # m is 0.375, 0.625
    tensor([0.0338])
    """
    middle = _mixed(teacher, student, 0.5)
    return (forward_kl(teacher, middle) + forward_kl(student, middle)) / 2


def adaptive_kl(teacher: torch.Tensor, student: torch.Tensor, skew: float = 0.0) -> torch.Tensor:
    """KL(p ‖ q) h + KL(q ‖ p) (1 - h) of each token [N]; h is the share of Σ |p - q| that the head of the teacher has.

    The head are its likeliest tokens as long as they have at most half of the mass together, and always the first. Forward KL
    brings the head together sooner, reverse KL the tail. h is a constant to the gradient.

    Source: Wu et al. 2024, "Rethinking Kullback-Leibler divergence in knowledge distillation for large language models".

    >>> teacher, student = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> adaptive_kl(teacher, student)  # both parts are 0.25 apart
    tensor([0.1373])
    """
    with torch.no_grad():
        ranked, order = teacher.exp().sort(dim=-1, descending=True, stable=True)
        apart = (ranked - student.exp().gather(-1, order)).abs()
        head = ranked.cumsum(-1) <= HEAD_MASS
        head[:, 0] = True
        share = (apart * head).sum(-1) / apart.sum(-1).clamp(min=1e-30)
    return share * forward_kl(teacher, student) + (1 - share) * reverse_kl(teacher, student)


def total_variation(teacher: torch.Tensor, student: torch.Tensor, skew: float = 0.0) -> torch.Tensor:
    """Σ |p - q| / 2 of each token [N]: at most 1.

    Source: Wen et al. 2023, "f-divergence minimization for sequence-level knowledge distillation".

    >>> total_variation(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log())
    tensor([0.2500])
    """
    return (teacher.exp() - student.exp()).abs().sum(-1) / 2


def skewed_forward_kl(teacher: torch.Tensor, student: torch.Tensor, skew: float) -> torch.Tensor:
    """KL(p ‖ s p + (1 - s) q) of each token [N] with s = `skew`: at most -log s, whatever the student rules out.

    Source: Ko et al. 2024, "DistiLLM", section 3.1.

    >>> teacher, student = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> skewed_forward_kl(teacher, student, 0.5)  # 0.5 log(0.5 / 0.375) + 0.5 log(0.5 / 0.625)
    tensor([0.0323])
    """
    return forward_kl(teacher, _mixed(teacher, student, skew))


def skewed_reverse_kl(teacher: torch.Tensor, student: torch.Tensor, skew: float) -> torch.Tensor:
    """KL(q ‖ s q + (1 - s) p) of each token [N] with s = `skew`: at most -log s, whatever the teacher rules out.

    Source: Ko et al. 2024, "DistiLLM", section 3.1.

    >>> teacher, student = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> skewed_reverse_kl(teacher, student, 0.5)  # 0.25 log(0.25 / 0.375) + 0.75 log(0.75 / 0.625)
    tensor([0.0354])
    """
    return skewed_forward_kl(student, teacher, skew)


DIVERGENCES: Mapping[str, Divergence] = {
    function.__name__: function
    for function in (
        forward_kl,
        reverse_kl,
        jensen_shannon,
        adaptive_kl,
        total_variation,
        skewed_forward_kl,
        skewed_reverse_kl,
    )
}


def group_outcomes(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs [N, k + 1] of the tokens [N, k], and of all others of the vocabulary together, from those of all [N, V], V > k.

    >>> group_outcomes(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0]])).exp()
    tensor([[0.5000, 0.5000]])
    """
    others = logprobs.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, tokens), others], dim=-1)


def _mixed(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """Log-probs of `share` of the first distribution and the rest of the second, [N, K]."""
    return torch.logaddexp(first + math.log(share), second + math.log1p(-share))
