"""The curated charts of a run: what each shows, what is worrying, and what to try."""

from collections.abc import Collection
from dataclasses import dataclass

from antiphon.dashboard.curves import MetricTable
from antiphon.record.metric_descriptions import describe_metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart.

    Attributes:
        id: Its name in addresses.
        title: Its title.
        metrics: Metrics that it draws; `*` stands for one part of a name.
        shows: One sentence on what it shows.
        worry: One sentence on what is worrying.
        remedy: One sentence on what to try.
        form: How values are written: number, percent, or small (scientific where needed).
        least: Lower end of the axis, if it is fixed.
        absent: What makes a run record it.
        above: A last value above this is worrying.
        below: A last value below this is worrying.
        kinds: Kinds of runs that have it, see `cards.KINDS`; empty for all.
    """

    id: str
    title: str
    metrics: tuple[str, ...]
    shows: str
    worry: str = ""
    remedy: str = ""
    form: str = "number"
    least: float | None = None
    absent: str = ""
    above: float | None = None
    below: float | None = None
    kinds: tuple[str, ...] = ()

    def is_worrying(self, table: MetricTable) -> bool:
        """Return True if the last value of the first metric is out of its bounds."""
        names = table.match(self.metrics[0])
        values = [value for name in names if (value := table.last(name)) is not None]
        return any(
            (self.above is not None and value > self.above) or (self.below is not None and value < self.below)
            for value in values
        )


ONLINE_CHARTS = (
    Chart(
        id="reward",
        title="Reward",
        metrics=("reward/mean",),
        shows="Mean score of the attempts of each step, as the graders gave it.",
        worry="It falls for many steps, or stands still from the start.",
        remedy="Look at the rollouts of a step before and after the fall; a flat start often means equal scores in each group.",
    ),
    Chart(
        id="accuracy",
        title="Accuracy on test prompts",
        metrics=("evaluation/accuracy", "evaluation/accuracy/*"),
        kinds=("rl",),
        shows="Share of the samples of the test prompts that are a success (a score of 1, or as the task says); of each task.",
        worry="Reward rises and accuracy does not: the reward pays for something else.",
        remedy="Read well-paid rollouts, and the alarms for reward hacking.",
        form="percent",
        absent="evaluation.every and tasks[].test",
    ),
    Chart(
        id="difficulty",
        title="Accuracy by difficulty",
        metrics=("evaluation/difficulty/*",),
        shows="Accuracy on the test prompts of which the model before training solved less than a third of the samples (hard),"
        " more than two thirds (easy), or a share in between (medium).",
        worry="Easy falls: the model forgets what it could do. Hard stays at 0: it learns only what it half knew.",
        remedy="Read rollouts of hard prompts, and use more evaluation.samples: with few, luck before training makes a prompt"
        " easy or hard, and both curves move towards the mean.",
        form="percent",
        least=0,
        absent="evaluation.every and tasks[].test",
    ),
    Chart(
        id="tasks",
        title="Reward by task",
        metrics=("reward/task/*",),
        shows="Mean score of each task's attempts in a step, in runs with several tasks.",
        worry="One task rises while another falls: the mean hides it.",
        remedy="Change the tasks' shares (tasks[].weight), and read the rollouts of the task that falls.",
    ),
    Chart(
        id="task_scores",
        title="Test score by task",
        metrics=("evaluation/*/score",),
        shows="Mean score of the test prompts of each task.",
        worry="A task stands still or falls while its reward in training rises.",
        remedy="Look at the alarms of this task, and at its best-paid rollouts.",
        absent="evaluation.every and tasks[].test",
    ),
    Chart(
        id="length",
        title="Length",
        metrics=("length/mean", "length/max"),
        shows="Sampled tokens of an attempt: mean and greatest of each step.",
        worry="It grows without a gain in reward, or collapses to a few tokens.",
        remedy="Give an over-long penalty (algorithm.reward.overlong_tokens), or another aggregation.",
        least=0,
    ),
    Chart(
        id="truncated",
        title="Truncation",
        metrics=("length/truncated",),
        shows="Share of attempts that ended at a limit of tokens or turns.",
        worry="More than a tenth: their scores say little about their answers.",
        remedy="Raise rollout.sampling.max_tokens, or mask them with algorithm.weight.mask_truncated.",
        form="percent",
        least=0,
        above=0.1,
    ),
    Chart(
        id="entropy",
        title="Entropy",
        metrics=("learner/entropy",),
        shows="Mean entropy of the policy at the tokens of the loss, in nats.",
        worry="It falls to almost 0 early: the policy stops exploring, and siblings become equal.",
        remedy="Raise algorithm.clip_high, lower the learning rate, or add algorithm.entropy_coefficient.",
        least=0,
    ),
    Chart(
        id="kl",
        title="KL to the reference",
        metrics=("learner/reference_kl", "reward/kl"),
        shows="Estimated divergence of the policy from the reference model, per token, in nats.",
        worry="It grows faster and faster: the policy leaves what it was trained on.",
        remedy="Raise algorithm.kl.coefficient, or lower the learning rate.",
        form="small",
        absent="algorithm.kl.coefficient above 0",
    ),
    Chart(
        id="clip",
        title="Clip fraction",
        metrics=("learner/clip_fraction",),
        shows="Share of loss tokens whose ratio the loss clips.",
        worry="More than a fifth: steps are too large, or samples are too old.",
        remedy="Lower the learning rate, learner.epochs or rollout.async_ratio.",
        form="percent",
        least=0,
        above=0.2,
    ),
    Chart(
        id="mismatch",
        title="Mismatch of engine and learner",
        metrics=("learner/mismatch_kl", "learner/mixed_mismatch_kl"),
        shows="Estimated KL divergence between the engine that sampled and the learner, per token, in nats.",
        worry="It grows over time, or stands above 0.01: gradients are of another policy than the one that sampled.",
        remedy="Use algorithm.correction, a more exact engine dtype, or on_update: recompute.",
        form="small",
        least=0,
        above=0.01,
    ),
    Chart(
        id="gradient",
        title="Gradient norm",
        metrics=("learner/grad_norm",),
        shows="Norm of the gradient before it is clipped, a mean over the updates of the step.",
        worry="Spikes that grow, or values far above learner.optimizer.max_grad_norm for long.",
        remedy="Lower the learning rate, warm it up for longer, and look at the samples of the step of a spike.",
        form="small",
        least=0,
    ),
    Chart(
        id="age",
        title="Age of samples",
        metrics=("age/mean", "age/max"),
        shows="Versions that were published between the start of an attempt and the step that trained on it.",
        worry="The mean stands at the limit: generation runs ahead as far as rollout.async_ratio allows.",
        remedy="That is safe by itself; if reward suffers, lower rollout.async_ratio or use algorithm.correction.",
        least=0,
    ),
    Chart(
        id="throughput",
        title="Throughput",
        metrics=("tokens/per_second",),
        shows="Sampled tokens of the step's attempts, per second of the step.",
        worry="It falls while lengths stay equal: an engine is lost or slow, or graders hold attempts up.",
        remedy="Look at the timeline, and at the waits below.",
        least=0,
    ),
    Chart(
        id="waits",
        title="Waits of the learner",
        metrics=("step/wait_groups_share", "step/wait_commit_share"),
        shows="Shares of the step in which the learner waited for groups, and for the record on disk.",
        worry="More than half for groups: generation is the bottleneck. More than a tenth for the record: the disk is slow.",
        remedy="Add engines, raise rollout.async_ratio, or give the learner less of the machine.",
        form="percent",
        least=0,
        above=0.5,
    ),
    Chart(
        id="equal",
        title="Groups of equal scores",
        metrics=("watch/*/constant",),
        shows="Share of each task's groups whose siblings all score the same, so that they teach nothing.",
        worry="More than two thirds: most of the generation is without a gradient.",
        remedy="Use easier or harder prompts, a larger group, or rollout.filter: spread.",
        form="percent",
        least=0,
        above=0.67,
    ),
    Chart(
        id="lost_groups",
        title="Groups that were not trained on",
        metrics=("groups/filtered", "groups/failed", "groups/stale"),
        shows="Groups that were rejected, failed or became too old since the step before.",
        worry="Failed groups at every step: an environment, a grader or an engine is broken.",
        remedy="Open the rollouts with the status failed and read their failures.",
        least=0,
    ),
    Chart(
        id="bias",
        title="Selection bias",
        metrics=("bias/length", "bias/score"),
        shows="Length and score of trained attempts relative to all that came to their end, minus 1.",
        worry="Length far below 0: short attempts finish first and are trained on more often.",
        remedy="Use rollout.order: fifo, and less rollout.redundancy.",
        form="percent",
    ),
    Chart(
        id="ungraded",
        title="Ungraded responses",
        metrics=("watch/*/ungraded",),
        shows="Share of each task's attempts whose grader gave no verdict.",
        worry="More than a few hundredths: a grader times out or fails.",
        remedy="Raise grading.deadline, and read the failures of the attempts.",
        form="percent",
        least=0,
        above=0.05,
    ),
    Chart(
        id="loss",
        title="Loss",
        metrics=("learner/loss",),
        shows="Loss of an update with KL and entropy terms. Its level says little: it is about 0 by construction.",
        form="small",
    ),
    Chart(
        id="rate",
        title="Learning rate",
        metrics=("learner/lr",),
        shows="Learning rate of the last update of each step.",
        form="small",
        least=0,
    ),
)
PAIRS = ("dpo", "reward-model")
OFFLINE_CHARTS = (
    Chart(
        id="sft_loss",
        title="Loss of supervised fine-tuning",
        metrics=("sft/loss",),
        shows="Mean negative log-likelihood of the examples, per token, in nats: of `antiphon sft`, or of a warm start.",
        worry="It rises, or falls to almost 0: the learning rate is too high, or the examples are learned by heart.",
        remedy="Lower sft.optimizer.learning_rate or sft.steps, or set sft.stop_accuracy.",
        least=0,
    ),
    Chart(
        id="sft_accuracy",
        title="Accuracy on validation prompts",
        metrics=("sft/accuracy",),
        shows="Accuracy of sampled responses to the validation prompts during supervised fine-tuning.",
        worry="It stands still while the loss falls: the examples do not teach what the reward pays for.",
        remedy="Compare the examples with what the reward expects.",
        form="percent",
        least=0,
    ),
    Chart(
        id="sft_gradient",
        title="Gradient norm of supervised fine-tuning",
        metrics=("sft/grad_norm",),
        shows="Norm of the gradient before it is clipped, a mean over the updates of the step.",
        worry="Spikes that grow.",
        remedy="Lower sft.optimizer.learning_rate, or warm it up for longer.",
        form="small",
        least=0,
    ),
    Chart(
        id="ranked",
        title="Pairs ranked as in the data",
        metrics=("learner/accuracy", "evaluation/accuracy"),
        shows="Share of the pairs of a step, and of the validation pairs, whose chosen response has the higher reward.",
        worry="It is high on training pairs and near a half on validation pairs: the pairs are learned by heart.",
        remedy="Lower epochs or the learning rate, or give more data.",
        form="percent",
        absent="validation",
        kinds=PAIRS,
    ),
    Chart(
        id="margin",
        title="Margin of the rewards",
        metrics=("learner/margin", "evaluation/margin"),
        shows="Mean reward of the chosen response minus that of the rejected one, of training and of validation pairs.",
        worry="It grows without end while the ranking of validation pairs stands still.",
        remedy="End earlier, or raise dpo.beta.",
        kinds=PAIRS,
    ),
    Chart(
        id="pair_rewards",
        title="Rewards of chosen and rejected",
        metrics=("learner/reward_chosen", "learner/reward_rejected"),
        shows="Mean reward of the chosen and of the rejected responses of a step.",
        worry="Both fall in DPO: the policy makes the chosen responses less likely too.",
        remedy="Lower the learning rate, or raise dpo.beta.",
        kinds=PAIRS,
    ),
    Chart(
        id="divergence",
        title="Divergence from the teacher",
        metrics=("learner/divergence", "evaluation/divergence"),
        shows="Mean divergence of the student from the teacher, per token, in nats, on training and on validation data.",
        worry="The curve of the validation data rises while the other falls.",
        remedy="Lower epochs, or give more data.",
        form="small",
        least=0,
        kinds=("distill",),
    ),
    Chart(
        id="validation_loss",
        title="Loss on validation data",
        metrics=("evaluation/loss",),
        shows="Loss over the validation data, in offline training.",
        worry="It rises while the loss of the steps falls: the data is learned by heart.",
        remedy="Lower epochs or the learning rate.",
        kinds=(*PAIRS, "distill"),
    ),
)
CHARTS = (*ONLINE_CHARTS, *OFFLINE_CHARTS)
BY_ID = {chart.id: chart for chart in CHARTS}


def list_charts(kinds: Collection[str]) -> list[Chart]:
    """Return the curated charts that runs of some kinds may have."""
    return [chart for chart in CHARTS if not chart.kinds or set(kinds) & set(chart.kinds)]


def find_chart(name: str) -> Chart | None:
    """Return a curated chart by its id, or the chart of one metric by the metric's name."""
    if name in BY_ID:
        return BY_ID[name]
    if "/" not in name:
        return None
    form = "percent" if name.endswith(("_share", "/truncated", "/constant", "/ungraded", "accuracy")) else "small"
    return Chart(id=name, title=name, metrics=(name,), shows=describe_metric(name), form=form)
