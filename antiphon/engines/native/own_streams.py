"""Checks of the streams that a subclass of the native engine computes (`NativeEngine.compute_streams`)."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.core.types import MIXED_CACHE, STREAMS, Streams, StreamSpec


def copy_streams(found: Any, rows: int, expected: Collection[StreamSpec] | None) -> dict[StreamSpec, NDArray[Any]]:
    """Return copies of the arrays that a user's method returned: sampling overwrites the logits that they may be views of.

    Args:
        found: What the method returned.
        rows: Number of tokens.
        expected: The streams of earlier calls; None at the first call.

    Raises:
        TypeError: It is no dictionary of numpy arrays by `StreamSpec`.
        ValueError: An array has another dtype, shape or length; or a stream is Antiphon's own, or not that of earlier calls.
    """
    if not isinstance(found, Mapping):
        raise TypeError(f"compute_streams must return a dictionary, and returned a {type(found).__name__}")
    for spec, array in found.items():
        if not isinstance(spec, StreamSpec) or not isinstance(array, np.ndarray):
            kinds = f"{type(spec).__name__} and {type(array).__name__}"
            raise TypeError(f"compute_streams must return numpy arrays by StreamSpec, and returned {kinds}")
        if spec.name in STREAMS:
            raise ValueError(f"stream {spec.name!r} is one of Antiphon's own: give yours another name")
    if expected is not None and {*found} != {*expected}:
        names, others = (sorted(spec.name for spec in specs) for specs in (found, expected))
        raise ValueError(
            f"compute_streams returned the streams {names}, and {others} before: it must be the same at every call"
        )
    Streams({**found, MIXED_CACHE: np.zeros(rows, np.bool_)})
    return {spec: np.array(array) for spec, array in found.items()}
