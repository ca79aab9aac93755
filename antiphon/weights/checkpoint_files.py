"""The weight files of a model directory. Importing it imports no torch."""

import json
from pathlib import Path


def list_weight_files(model: Path) -> list[Path]:
    """Return the files of a model directory that hold its weights, as transformers chooses them.

    Other files beside them may hold the same weights under other names.
    """
    whole, index = model / "model.safetensors", model / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole] if whole.is_file() else []
    return [model / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
