"""A model of transformers that is in memory, as what a run begins with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.core.fingerprint import digest_parts


class ModelObject:
    """A model and its tokenizer; called as a function that writes a model, see `model.path`."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def __call__(self, directory: Path, seed: int) -> None:
        """Write both to a directory."""
        self._model.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)

    def digest(self) -> str:
        """Return 12 hexadecimal digits of configuration, vocabulary and weights."""
        return digest_parts(self._parts())

    def _parts(self) -> Iterator[str | memoryview]:
        import torch

        yield self._model.config.to_json_string(use_diff=True)
        yield repr(sorted(self._tokenizer.get_vocab().items()))
        for name, tensor in sorted(self._model.state_dict().items()):
            yield name
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            yield memoryview(flat.view(torch.uint8).numpy())
