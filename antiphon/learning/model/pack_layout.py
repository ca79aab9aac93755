"""The layout of a pack: the position of each token, and the gathering of its sequences for attention."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.core.types import IntArray, Pack
from antiphon.learning.host_device_copy import to_device

MASKED = 1 << 26  # most entries of a mask: beyond, what is shared is gathered again


@dataclass(frozen=True, slots=True)
class _Block:
    rows: torch.Tensor  # [n, width] token of the pack in each slot; padding repeats the first
    valid: torch.Tensor  # [tokens] flat slots whose output is used
    keys: torch.Tensor | None = None  # [n, keys] tokens that they look at, if not at those before them in `rows`
    mask: torch.Tensor | None = None  # [width, keys] which of them

    @staticmethod
    def of(device: torch.device | str, rows: NDArray[Any], valid: NDArray[np.bool_], *others: NDArray[Any]) -> "_Block":
        """From arrays; `valid` [n, width] says which slots' output is used."""
        arrays = rows, np.flatnonzero(valid), *others
        return _Block(*(to_device(array, device) for array in arrays))


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Positions of the tokens of a pack, and the blocks in which its sequences are gathered for attention.

    The tokens of a shared piece are gathered into every sequence they begin, as keys and values. They are queries once if
    what follows them is shorter than they are; else in every sequence, the outputs of the first of which are used: a rectangle
    costs more then than the triangle that is half of a larger square. Every other layer sees them once.
    """

    positions: torch.Tensor  # [T] in the sequence
    previous: torch.Tensor  # [T] the token before, in the sequence; of a first token, itself
    blocks: tuple[_Block, ...]
    order: torch.Tensor  # [T] where each token of the pack stands in the blocks' concatenated output
    piece: torch.Tensor  # [T] which piece it belongs to
    above: torch.Tensor  # [S, S] whether the second piece comes before the first in a sequence
    longest: int  # tokens of a sequence

    @staticmethod
    def of(lengths: IntArray, parents: IntArray, device: torch.device | str = "cpu", multiple: int = 1) -> "PackLayout":
        """Return the layout of a forest of pieces, see `Pack`; padded by one piece if the tokens must be a multiple."""
        if (over := int(lengths.sum()) % multiple) != 0:
            lengths, parents = np.append(lengths, multiple - over), np.append(parents, -1)
        positions, previous = np.empty(int(lengths.sum()), dtype=np.int64), previous_tokens(lengths, parents)
        for path in _paths(lengths, parents):
            positions[path] = np.arange(len(path))
        whole, after = _divided(lengths, parents)
        blocks, places, placed = [], [], np.zeros(len(positions), dtype=np.bool_)
        for shared, tails in after:
            rows, valid = _padded(tails)
            keys = np.concatenate([np.broadcast_to(shared, (len(rows), len(shared))), rows], axis=1)
            seen = np.arange(keys.shape[1]) <= len(shared) + np.arange(rows.shape[1])[:, None]
            blocks.append(_Block.of(device, rows, valid, keys, seen))
            places.append(rows[valid])
            placed[places[-1]] = True
        for members in _similar(whole):
            rows, valid = _padded(members)
            for path, used in zip(members, valid, strict=True):
                used[: len(path)] &= ~placed[path]
                placed[path] = True
            blocks.append(_Block.of(device, rows, valid))
            places.append(rows[valid])
        order = np.empty_like(positions)
        order[np.concatenate(places)] = np.arange(len(order))
        above = np.zeros((len(lengths), len(lengths)), dtype=np.bool_)
        for own, parent in enumerate(parents):
            if parent >= 0:
                above[own] = above[parent]
                above[own, parent] = True
        arrays = (positions, previous, order, np.repeat(np.arange(len(lengths)), lengths), above)
        at, before, order_there, piece, above_there = (to_device(array, device) for array in arrays)
        return PackLayout(at, before, tuple(blocks), order_there, piece, above_there, int(positions.max()) + 1)

    def visible(self, rows: slice) -> torch.Tensor:
        """Return which tokens of the pack these rows see: those before them in a sequence, and themselves, [n, T]."""
        own, token = self.piece[rows], torch.arange(len(self.piece), device=self.piece.device)
        before = (own[:, None] == self.piece) & (token[rows, None] >= token)
        return self.above[own][:, self.piece] | before


def loss_sequences(pack: Pack) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return the tokens of each sample with loss tokens, and where its loss tokens are among them."""
    paths, owners = _paths(pack.lengths, pack.parents), np.repeat(pack.owners, pack.lengths)
    found = []
    for sample, end in enumerate(pack.ends):
        path = paths[end]
        own = np.flatnonzero(pack.loss_mask[path] & (owners[path] == sample))
        if len(own):
            found.append((path, own))
    return found


