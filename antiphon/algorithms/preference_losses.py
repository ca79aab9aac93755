"""Losses of pairs of responses to one prompt, of which one was preferred.

Pure functions of one number a response, one value a pair. The learner takes the mean over the pairs of an update.
"""

import torch
from torch.nn.functional import logsigmoid


def dpo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """-(1 - s) log σ(β d) - s log σ(-β d) of each pair [P], with d = chosen - rejected.

    `chosen` and `rejected` [P] are log π - log π_reference, summed over the tokens of the response; β times that is the reward
    that the policy stands for. `label_smoothing` s is the share of labels that are taken to be the wrong way round.

    Source: Rafailov et al. 2023, "Direct preference optimization", eq. 7; smoothed as in Mitchell 2023, "A note on DPO with
    noisy preferences" (cDPO).

    >>> chosen, rejected = torch.tensor([0.0, 3.0, -1.0]), torch.tensor([0.0, 1.0, 1.0])
    >>> dpo(chosen, rejected, beta=0.5)  # log 2, log(1 + 1/e), log(1 + e)
    tensor([0.6931, 0.3133, 1.3133])
    >>> dpo(chosen, rejected, beta=0.5, label_smoothing=0.1)  # the second: 0.9 · 0.3133 + 0.1 · 1.3133
    tensor([0.6931, 0.4133, 1.2133])
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """(d - 1 / 2β)² of each pair [P], with d = chosen - rejected: a margin to reach, and not to pass.

    `chosen` and `rejected` [P] are means over the tokens of the response here, as in TRL, so that the margin does not depend on
    its length; the paper has sums.

    Source: Azar et al. 2023, "A general theoretical paradigm to understand learning from human preferences", eq. 17, τ is β.

    >>> ipo(torch.tensor([0.0, 4.0, 6.0]), torch.tensor([0.0, -1.0, 0.0]), beta=0.1)  # the margin is 5
    tensor([25.,  0.,  1.])
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """-log σ(chosen - rejected) of each pair [P], from the scores of a reward model.

    Source: Bradley and Terry 1952, "Rank analysis of incomplete block designs"; Ouyang et al. 2022, "Training language models
    to follow instructions with human feedback", eq. 1.

    >>> bradley_terry(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))  # log 2, log(1 + 1/e)
    tensor([0.6931, 0.3133])
    """
    return -logsigmoid(chosen - rejected)
