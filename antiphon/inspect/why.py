"""Answer where a sample or a token of a run came from, how it was used, and why it was not."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from antiphon.core.errors import RecordError
from antiphon.core.types import AttemptId, Segment, Trajectory
from antiphon.inspect.causes import explain_status
from antiphon.inspect.samples import split_conversation
from antiphon.inspect.token_texts import TokenTexts
from antiphon.record import safe_files
from antiphon.record.reader import AttemptRow, RunReader


def why(run: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield what is recorded of an attempt or of one of its tokens, as labels and texts.

    Args:
        run: Run directory.
        name: `[lineage:]group.sibling.try` for an attempt, by default of the newest lineage that has it;
            `[lineage:]group[.sibling]` lists the attempts of a group or sibling;
            `...@position` for a token of its first segment, `...@segment:position` for one of another.

    Raises:
        RecordError: There is no such attempt or token, or the run is damaged.
    """
    attempt, _, token = name.partition("@")
    lineage, _, numbers = attempt.rpartition(":")
    segment, _, position = token.rpartition(":")
    try:
        numbers_of, place = [int(part) for part in numbers.split(".")], (int(segment or 0), int(position or 0))
        in_lineage = int(lineage) if lineage else None
        if len(numbers_of) > 3 or (token and len(numbers_of) < 3):
            raise ValueError
    except ValueError as error:
        raise RecordError(
            f"{name!r} names no attempt: it is written [lineage:]group.sibling.try[@[segment:]token], or"
            " [lineage:]group[.sibling] for a list"
        ) from error
    with RunReader.open(run) as reader:
        if len(numbers_of) < 3:
            yield from _list_attempts(reader, numbers_of, in_lineage)
            return
        identity = AttemptId(*numbers_of)
        row = reader.find_attempt(identity, in_lineage)
        if row is None:
            raise RecordError(f"{run}: there is no attempt {attempt}", path=run)
        yield from _describe_attempt(reader, row)
        with safe_files.convert_read_errors(run):  # whose configuration may hold anything
            yield from explain_status(reader, row)
        if row.file is None:
            return
        found = reader.read_trajectories(row.file).get(row.made_by)
    path = run / f"rollouts/{row.file}"
    if found is None:
        raise RecordError(f"{path} has no attempt {row.made_by}", path=path)
    yield "trajectory", f"rollouts/{row.file}"
    texts = _open_texts(run)
    with safe_files.convert_read_errors(path):
        yield from _describe_trajectory(found)
        if token:
            yield from _describe_token(found, *place, path, texts)
    if texts is not None and not token:
        with safe_files.convert_read_errors(run):
            yield from _show_conversation(found, texts)


def _list_attempts(reader: RunReader, numbers: list[int], lineage: int | None) -> Iterator[tuple[str, str]]:
    """Yield the attempts of a group, or of one of its siblings, with status, failure and cause."""
    group, *sibling = numbers
    found = list(reader.list_attempts(group, sibling[0] if sibling else None, lineage))
    if not found:
        raise RecordError(
            f"{reader.directory}: there is no attempt {'.'.join(map(str, numbers))}", path=reader.directory
        )
    for row in found:
        score = "" if row.score is None else f", score {row.score:g}"
        failure = f", {row.failure}" if row.failure else ""
        with safe_files.convert_read_errors(reader.directory):
            causes = "".join(f"; {text}" for label, text in explain_status(reader, row) if label != "update")
        yield row.name, f"{_describe_status(reader, row)}{score}{failure}{causes}"


def _describe_attempt(reader: RunReader, row: AttemptRow) -> Iterator[tuple[str, str]]:
    yield "attempt", row.name
    yield "prompt", f"{row.prompt.id}, task {row.prompt.task}, epoch {row.prompt.epoch}"
    yield "group", f"{row.id.group}, admitted at version {row.admitted}, {row.outcome or 'live'}"
    yield "status", _describe_status(reader, row)
    if row.origin:
        yield "reused from", f"{row.origin}, of an earlier lineage of the run"
    if row.failure:
        yield "failure", row.failure


