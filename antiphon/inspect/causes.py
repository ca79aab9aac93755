"""Say why an attempt has the status that it has, and what a step made of one that it trained on: the causes that `why` shows.

`docs/statuses.md` lists every status with its causes.
"""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from antiphon.algorithms.rewards import trajectory_weights
from antiphon.algorithms.sections import LossWeightConfig
from antiphon.core.errors import RecordError
from antiphon.core.types import AttemptStatus, Credit
from antiphon.learning.batch import digest_batches
from antiphon.record.reader import AttemptRow, RunReader

NOT_FINITE = "learner/skipped_updates"
KEPT = "learner/correction_kept"


def _explain_filter(row: AttemptRow, siblings: list[AttemptRow], config: Mapping[str, Any]) -> str:
    """Say which setting rejected an attempt's group: `mean_range` comes first, and scores decide it."""
    tasks = config.get("tasks", ())
    bounds = next((task.get("mean_range") for task in tasks if task.get("name") == row.prompt.task), None)
    filtered = [each for each in siblings if each.status == row.status]
    scores = [each.score for each in filtered]
    if None in scores:
        return "its environment, which scores whole groups, gave this group no scores"
    listed = ", ".join(_format_score(each) for each in scores)
    mean = fmean(score or 0.0 for score in scores)
    if bounds and not bounds[0] <= mean <= bounds[1]:
        return (
            f"mean_range of its task ({bounds}) rejected its complete group, with scores {listed}: the mean is {mean:g}"
        )
    own, lengths = config.get("rollout", {}).get("filter"), ", ".join(str(each.tokens) for each in filtered)
    return f"rollout.filter ({own}) rejected its complete group, with scores {listed} and lengths {lengths}"


def explain_status(reader: RunReader, row: AttemptRow) -> Iterator[tuple[str, str]]:
    """Yield the cause of an attempt's status, and the attempt that reused its trajectory, if there is one."""
    config = reader.read_config()
    rollout = config.get("rollout", {})
    siblings = reader.list_siblings(row)
    match row.status:
        case AttemptStatus.TRAINED:
            yield from _explain_update(reader, row, config, siblings)
        case AttemptStatus.FILTERED:
            yield "cause", _explain_filter(row, siblings, config)
        case AttemptStatus.STALE:
            yield "cause", _explain_age(row, siblings, rollout)
        case AttemptStatus.REDUNDANT if rollout.get("sampler"):
            yield (
                "cause",
                f"rollout.sampler ({rollout['sampler']}) aborted or did not reward it, or others completed its group",
            )
        case AttemptStatus.REDUNDANT:
            usable = rollout.get("group_size")
            yield "cause", f"{usable} siblings had finished before it, and its group was complete (rollout.redundancy)"
        case AttemptStatus.FAILED:
            yield "cause", _explain_failure(row, siblings, rollout)
        case AttemptStatus.CANCELLED:
            yield "cause", "the run was over before a step took its group: all steps were done, or Ctrl-C was pressed"
        case AttemptStatus.LOST:
            error = reader.find_end(row.lineage)
            ended = f"an error ended the run: {error}" if error else "the process was killed"
            yield "cause", f"{ended}, before it was trained on"
        case _:
            yield "cause", "it has not ended: the run goes on; or it was killed, and --resume marks the attempt lost"
    if (reuse := reader.find_reuse(row)) is not None:
        yield "reused as", f"{reuse.name}, {reuse.status}{f' at step {reuse.step}' if reuse.step is not None else ''}"


def _explain_age(row: AttemptRow, siblings: list[AttemptRow], rollout: Mapping[str, Any]) -> str:
    oldest = min(each.started for each in siblings if each.status == row.status)
    reasons = []
    if rollout.get("order") == "ready" and rollout.get("on_expiry") != "wait":
        reasons.append("that steps take groups as they get ready (rollout.order: ready, on_expiry: abort)")
    if extra := rollout.get("extra_groups"):
        reasons.append(f"that more groups are live than steps can take in time (rollout.extra_groups: {extra})")
    return (
        f"its group became too old: its oldest attempt started at version {oldest}, and rollout.async_ratio"
        f" {rollout.get('async_ratio')} lets no later step use it"
        f"{'. Possible reasons: ' if reasons else ''}{', or '.join(reasons)}"
    )


