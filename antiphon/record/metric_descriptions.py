"""The meaning of every metric that Antiphon records, for the reference and for tests that no metric is without one.

`<…>` in a name stands for a name of the user's: a task, a part of its score, a measure of an environment. A loss, advantage or
stage of the user's adds metrics of its own, which are not listed.
"""

import re
from collections.abc import Iterable, Mapping

METRICS: Mapping[str, str] = {
    "step/seconds": "Duration of the step: from the wait for its groups to its published version.",
    "step/wait_groups_share": "Share of the step in which the learner waited for groups. High: generation is the bottleneck.",
    "step/wait_commit_share": "Share of the step in which the learner waited until its groups were on disk.",
    "tokens/per_second": "Sampled tokens of the step's attempts, per second of the step.",
    "tokens/requeued": "Tokens that were kept when their request went from a dead or slow engine to another, since the start.",
    "weights/megabytes": "Megabytes of the published version that go to an engine which has the version before.",
    "engines/live": "Engines that take requests.",
    "attempts/dispatched": "Attempts started in this lineage.",
    "groups/live": "Groups that were admitted and whose slots are not released.",
    "groups/filtered": "Groups that `rollout.filter`, `mean_range` or what scores them rejected since the step before.",
    "groups/failed": "Groups that failed since the step before.",
    "groups/stale": "Groups that became too old since the step before.",
    "age/mean": "Mean age of the step's attempts, in versions.",
    "age/max": "Greatest age of the step's attempts, in versions.",
    "age/<age>": "Share of the step's attempts that have this age.",
    "length/mean": "Mean number of sampled tokens of an attempt.",
    "length/max": "Greatest number of sampled tokens of an attempt.",
    "length/truncated": "Share of attempts that ended at a limit of tokens or turns.",
    "reward/mean": "Mean score of the step's attempts, as the graders gave it.",
    "reward/task/<task>": "Mean score of a task, if the step has several.",
    "reward/part/<task>/<part>": "Mean of a part of the scores of a task.",
    "reward/shaped": "Mean reward after normalization, clipping and the KL penalty.",
    "reward/kl": "Mean KL penalty of a sampled token, if `algorithm.kl` is placed in the reward.",
    "reward/kl_coefficient": "Coefficient of that penalty, which an adaptive one changes.",
    "reward/ungraded": "Share of finished attempts of all tasks whose grader gave no verdict, in a moving window.",
    "reward/alarms": "Signals of reward hacking that are above their thresholds now.",
    "share/<task>": "Share of a task among the step's attempts, if there are several.",
    "judge/requests": "Requests to judges behind an address since the run began, including repeated ones.",
    "judge/retries": "Requests among them that were sent again.",
    "judge/cached": "Questions to these judges that were not sent, because an equal one had been.",
    "judge/tokens": "Tokens of the judges' questions and replies, as their servers count them.",
    "judge/cost": "Cost of these tokens, by `input_price` and `output_price` of the judges.",
    "judge/uncounted": "Replies of judges that did not say how many tokens they took: they are not in the cost.",
    "role/<role>/seconds": "Sum of the seconds that the calls of a role of your own took in the step.",
    "weight/masked": "Share of trajectories with weight 0 in the loss (`algorithm.weight`).",
    "watch/<task>/ungraded": "Share of attempts of a task whose grader gave no verdict, in a moving window.",
    "watch/<task>/constant": "Share of groups whose scores are all equal.",
    "watch/<task>/length": "Correlation of score and length within a group.",
    "watch/<task>/repetition": "Correlation of score and repetition within a group.",
    "watch/<task>/duplicates": "Share of responses that equal an earlier sibling.",
    "watch/<task>/out_of_range": "Share of responses scored outside `reward_range`.",
    "watch/<task>/<flag>": "Share of well-paid responses with this flag of reward hacking.",
    "bias/length": "Mean length of trained attempts, relative to that of all that came to their end, minus 1.",
    "bias/score": "Mean score of trained attempts, relative to that of all that came to their end, minus 1.",
    "bias/seconds": "Mean duration of trained attempts, relative to that of dropped ones, minus 1.",
    "bias/prompts_never_trained": "Share of prompts that were tried and never trained on.",
    "bias/task/<task>": "Share of a task among trained attempts, relative to that among dispatched ones, minus 1.",
    "drops/<status>": "Attempts that ended with this status since the run began or was last resumed.",
    "learner/loss": "Loss of an update, with KL and entropy terms; a mean over the updates of the step.",
    "learner/grad_norm": "Norm of the gradient before it is clipped; a mean over the updates of the step.",
    "learner/lr": "Learning rate of the last update.",
    "learner/tokens": "Tokens in the loss.",
    "learner/seconds": "Seconds that the updates took.",
    "learner/skipped_updates": "Updates that were not applied because their gradient was not finite.",
    "learner/entropy": "Mean entropy of the policy at the loss tokens, in nats.",
    "learner/mismatch_kl": "Estimated KL divergence between sampling engine and learner, per token, in nats.",
    "learner/mixed_share": "Share of loss tokens that were sampled from a KV cache of several versions.",
    "learner/mixed_mismatch_kl": "`learner/mismatch_kl` over these tokens alone.",
    "learner/clip_fraction": "Share of loss tokens whose ratio the loss clips.",
    "learner/reference_kl": "Estimated KL divergence from the reference model, per token, in nats.",
    "learner/correction_weight": "Mean weight of `algorithm.correction`.",
    "learner/correction_kept": "Share of loss tokens that the filter of `algorithm.correction` keeps.",
    "learner/expert_balance": "Load-balancing loss of a mixture of experts.",
    "learner/accuracy": "Offline: share of pairs ranked as in the data; in distillation, of tokens that both models prefer.",
    "learner/margin": "Offline: mean reward of the chosen response minus that of the rejected one.",
    "learner/reward_chosen": "Offline: mean reward of chosen responses.",
    "learner/reward_rejected": "Offline: mean reward of rejected responses.",
    "learner/divergence": "Distillation: mean divergence from the teacher, per token, in nats.",
    "learner/likelihood_loss": "Distillation: mean negative log-likelihood of the data, per token, in nats.",
    "critic/<critic>/loss": "Loss of a critic.",
    "critic/<critic>/grad_norm": "Norm of a critic's gradient before it is clipped.",
    "critic/<critic>/lr": "Learning rate of a critic's last update.",
    "critic/<critic>/tokens": "Tokens in a critic's loss.",
    "critic/<critic>/seconds": "Seconds that a critic's updates took.",
    "critic/<critic>/skipped_updates": "Updates of a critic that were not applied because their gradient was not finite.",
    "critic/<critic>/value": "Mean value that a critic gives to the states of loss tokens.",
    "critic/<critic>/return": "Mean return that a critic learns.",
    "critic/<critic>/squared_error": "Mean squared error of a critic's values.",
    "critic/spread": "Mean standard deviation of the critics' values of a token.",
    "sft/<metric>": "The learner's metrics in supervised fine-tuning.",
    "sft/accuracy": "Accuracy of sampled responses to the validation prompts.",
    "evaluation/accuracy": "Share of the samples of the test prompts that are a success, of tasks that are trained on.",
    "evaluation/accuracy/<task>": "Share of the samples of a task's test prompts that are a success.",
    "evaluation/accuracy/<task>/low": "Lower end of the 95 % interval of this accuracy.",
    "evaluation/accuracy/<task>/high": "Upper end of the 95 % interval of this accuracy.",
    "evaluation/difficulty/<difficulty>": "Accuracy on the test prompts of which the model before training solved less than a "
    "third of the samples (hard), more than two thirds (easy), or a share in between (medium).",
    "evaluation/first_version": "Policy version at the begin of the evaluation: no token of it is older.",
    "evaluation/last_version": "Newest policy version that sampled a token of the evaluation.",
    "evaluation/wait_seconds": "Seconds that training waited for the evaluation.",
    "evaluation/<task>/score": "Mean score of a task's test prompts.",
    "evaluation/<task>/<part>": "Mean of a part of these scores.",
    "evaluation/<measure>": "Offline: the learner's metric of this name over the test data.",
}


def _compile(name: str) -> re.Pattern[str]:
    """Compile a name; parts of scores may hold slashes, other names may not."""
    parts = re.split(r"(<\w+>)", name)
    return re.compile(
        "".join({"<part>": ".+"}.get(part, r"[^/]+") if "<" in part else re.escape(part) for part in parts)
    )


_PATTERNS = {name: _compile(name) for name in METRICS}


def find_undescribed(names: Iterable[str]) -> list[str]:
    """Return the metrics that have no description."""
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in _PATTERNS.values())]


def describe_metric(name: str) -> str:
    """Return the description of a metric; empty if it has none."""
    return next((METRICS[known] for known, pattern in _PATTERNS.items() if pattern.fullmatch(name)), "")