def _describe_status(reader: RunReader, row: AttemptRow) -> str:
    if row.status != "trained":
        return row.status
    step = reader.find_step(row.lineage, row.step)
    if step is None or step.version is None:
        ledger = reader.directory / "ledger.db"
        raise RecordError(f"{ledger}: step {row.step}, which trained on {row.name}, is not in it", path=ledger)
    undone = ", which a later lineage of the run undid" if step.is_undone else ""
    age = step.version - 1 - row.started
    return f"trained at step {row.step}{undone}, at age {age}; the step published version {step.version}"


def _describe_trajectory(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    meta = trajectory.meta
    yield "started at version", str(meta.started.n)
    value = "" if meta.score.value is None else f" {meta.score.value:g}"
    parts = "".join(f", {name} {value:g}" for name, value in meta.score.parts.items())
    yield "score", f"{meta.score.status}{value}{parts}{': ' if meta.score.detail else ''}{meta.score.detail}"
    if meta.score.grader:
        yield "graded by", meta.score.grader
    yield "seconds", f"{meta.timing.finished - meta.timing.queued:.3f}, grading included"
    for number, segment in enumerate(trajectory.segments):
        for index, turn in enumerate(segment.turns):
            sampled = turn.stop - turn.start
            yield (
                f"segment {number}, turn {index}",
                f"tokens {turn.start}–{turn.stop} ({sampled} sampled by {_count_versions(segment, turn.start, turn.stop)})"
                f" on engine {', '.join(map(str, turn.engines)) or 'unknown'}; ended by {turn.finish}; reward {turn.reward};"
                f" temperature {turn.sampling.temperature:g}, seed {turn.sampling.seed};"
                f" waited {turn.timing.started - turn.timing.queued:.3f} s,"
                f" took {turn.timing.finished - turn.timing.started:.3f} s",
            )


def _open_texts(run: Path) -> TokenTexts | None:
    """Return the texts of the run's tokens; None if the run holds no tokenizer."""
    try:
        return TokenTexts.open(run)
    except RecordError:
        return None


def _show_conversation(trajectory: Trajectory, texts: TokenTexts) -> Iterator[tuple[str, str]]:
    """Yield the texts of prompt, responses and observations, in order."""
    for number, segment in enumerate(trajectory.segments):
        turn = 0
        for kind, tokens in split_conversation(segment):
            inside = kind != "prompt" and turn < len(segment.turns)
            at = f"segment {number}, turn {turn}" if inside else f"segment {number}"
            yield f"{at}: {kind}", texts.decode(tokens.tolist())
            turn += kind == "response"


def _count_versions(segment: Segment, start: int, stop: int) -> str:
    """Return the versions that sampled a span with their numbers of tokens, in order."""
    versions = [(int(version), len(list(same))) for version, same in groupby(segment.versions[start:stop].tolist())]
    return ", ".join(f"version {version}: {count}" for version, count in versions)


def _describe_token(
    trajectory: Trajectory, number: int, position: int, path: Path, texts: TokenTexts | None
) -> Iterator[tuple[str, str]]:
    if not 0 <= number < len(trajectory.segments):
        segments = len(trajectory.segments)
        raise RecordError(f"{path}: there is no segment {number}: the trajectory has {segments}", path=path)
    segment = trajectory.segments[number]
    if not 0 <= position < len(segment.tokens):
        raise RecordError(f"{path}: there is no token {position}: the segment has {len(segment.tokens)}", path=path)
    token = str(segment.tokens[position])
    if texts is not None:
        token += f" {texts.split(segment.tokens[: position + 1].tolist())[-1]!r}"
    if not segment.loss_mask[position]:
        yield f"token {position}", f"{token}, part of the input, not sampled"
        return
    turn = next(index for index, turn in enumerate(segment.turns) if turn.start <= position < turn.stop)
    mixed = any(bool(segment.streams[spec][position]) for spec in segment.streams if spec.name == "mixed_cache")
    yield (
        f"token {position}",
        f"{token}, sampled in turn {turn} by version {int(segment.versions[position])}, log-prob"
        f" {float(segment.logprobs[position]):.6f}{', over a KV cache of more than one version' if mixed else ''}",
    )
