"""Expecting errors by their type and their fields, so that tests leave the wording of messages free."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from antiphon.core.errors import AntiphonError


@contextmanager
def raises_with(
    kind: type[AntiphonError], *, match: str | None = None, **fields: Any
) -> Iterator[pytest.ExceptionInfo[AntiphonError]]:
    """Expect an error of a type whose fields have these values.

    Args:
        kind: Type of the error.
        match: Pattern of the one word of the message that matters, such as a command that it must name.
        fields: Attributes of the error with their values; a path is compared as text.
    """
    with pytest.raises(kind, match=match) as caught:
        yield caught
    wanted = {name: str(value) if name == "path" else value for name, value in fields.items()}
    found = {name: getattr(caught.value, name) for name in fields}
    assert found == wanted, f"fields {found} of {caught.value!r}, expected {wanted}"
