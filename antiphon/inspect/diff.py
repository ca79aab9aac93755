"""Find the first difference between two runs."""

import json
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

from antiphon.inspect.settings import compare_settings
from antiphon.record import safe_files
from antiphon.record.reader import AttemptRow, RunReader


def diff(one: Path, other: Path) -> str | None:
    """Return the first difference between two runs, or None.

    Steps that one of them does not have, because it branched off another run after them, are not compared.

    Compared in this order: configuration, code, then step by step the prompts, attempts, tokens, scores and batches that were
    trained on, and last the weights of each version.
    """
    with ExitStack() as stack:
        left, right = (stack.enter_context(RunReader.open(run)) for run in (one, other))
        with safe_files.convert_read_errors(f"{one} or {other}"):
            return (
                _compare_configs(one, other)
                or _compare_code(left, right)
                or _compare_steps(left, right, begin := max(reader.list_lineages()[0].cut for reader in (left, right)))
                or _compare_weights(left, right, begin)
            )


def _compare_configs(one: Path, other: Path) -> str | None:
    changed = sorted(compare_settings([one, other]))
    sides = [(sign, key, value) for key, values in changed for sign, value in zip("-+", values, strict=True)]
    shown = " | ".join(f"{sign} {key}: {value:.200}" for sign, key, value in sides[:4] if value is not None)
    return f"configuration: {shown}" if changed else None


def _compare_code(left: RunReader, right: RunReader) -> str | None:
    codes = [reader.list_lineages()[-1].code for reader in (left, right)]
    return None if codes[0] == codes[1] else f"code: {codes[0]} and {codes[1]}"


def _compare_steps(one: RunReader, other: RunReader, begin: int) -> str | None:
    """Return the first difference between the steps after `begin`."""
    trained = ((each for each in reader.iterate_trained() if each[0].step > begin) for reader in (one, other))
    for left, right in zip_longest(*trained):
        if left is None or right is None:
            shorter, (longer, _) = (one, right) if left is None else (other, left)
            return f"step {longer.step}: {shorter.directory} has no more"
        step, attempt = left
        other_step, other_attempt = right
        where = f"step {step.step}"
        if (step.step, *_identify(attempt)) != (other_step.step, *_identify(other_attempt)):
            return f"{where}: data: {_name(attempt)} and {_name(other_attempt)} of step {other_step.step}"
        for what, mine, others in (
            ("the version it started at", attempt.started, other_attempt.started),
            ("its tokens or log-probs", attempt.digest, other_attempt.digest),
            ("score", attempt.score, other_attempt.score),
            ("batch", step.batch, other_step.batch),
        ):
            if mine != others:
                return f"{where}: {_name(attempt)}: {what}: {mine} and {others}"
    return None


def _compare_weights(left: RunReader, right: RunReader, begin: int) -> str | None:
    """Return the first difference between the weights that the steps after `begin` published."""
    versions = (
        [
            (step.version, step.weights)
            for step in reader.list_steps()
            if step.version is not None and not step.is_undone and step.step > begin
        ]
        for reader in (left, right)
    )
    for one, other in zip(*versions, strict=False):
        if one != other:
            return f"version {one[0]}: its weights"
    return None


def _identify(attempt: AttemptRow) -> tuple[str, int, int]:
    return attempt.prompt.id, attempt.prompt.epoch, attempt.id.sibling


def _name(attempt: AttemptRow) -> str:
    return json.dumps(f"{attempt.prompt.id}, epoch {attempt.prompt.epoch}, sibling {attempt.id.sibling}")
