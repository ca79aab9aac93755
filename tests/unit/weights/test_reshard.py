"""Pieces of tensors: who sends which, and that they come together again."""

from itertools import chain, pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import WeightsError
from antiphon.weights.base import CHANNELS, TransferContext, open_channel
from antiphon.weights.manifest import Piece, SentPieces
from antiphon.weights.reshard import assemble_tensors, assign_senders, join_updates, receive_weights
from tests.raising import raises_with


@st.composite
def divided_tensors(draw):
    """Tensors by name, and pieces that a random grid cuts them into."""
    tensors, pieces = {}, []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        name = f"t{number}"
        tensors[name] = torch.arange(prod(shape)).view(shape) + 1000 * number
        edges = [[0, *sorted(draw(st.sets(st.integers(1, size - 1 or 1))) - {size}), size] for size in shape]
        for box in product(*(pairwise(own) for own in edges)):
            start, size = tuple(a for a, _ in box), tuple(b - a for a, b in box)
            pieces.append(Piece(name=name, start=start, size=size, whole=tuple(shape)))
    return tensors, pieces


def cut(tensors, piece):
    tensor = tensors[piece.name]
    for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor.clone()


@given(divided=divided_tensors(), data=st.data())
def test_each_piece_is_sent_once_by_a_rank_that_holds_it(divided, data):
    tensors, pieces = divided
    ranks = data.draw(st.integers(1, 5))
    holders = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in pieces]
    held = [[piece for piece, own in zip(pieces, holders, strict=True) if rank in own] for rank in range(ranks)]
    sent = assign_senders(held)
    assert sorted(map(repr, chain(*sent))) == sorted(map(repr, pieces))
    assert all(piece in own for own, chosen in zip(held, sent, strict=True) for piece in chosen)
    arrived = data.draw(st.permutations([(piece, cut(tensors, piece)) for piece in pieces]))
    together = dict(assemble_tensors(arrived))
    assert together.keys() == tensors.keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in tensors.items())


def whole(name, size):
    return Piece(name=name, start=(0,), size=(size,), whole=(size,))


def loads_of(held):
    return [sum(prod(piece.size) for piece in own) for own in assign_senders(held)]


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=7), ranks=st.integers(1, 3))
def test_ranks_that_hold_the_same_share_the_sending(sizes, ranks):
    """Within 4/3 - 1/3m of the least, found by trying all: Graham 1969, "Bounds on multiprocessing timing anomalies"."""
    least = min(
        max(sum(size for size, own in zip(sizes, chosen, strict=True) if own == rank) for rank in range(ranks))
        for chosen in product(range(ranks), repeat=len(sizes))
    )
    loads = loads_of([[whole(f"t{n}", size) for n, size in enumerate(sizes)]] * ranks)
    assert max(loads) <= least * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def test_pieces_that_one_rank_holds_are_counted_first():
    shared, own = whole("shared", 10), whole("own", 9)
    assert loads_of([[shared, own], [shared]]) == [9, 10]


@given(divided=divided_tensors(), data=st.data())
def test_a_piece_that_is_missing_is_noticed_before_anything_is_loaded(divided, data):
    tensors, pieces = divided
    missing = data.draw(st.sampled_from(pieces))
    if missing.size == missing.whole:
        return  # the whole tensor: the receiving model notices that it lacks it
    left = [piece for piece in pieces if piece != missing]
    with pytest.raises(ValueError, match=missing.name):
        assign_senders([left])
    with raises_with(WeightsError):
        next(assemble_tensors([(piece, cut(tensors, piece)) for piece in left]))


@settings(max_examples=20, deadline=None)
@given(divided=divided_tensors(), ranks=st.integers(1, 4))
def test_an_update_of_pieces_arrives(tmp_path_factory, divided, ranks):
    tensors, pieces = divided
    held = [pieces[rank::ranks] for rank in range(ranks)]
    folder = tmp_path_factory.mktemp("pieces")
    parts = []
    for rank, own in enumerate(held):
        if own:
            (folder / f"{rank}").mkdir()
            # One process stands for all ranks: each has a channel of its own.
            channel = open_channel(TransferContext(folder / f"{rank}"))
            parts.append(SentPieces(channel.send(((p.name, cut(tensors, p)) for p in own), 7), tuple(own)))
    update = join_updates(7, parts)
    assert update.sent == update.manifest.size == sum(part.update.sent for part in parts)
    together = dict(receive_weights(CHANNELS.resolve("shared_memory"), update))
    assert together.keys() == tensors.keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in tensors.items())


def test_digest_of_an_update_depends_on_every_piece(tmp_path):
    def digest(number, values):
        (tmp_path / f"{number}").mkdir()
        parts = []
        for rank in range(2):
            (tmp_path / f"{number}" / f"{rank}").mkdir()
            channel = open_channel(TransferContext(tmp_path / f"{number}" / f"{rank}"))
            piece = Piece("t", (rank,), (1,), (2,))
            parts.append(SentPieces(channel.send([("t", torch.tensor(values[rank : rank + 1]))], 1), (piece,)))
        return join_updates(1, parts).manifest.digest

    found = [digest(number, values) for number, values in enumerate(([1.0, 2.0], [1.0, 2.0], [1.0, 3.0], [2.0, 1.0]))]
    assert found[0] == found[1] and len(set(found)) == 3


def test_a_part_with_a_wrong_byte_is_refused(tmp_path):
    pieces = [Piece("t", (rank,), (1,), (2,)) for rank in range(2)]
    parts = []
    for rank, piece in enumerate(pieces):
        (tmp_path / f"{rank}").mkdir()
        channel = open_channel(TransferContext(tmp_path / f"{rank}"))
        parts.append(SentPieces(channel.send([("t", torch.ones(1))], 1), (piece,)))
    update = join_updates(1, parts)
    with open(parts[1].update.location, "r+b") as file:
        file.write(b"!")
    with raises_with(WeightsError):
        next(receive_weights(CHANNELS.resolve("shared_memory"), update))
