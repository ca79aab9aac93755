"""Show what the policy said: recorded conversations as text, with their rewards and what became of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import RecordError
from antiphon.core.types import IntArray, Segment, Trajectory
from antiphon.inspect.recorded_config import has_model
from antiphon.record import safe_files
from antiphon.record.checkpoint import list_checkpoints
from antiphon.record.reader import AttemptRow, RunReader
from antiphon.tasks.rendering import Renderer

ORDERS: Mapping[str, str] = {
    "newest": "lineage DESC, arrival DESC",
    "best": "score DESC, status = 'trained' DESC, lineage DESC, arrival DESC",
    "worst": "score, status = 'trained' DESC, lineage DESC, arrival DESC",
}


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One attempt as text.

    Attributes:
        row: What the ledger has of it.
        trajectory: What was sampled.
        parts: Kind and text of each part of the conversation, in order; a kind is prompt, response or observation, and
            "segment" begins another one of an agent.
    """

    row: AttemptRow
    trajectory: Trajectory
    parts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The whole conversation."""
        return "".join(text for _, text in self.parts)


def iterate_samples(
    run: Path,
    *,
    step: int | None = None,
    status: str = "",
    containing: str = "",
    order: str = "newest",
    model: Path | None = None,
) -> Iterator[RecordedSample]:
    """Yield the recorded attempts of a run as text.

    Args:
        run: Run directory.
        step: Only those that this training step trained on.
        status: Only those with this status, such as `filtered`.
        containing: Only those whose conversation contains this text.
        order: One of `ORDERS`.
        model: Directory with the tokenizer; by default that of the run's own model or newest checkpoint.

    Raises:
        RecordError: The run is damaged, or it has no tokenizer.
    """
    renderer = Renderer(model or find_tokenizer(run))
    with RunReader.open(run) as reader:
        for row in reader.iterate_finished(step, status, ORDERS[order]):
            trajectory = reader.read_trajectories(row.file or "").get(row.made_by)
            path = run / f"rollouts/{row.file}"
            if trajectory is None:
                raise RecordError(f"{path} has no attempt {row.made_by}", path=path)
            with safe_files.convert_read_errors(path):
                parts = tuple(_describe_parts(renderer, trajectory))
            sample = RecordedSample(row, trajectory, parts)
            if containing in sample.text:
                yield sample


def find_tokenizer(run: Path) -> Path:
    """Return the directory of a run that holds its tokenizer; raise `RecordError` if there is none."""
    if has_model(run):
        return run / "model"
    checkpoints = [path for path in list_checkpoints(run / "checkpoints") if (path / "tokenizer.json").is_file()]
    if not checkpoints:
        raise RecordError(
            f"{run} holds no tokenizer, neither in model/ nor in a checkpoint; name the model's folder: --model DIR",
            path=run,
        )
    safe_files.check_model_files(checkpoints[-1])
    return checkpoints[-1]


def _describe_parts(renderer: Renderer, trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    for number, segment in enumerate(trajectory.segments):
        if number:
            yield "segment", ""
        for kind, tokens in split_conversation(segment):
            yield kind, renderer.decode(tokens)


def split_conversation(segment: Segment) -> Iterator[tuple[str, IntArray]]:
    """Yield the tokens of the prompt, of each turn's response, and of what the policy read before it, with their kinds."""
    place = 0
    for turn in segment.turns:
        if turn.start > place:
            yield "observation" if place else "prompt", segment.tokens[place : turn.start]
        yield "response", segment.tokens[turn.start : turn.stop]
        place = turn.stop
    if place < len(segment.tokens):
        yield "observation", segment.tokens[place:]