def paths_to_ends(pack: Pack) -> list[NDArray[np.int64]]:
    """Return the tokens of each sample of a pack, in order."""
    paths = _paths(pack.lengths, pack.parents)
    return [paths[end] for end in pack.ends]


def previous_tokens(lengths: IntArray, parents: IntArray) -> NDArray[np.int64]:
    """Return the index [T] of the token before each token of a forest of pieces; of a first token, its own.

    >>> previous_tokens(np.array([2, 1, 3]), np.array([-1, 0, 0]))
    array([0, 0, 1, 1, 3, 4])
    """
    previous = np.empty(int(lengths.sum()), dtype=np.int64)
    for path in _paths(lengths, parents):
        previous[path] = np.concatenate([path[:1], path[:-1]])
    return previous


def _paths(lengths: IntArray, parents: IntArray) -> list[NDArray[np.int64]]:
    """The tokens from a root to the end of each piece.

    >>> _paths(np.array([2, 1, 3]), np.array([-1, 0, 0]))
    [array([0, 1]), array([0, 1, 2]), array([0, 1, 3, 4, 5])]
    """
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    paths: list[NDArray[np.int64]] = []
    for start, length, parent in zip(starts, lengths, parents, strict=True):
        own = np.arange(start, start + length)
        paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
    return paths


def _divided(
    lengths: IntArray, parents: IntArray
) -> tuple[list[NDArray[np.int64]], list[tuple[NDArray[np.int64], list[NDArray[np.int64]]]]]:
    """Return the sequences that are gathered whole, and shared prefixes with tails of similar length."""
    children = np.bincount(parents[parents >= 0], minlength=len(lengths))
    paths = _paths(lengths, parents)
    fresh: list[int] = []  # of each path, the last tokens that no other path has
    for length, parent in zip(lengths, parents, strict=True):
        fresh.append(int(length) + (fresh[parent] if parent >= 0 and children[parent] == 1 else 0))
    whole, tails = [], defaultdict[int, list[int]](list)  # the last token that is shared -> paths
    for number, (path, new, below) in enumerate(zip(paths, fresh, children, strict=True)):
        shared = len(path) - new
        if below == 1 or not new:
            continue  # it is part of what follows, or of what was before
        if new <= shared and new * len(path) <= MASKED:
            tails[int(path[shared - 1])].append(number)
        else:
            whole.append(path)
    placed = np.zeros(int(lengths.sum()), dtype=np.bool_)
    for members in tails.values():
        for number in members:
            placed[paths[number][-fresh[number] :]] = True
    needed = []
    for path in sorted(whole, key=len, reverse=True):
        if not placed[path].all():
            needed.append(path)
            placed[path] = True
    after = [
        (paths[members[0]][: -fresh[members[0]]], block)
        for members in tails.values()
        for block in _similar([paths[number][-fresh[number] :] for number in members])
    ]
    return needed, after


def _padded(members: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return sequences as rows of one width, padded with their first tokens, and which entries are not padding."""
    width = max(map(len, members))
    rows = np.stack([np.pad(path, (0, width - len(path)), constant_values=path[0]) for path in members])
    return rows, np.arange(width) < np.array([len(path) for path in members])[:, None]


def _similar(sequences: list[NDArray[np.int64]]) -> list[list[NDArray[np.int64]]]:
    """Group sequences into blocks, longest first, whose longest is at most 1.5 times (and 16 tokens over) the shortest."""
    blocks: list[list[NDArray[np.int64]]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if blocks and len(sequence) * 1.5 + 16 >= len(blocks[-1][0]):
            blocks[-1].append(sequence)
        else:
            blocks.append([sequence])
    return blocks
