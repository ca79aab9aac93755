"""The score of a reward model, which `antiphon reward-model` trains. The model is in workers that all tasks share."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from antiphon.core.errors import ConfigError
from antiphon.core.types import Message, Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards import COMPOSED, IN_WORKERS

Classify = Callable[[Sequence[Message]], Awaitable[float]]  # the score of a conversation that ends with a response


class ClassifierOptions(NamedTuple):
    """Options of a reward model: equal ones share its workers."""

    path: str  # directory of the model and its tokenizer
    device: str = "cpu"
    workers: int = 1
    batch_tokens: int = 16384  # most tokens of a batch; a shared prompt counts once, and padding of padded rows counts


class RewardModel:
    """The logit of a sequence classifier of transformers with one label, at the last token of the conversation."""

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        workers: int = 1,
        batch_tokens: int = 16384,
        classify: Classify | None = None,
    ) -> None:
        """Score with the run's workers of a model.

        Args:
            path: Directory of the model and its tokenizer.
            device: Device of each worker.
            workers: Workers that hold the model; conversations that wait are read together.
            batch_tokens: Most tokens that a worker reads at once. A prompt that conversations share counts once; where the
                model reads padded rows, padding counts.
            classify: Asks the workers; the run provides it.
        """
        for name, number in (("workers", workers), ("batch_tokens", batch_tokens)):
            if not _is_count(number):
                message = f"reward_model: {name} must be a whole number above 0, not {number!r}"
                raise ConfigError(message, key=f"reward_options.{name}", value=number)
        if classify is None:
            raise ConfigError("reward_model runs in workers of a run, and there are none here", value=path)
        self._classify = classify

    async def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Score the last response, with an end-of-sequence token as in training; ungraded if there is none."""
        last = max((i for i, m in enumerate(transcript.messages) if m.role == "assistant"), default=None)
        if last is None:
            return Score.ungraded("there is no response")
        return Score.of(await self._classify(transcript.messages[: last + 1]))


def iterate_classifiers(reward: str, options: Mapping[str, Any]) -> Iterator[ClassifierOptions]:
    """Yield the options of each model that a reward or a part of it asks; invalid ones are left to `build_reward`."""
    parts = options.get("parts") if reward in COMPOSED else None
    for part in parts.values() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping):
            yield from iterate_classifiers(str(part.get("reward")), part.get("options") or {})
    if reward in IN_WORKERS and {"path"} <= options.keys() <= {*ClassifierOptions._fields}:
        found = ClassifierOptions(**options)
        texts = isinstance(found.path, str) and isinstance(found.device, str)
        if texts and _is_count(found.workers) and _is_count(found.batch_tokens):
            yield found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0
