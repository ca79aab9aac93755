"""Choosing rows of data sets: by content, by share, and by how often a model solved them."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.rng import derive
from antiphon.tasks.data.overlap import words_of
from antiphon.tasks.sources import Row

STRATA = 5  # of equal width, from questions that are never solved to those that always are


class Solved(NamedTuple):
    """Samples of one row by `antiphon generate`: whether each was a success."""

    correct: np.ndarray  # [n] bool

    @property
    def rate(self) -> float:
        """Share of successes."""
        return float(self.correct.mean())

    @property
    def stratum(self) -> int:
        """Number of the stratum of the rate, from 0, the hardest."""
        return min(int(self.rate * STRATA), STRATA - 1)


def split_of(question: str, shares: Mapping[str, float]) -> str:
    """Return the split of a question by a hash of its words; what the shares leave is `train`.

    Questions with equal words are in the same split, in every data set.
    """
    digest = hashlib.blake2b(" ".join(words_of(question)).encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64
    for name, share in shares.items():
        if place < share:
            return name
        place -= share
    return "train"


def mix(sets: Sequence[Sequence[Row]], weights: Sequence[float], count: int = 0, seed: int = 0) -> list[Row]:
    """Return rows of data sets in proportion to weights, in random order; no row comes twice.

    Args:
        sets: The data sets.
        weights: Weight of each.
        count: Number of rows; 0 is as many as there can be.
        seed: Seed of choice and order.

    Raises:
        ConfigError: A data set has not enough rows.
    """
    total = sum(weights)
    most = int(min(len(rows) * total / weight for rows, weight in zip(sets, weights, strict=True)) + 1e-9)
    if count > most:
        raise ConfigError(f"{count} rows in these proportions would repeat some: there can be {most}", key="--rows")
    draw = random.Random(derive(seed, "mix"))
    chosen: list[Row] = []
    ends = np.floor(np.cumsum(weights) / total * (count or most) + 0.5).astype(int)
    for rows, size in zip(sets, np.diff(ends, prepend=0), strict=True):
        chosen += draw.sample(list(rows), min(int(size), len(rows)))
    draw.shuffle(chosen)
    return chosen


def read_solved(path: Path) -> dict[str, Solved]:
    """Return the samples of a file that `antiphon generate` wrote, by the key of their row (`key_of`)."""
    try:
        table = pq.read_table(path, columns=["row", "success"])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is no file of antiphon generate: {error}", path=path) from error
    found: dict[str, list[bool]] = {}
    for each in table.to_pylist():
        found.setdefault(key_of(json.loads(each["row"])), []).append(each["success"])
    return {key: Solved(np.array(correct)) for key, correct in found.items()}


def key_of(row: Row) -> str:
    """Return a text that is equal for equal rows."""
    return json.dumps(row, sort_keys=True, default=str)


def solved_of(rows: Iterable[Row], solved: Mapping[str, Solved], place: Path) -> list[Solved]:
    """Return the samples of each row; `DataError` names the first row that has none."""
    found = []
    for number, row in enumerate(rows, start=1):
        if (each := solved.get(key_of(row))) is None:
            raise DataError(f"{place}, row {number}: there are no samples of it", path=place, row=number)
        found.append(each)
    return found


def choose_by_difficulty(
    rows: Sequence[Row], solved: Sequence[Solved], least: float, most: float, each: int = 0, seed: int = 0
) -> list[Row]:
    """Return the rows that are solved at a rate from `least` to `most`, with the column `pass_rate`.

    `each` bounds the rows of a stratum, drawn at random; 0 is no bound. The order is that of the data set.
    """
    kept = [number for number, one in enumerate(solved) if least <= one.rate <= most]
    if each:
        draw, chosen = random.Random(derive(seed, "strata")), list[int]()
        for stratum in range(STRATA):
            own = [number for number in kept if solved[number].stratum == stratum]
            chosen += draw.sample(own, min(each, len(own)))
        kept = sorted(chosen)
    return [rows[number] | {"pass_rate": solved[number].rate} for number in kept]
