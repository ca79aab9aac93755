"""Packs that losses are tested on: random sequences, and numbers at the edge of what floats hold."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch

from antiphon.algorithms.losses import LossInputs
from antiphon.core.types import STREAMS, StreamSpec

COLUMNS = tuple(field.name for field in fields(LossInputs) if field.name != "streams")


DIFFERENTIABLE = ("logprobs", "entropies")


LENGTHS = (3, 1, 8, 2, 5)  # tokens of the sequences of a pack


EXTREMES = ((-1000.0, -0.001), (-0.001, -1000.0), (-1.0, -1.0), (0.0, 0.0))  # log-probs, trained and sampled


def draw_sequences(seed: int, streams: Sequence[StreamSpec]) -> list[LossInputs]:
    """Return the sequences of a pack, each by itself, in double precision."""
    random = torch.Generator().manual_seed(seed)

    def uniform(length: int) -> torch.Tensor:
        return torch.rand(length, generator=random, dtype=torch.float64)

    return [
        LossInputs(
            logprobs=-3 * uniform(length),
            entropies=3 * uniform(length),
            old_logprobs=-3 * uniform(length),
            advantages=4 * uniform(length) - 2,
            sequence=torch.zeros(length, dtype=torch.long),
            turn=(uniform(length) < 0.3).cumsum(0),
            streams={spec: _stream(spec, length, random) for spec in streams},
        )
        for length in LENGTHS
    ]


def _stream(spec: StreamSpec, length: int, random: torch.Generator) -> torch.Tensor:
    drawn = torch.rand(length, *(size or 2 for size in spec.shape), generator=random, dtype=torch.float64)
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return (drawn < 0.5).to(dtype)
    return -3 * drawn if spec.name in STREAMS else 6 * drawn - 3  # a user's own may hold any numbers


def join_sequences(parts: Sequence[LossInputs]) -> LossInputs:
    """Join sequences to one pack, numbered as the learner does: turns from 0, and prompts count between the sequences."""
    turns = itertools.accumulate((int(part.turn[-1] - part.turn[0]) + 1 for part in parts), initial=0)
    numbered = [
        replace(part, sequence=part.sequence + 2 * place + 1, turn=part.turn - part.turn[0] + first)
        for place, (part, first) in enumerate(zip(parts, turns, strict=False))
    ]
    return map_tensors(lambda *pieces: torch.cat(pieces), *numbered)


def extreme_packs(streams: Sequence[StreamSpec]) -> list[LossInputs]:
    """Return tokens at the edge of what floats hold, in single precision: as one sequence, and each by itself."""
    rows = torch.tensor([(*edge, advantage) for edge in EXTREMES for advantage in (-1.0, 0.0, 1.0)])
    nowhere = torch.zeros(len(rows), dtype=torch.long)
    whole = LossInputs(
        logprobs=rows[:, 0],
        entropies=torch.zeros(len(rows)),
        old_logprobs=rows[:, 1],
        advantages=rows[:, 2],
        sequence=nowhere,
        turn=nowhere,
        streams={spec: _stream(spec, len(rows), torch.Generator()) for spec in streams},
    )
    single = map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, whole)
    return [single, *(map_tensors(lambda tensor, at=at: tensor[at : at + 1], single) for at in range(len(rows)))]


def differentiable_copies(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Return leaf copies, by name, of the tensors with respect to which a loss is differentiated."""
    return {name: getattr(inputs, name).clone().requires_grad_() for name in DIFFERENTIABLE}


def named_tensors(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Return every tensor of the inputs by name, streams included."""
    return {name: getattr(inputs, name) for name in COLUMNS} | {
        f"streams[{spec.name!r}]": stream for spec, stream in inputs.streams.items()
    }


def map_tensors(change: Callable[..., torch.Tensor], *inputs: LossInputs) -> LossInputs:
    """Apply `change` to every tensor of the inputs."""
    columns = {name: change(*(getattr(each, name) for each in inputs)) for name in COLUMNS}
    streams = {spec: change(*(each.streams[spec] for each in inputs)) for spec in inputs[0].streams}
    return LossInputs(**columns, streams=streams)
