"""Array types, and the checks of lengths that records make on construction."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


def require_length(owner: str, length: int, **arrays: NDArray[Any]) -> None:
    """Raise `ValueError` unless each array is one-dimensional and has `length` elements."""
    for name, array in arrays.items():
        if array.ndim != 1 or len(array) != length:
            raise ValueError(f"{owner}.{name} has shape {array.shape}, expected ({length},)")


def is_within(indices: NDArray[Any], array: NDArray[Any]) -> bool:
    """Return True if each of `indices` is an index of `array`."""
    return bool(((indices >= 0) & (indices < len(array))).all())
