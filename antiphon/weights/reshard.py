"""Weights that the ranks of a learner send piece by piece: who sends what, and how engines put tensors together.

No rank gathers a tensor. Each sends boxes of tensors through a channel of its own, all at the same time, and an engine receives
from all of them. A piece that several ranks hold is sent by one.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from math import prod

import torch
import xxhash

from antiphon.core.errors import WeightsError
from antiphon.core.types import WeightsUpdate
from antiphon.weights.base import WeightChannel
from antiphon.weights.manifest import Piece, PiecesManifest, SentPieces


def assign_senders(held: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Return the pieces that each rank sends: every piece once, by a rank that holds it, and about as many elements each.

    Pieces that one rank holds are given first. Then the largest goes to the holder with the fewest elements so far, and so on.

    Args:
        held: The pieces that each rank holds. Two pieces of a tensor are the same or have no element in common.

    Raises:
        ValueError: The pieces of a tensor are not the whole of it.
    """
    holders = defaultdict[Piece, list[int]](list)
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders[piece].append(rank)
    _require_whole(holders)
    elements, senders = [0] * len(held), dict[Piece, int]()
    for piece in sorted(holders, key=lambda each: (len(holders[each]) > 1, -prod(each.size))):
        senders[piece] = min(holders[piece], key=elements.__getitem__)
        elements[senders[piece]] += prod(piece.size)
    return [[piece for piece in pieces if senders[piece] == rank] for rank, pieces in enumerate(held)]


def join_updates(version: int, parts: Sequence[SentPieces]) -> WeightsUpdate:
    """Return one update of what ranks sent."""
    digests = repr([(part.update.manifest.digest, part.pieces) for part in parts]).encode()
    manifest = PiecesManifest(
        parts=tuple(parts),
        size=sum(part.update.manifest.size for part in parts),
        digest=xxhash.xxh3_64_intdigest(digests) >> 1,  # the ledger holds 63 bits
    )
    return WeightsUpdate(version=version, location="", manifest=manifest, sent=sum(part.update.sent for part in parts))


def receive_weights(channel: type[WeightChannel], update: WeightsUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an update by name, from one sender or from many; see `WeightChannel.receive`."""
    if not isinstance(update.manifest, PiecesManifest):
        yield from channel.receive(update)
        return
    parts, caller = update.manifest.parts, threading.get_ident()
    arriving = [
        _thread(caller, number).submit(lambda each: list(channel.receive(each)), part.update)
        for number, part in enumerate(parts)
    ]
    wait(arriving)  # all of them: a later update must not meet one that still arrives
    arrived = [each.result() for each in arriving]
    yield from assemble_tensors(
        (piece, tensor)
        for part, tensors in zip(parts, arrived, strict=True)
        for piece, (_, tensor) in zip(part.pieces, tensors, strict=True)
    )


@cache
def _thread(caller: int, number: int) -> ThreadPoolExecutor:
    """Return the thread in which an engine receives from one sender: channels know an engine by its thread."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"weights-{number}")


def assemble_tensors(pieces: Iterable[tuple[Piece, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by name, each made of its pieces; one that is a single piece is not copied.

    Raises:
        WeightsError: Pieces are missing; raised before the first tensor is yielded.
    """
    of_tensor = defaultdict[str, list[tuple[Piece, torch.Tensor]]](list)
    for piece, tensor in pieces:
        of_tensor[piece.name].append((piece, tensor))
    try:
        _require_whole(piece for parts in of_tensor.values() for piece, _ in parts)
    except ValueError as error:
        raise WeightsError(str(error)) from error
    for name, parts in of_tensor.items():
        first, tensor = parts[0]
        if len(parts) > 1:
            tensor = torch.empty(first.whole, dtype=tensor.dtype, device=tensor.device)
            for piece, part in parts:
                places = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True))
                tensor[places].copy_(part)
        yield name, tensor


def _require_whole(pieces: Iterable[Piece]) -> None:
    """Raise `ValueError` if pieces without common elements are not the whole of each tensor."""
    found, whole = defaultdict[str, int](int), dict[str, int]()
    for piece in pieces:
        found[piece.name] += prod(piece.size)
        whole[piece.name] = prod(piece.whole)
    for name, elements in whole.items():
        if found[name] != elements:
            raise ValueError(f"the pieces of {name} have {found[name]} elements, and the tensor has {elements}")