def _explain_failure(row: AttemptRow, siblings: list[AttemptRow], rollout: Mapping[str, Any]) -> str:
    tries, most = [each for each in siblings if each.id.sibling == row.id.sibling], rollout.get("max_attempts")
    if row.failure is not None:
        later = next((each for each in tries if each.id.attempt == row.id.attempt + 1), None)
        if later is not None:
            return f"it failed itself, and was tried again as {later.name}"
        if rollout.get("sampler"):
            return "it failed itself; rollout.sampler decides what is tried instead"
        return f"it failed itself, the last of {most} tries (rollout.max_attempts)"
    # With redundant siblings several may have failed for good; the last to arrive is the one that was too many.
    failed = [each for each in siblings if each.failure is not None and each.arrival is not None]
    last = max(failed, key=lambda each: each.arrival or 0, default=None)
    if last is None:
        return "its group failed: it got no more attempts, and had too few that were usable"
    return f"its group failed, because sibling {last.id.sibling} failed in its last try ({last.name}): {last.failure}"


def _explain_update(
    reader: RunReader, row: AttemptRow, config: Mapping[str, Any], siblings: list[AttemptRow]
) -> Iterator[tuple[str, str]]:
    """Yield what the step made of a trajectory: reward, advantage and weight, and whether a gradient came of it."""
    credit = reader.read_credit(row)
    if credit is None:
        yield "update", "not recorded: the run was made before this was recorded, or a user's stage dropped the samples"
        return
    yield (
        "update",
        f"reward {credit.reward:.6g}, mean advantage {credit.advantage:.6g}, mean weight {credit.weight:.6g}"
        f" of its {credit.tokens} sampled tokens",
    )
    metrics = reader.read_metrics(row.lineage, row.step or 0)
    yield "gradient", "; ".join([_explain_gradient(reader, row, credit, config, siblings), *_note_losses(metrics)])


def _explain_gradient(
    reader: RunReader, row: AttemptRow, credit: Credit, config: Mapping[str, Any], siblings: list[AttemptRow]
) -> str:
    step = reader.find_step(row.lineage, row.step)
    if step is not None and step.batch == digest_batches([]):
        warmup = (config.get("critic") or {}).get("warmup_steps", 0)
        why = f"critics warm up (critic.warmup_steps: {warmup})" if row.step is not None and row.step <= warmup else ""
        return f"none: the policy was not updated in this step; {why or 'learner.stages has no update_actor'}"
    algorithm = config.get("algorithm", {})
    if not credit.tokens:
        return "none: it has no sampled tokens"
    if credit.weight == 0:
        masks = _find_masks(reader, row, siblings, algorithm.get("weight") or {})
        return (
            f"none: algorithm.weight masks it ({', '.join(masks)})" if masks else "none: a stage of your own masks it"
        )
    if credit.signal == 0:
        scores = [each.score or 0.0 for each in siblings if each.status == AttemptStatus.TRAINED]
        masked = algorithm.get("agreement_mask")
        why = f", or algorithm.agreement_mask ({masked}) made it so" if masked else _explain_zero(row, scores)
        return f"its score gives none: its advantage is 0 at every token{why}. KL and entropy terms do not depend on it"
    return (
        f"possible at {credit.signal} of its tokens, whose weight and advantage are not 0; the loss may clip it there"
    )


def _find_masks(reader: RunReader, row: AttemptRow, siblings: list[AttemptRow], weight: Mapping[str, Any]) -> list[str]:
    """Return the masks that apply to an attempt; all that are switched on if what they look at is not recorded."""
    masks = [key for key, value in weight.items() if key.startswith("mask_") and value]
    trained = [each for each in siblings if each.status == AttemptStatus.TRAINED]
    try:
        group = [reader.read_metas(each.file or "")[each.made_by] for each in trained]
    except (RecordError, KeyError):
        return masks
    applied = {key: trajectory_weights([group], LossWeightConfig(**{key: weight[key]})) for key in masks}
    number = trained.index(row)
    return [key for key, (weights,) in applied.items() if not weights[number]]


def _explain_zero(row: AttemptRow, scores: list[float]) -> str:
    """Say why an attempt has no advantage over siblings with these scores, if they tell."""
    if len(scores) > 1 and len(set(scores)) == 1:
        return ", since all siblings scored the same"
    if len(scores) > 1 and abs((row.score or 0.0) - fmean(scores)) < 1e-6:
        return ", since its score is the mean of its group"
    return ""


def _note_losses(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield what may have cost a whole step, or single tokens, their gradient."""
    if skipped := metrics.get(NOT_FINITE):
        yield f"{skipped:g} updates of this step were skipped, since their gradient was not finite"
    if (kept := metrics.get(KEPT)) is not None and kept < 1:
        yield f"algorithm.correction kept {kept:.1%} of this step's tokens; which ones is not recorded"


def _format_score(score: float | None) -> str:
    return "none" if score is None else f"{score:g}"
