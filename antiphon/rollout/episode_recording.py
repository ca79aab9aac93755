"""An episode as it goes on: messages, and the tokens that become segments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from antiphon.core.types import Completion, IntArray, Message, PlacedImage, Segment, Streams, Turn
from antiphon.rollout.prompt_encoding import EncodedPrompt
from antiphon.tasks.base import ENVIRONMENT_MEASURES


@dataclass(slots=True)
class SegmentBuilder:
    """A segment that grows turn by turn."""

    tokens: list[IntArray] = field(default_factory=list)
    completions: list[Completion | None] = field(default_factory=list)  # None where tokens were not sampled
    turns: list[Turn] = field(default_factory=list)
    images: list[PlacedImage] = field(default_factory=list)
    length: int = 0

    def add(self, tokens: IntArray, completion: Completion | None = None, images: Sequence[PlacedImage] = ()) -> None:
        """Append tokens, with the images among them. With `completion`, they were sampled by the policy."""
        self.images += [image.shifted(self.length) for image in images]
        self.tokens.append(tokens)
        self.completions.append(completion)
        self.length += len(tokens)

    @property
    def sampled(self) -> bool:
        """True if any of its tokens was sampled; a prompt alone cannot be trained on."""
        return any(completion is not None for completion in self.completions)

    def build(self, parent: int | None) -> Segment:
        """Return the segment up to the last completion; an observation after it is left out."""
        count = 1 + max(at for at, completion in enumerate(self.completions) if completion is not None)
        tokens = np.concatenate(self.tokens[:count])
        length = len(tokens)
        loss_mask = np.zeros(length, np.bool_)
        logprobs, versions = np.zeros(length, np.float32), np.zeros(length, np.int32)
        streams: dict[int, Streams] = {}
        start = 0
        for part, completion in zip(self.tokens[:count], self.completions[:count], strict=True):
            stop = start + len(part)
            if completion is not None:
                loss_mask[start:stop] = True
                logprobs[start:stop] = completion.logprobs
                versions[start:stop] = completion.versions
                streams[start] = completion.streams
            start = stop
        return Segment(
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            turns=tuple(self.turns),
            streams=Streams.placed(length, streams),
            parent=parent,
            images=tuple(image for image in self.images if image.stop <= length),
        )


@dataclass(slots=True)
class EpisodeRecording:
    """State of an episode so far: messages, segments and measurements."""

    messages: list[Message]
    builders: list[SegmentBuilder] = field(default_factory=list)
    state_key: str | None = None  # of the state that the next action is taken in
    measured: dict[str, list[float]] = field(default_factory=dict)  # by `ENVIRONMENT_MEASURES`, one value for each turn
    truncated: bool = False  # see `TrajectoryMeta.truncated`

    @property
    def current(self) -> SegmentBuilder:
        """The segment that grows."""
        return self.builders[-1]

    def sampled_tokens(self) -> int:
        """Return how many tokens were sampled so far."""
        return sum(turn.stop - turn.start for builder in self.builders for turn in builder.turns)

    def add_info(self, info: Mapping[str, Any]) -> None:
        """Take in the `info` of an environment's step."""
        self.set_state(info)
        for name in ENVIRONMENT_MEASURES & info.keys():
            self.measured.setdefault(name, []).append(float(bool(info[name])))

    def set_state(self, info: Mapping[str, Any]) -> None:
        """Take the key of the present state from an environment's `info`."""
        key = info.get("state_key")
        self.state_key = None if key is None else str(key)

    def continue_with(self, prompt: EncodedPrompt) -> None:
        """Add a prompt that was rendered anew: it extends the current segment token for token, or begins another."""
        if self.builders:
            known, images = np.concatenate(self.current.tokens), len(self.current.images)
            tokens, length = prompt.tokens, len(known)
            same = len(tokens) >= length and np.array_equal(tokens[:length], known)
            if same and list(prompt.images[:images]) == self.current.images:
                added = [image.shifted(-length) for image in prompt.images[images:]]
                self.current.add(tokens[length:], images=added)
                return
        self.begin_segment(prompt)

    def begin_segment(self, prompt: EncodedPrompt) -> None:
        """Begin a segment with a prompt."""
        self.builders.append(SegmentBuilder())
        self.current.add(prompt.tokens, images=prompt.images)

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that can be trained on."""
        sampled = [builder for builder in self.builders if builder.sampled]
        return tuple(builder.build(number - 1 if number else None) for number, builder in enumerate(sampled))

    def measures(self) -> dict[str, float]:
        """Return turns, samples, and what the environment measured."""
        sampled = [builder for builder in self.builders if builder.sampled]
        turns = sum(len(builder.turns) for builder in sampled)
        return self.environment_measures(turns) | {"samples": float(len(sampled))}

    def environment_measures(self, turns: int) -> dict[str, float]:
        """Return the number of turns, and means over turns of what the environment measured; success is that of the end."""
        means = {name: fmean(values) for name, values in self.measured.items()}
        if "success" in self.measured:
            means["success"] = self.measured["success"][-1]
        return means | {"turns": float(turns)}


def observation_message(text: str, info: Mapping[str, Any]) -> Message:
    """Return an observation as a message, with the images that the environment names in its `info`."""
    return Message("user", text, images=tuple(info.get("images", ())))
