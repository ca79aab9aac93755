"""Named random streams: each is derived from the run's seed and a path of names, so no two parts share one by accident."""

import hashlib

import numpy as np


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream `names` of the run seeded with `seed`; equal inputs give equal seeds on every machine."""
    path = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator for the stream `names` of the run seeded with `seed`."""
    return np.random.Generator(np.random.PCG64(derive(seed, *names)))
