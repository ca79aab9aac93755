"""Dropout of adapters whose masks are functions of the text.

The mask of a token follows from the seed, the number of the update, the layer, and the tokens up to this one. So it is the same
on every mesh, in every pack, and when a layer is computed again; samples that share a prefix share its masks.
"""

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from antiphon.core.errors import UnsupportedError
from antiphon.core.types import Pack

BASE = 0x9E3779B97F4A7C15  # of the polynomial that is a text's hash, modulo 2^64


class TextDropout(nn.Module):
    """Sets a share of its input to 0 and scales up the rest, while it has keys.

    Attributes:
        keys: A hash of each row of the input, [n] of int32; None leaves the input as it is.
        first: Number of the first column of the input, where this rank has some of the columns.
    """

    keys: torch.Tensor | None = None
    first = 0

    def __init__(self, rate: float, layer: str) -> None:
        """Drop the share `rate`; layers of different names have different masks."""
        super().__init__()
        self.rate = rate
        self._layer = zlib.crc32(layer.encode()) - (1 << 31)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input [..., C] with its dropped elements set to 0; the dimensions before the last have n elements."""
        if self.keys is None:
            return x
        if x.numel() != len(self.keys) * x.shape[-1]:
            message = (
                f"learner.lora.dropout: an adapted layer has {x.numel() // x.shape[-1]} rows of {len(self.keys)} tokens"
            )
            raise UnsupportedError(message, key="learner.lora.dropout", value=self.rate)
        columns = torch.arange(self.first, self.first + x.shape[-1], dtype=torch.int32, device=x.device)
        hashes = _mix(_mix(self.keys ^ self._layer)[:, None] ^ _mix(columns))
        dropped = hashes < int(self.rate * (1 << 32)) - (1 << 31)
        return (x / (1 - self.rate)).masked_fill(dropped.view(x.shape), 0.0)


def _mix(hashes: torch.Tensor) -> torch.Tensor:
    """Spread int32 hashes evenly, in place. Source: Appleby, the finaliser of MurmurHash3."""
    hashes ^= (hashes >> 16) & 0xFFFF  # without the bits that a shift makes of the sign
    hashes *= 0x85EBCA6B - (1 << 32)
    hashes ^= (hashes >> 13) & 0x7FFFF
    hashes *= 0xC2B2AE35 - (1 << 32)
    hashes ^= (hashes >> 16) & 0xFFFF
    return hashes


def add_dropout(model: nn.Module, rate: float, adapter: str) -> None:
    """Give all adapters this dropout, which drops nothing until it has keys."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout[adapter] = TextDropout(rate, name)


def hash_texts(pack: Pack, seed: int, update: int) -> NDArray[np.int32]:
    """Return a hash of the text up to and including each token, [T], that differs from one update to the next."""
    powers = np.cumprod(np.full(len(pack.tokens), BASE, dtype=np.uint64))
    texts: list[tuple[NDArray[np.uint64], int]] = []  # that end with each span: the hash, and the number of tokens
    found = []
    for tokens, parent in zip(np.split(pack.tokens, np.cumsum(pack.lengths)[:-1]), pack.parents, strict=True):
        before, depth = texts[parent] if parent >= 0 else (np.zeros(1, dtype=np.uint64), 0)
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers[depth : depth + len(tokens)]
        found.append(before + np.cumsum(terms, dtype=np.uint64))
        texts.append((np.concatenate([before, found[-1]])[-1:], depth + len(tokens)))
    hashes = np.concatenate(found)
    hashes ^= np.random.SeedSequence([seed, update]).generate_state(1, np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # Steele et al. 2014, SplitMix
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    return (hashes >> np.uint64(32)).astype(np.uint32).view(np.int32)
