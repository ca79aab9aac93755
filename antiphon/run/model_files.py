"""Files of a model directory: its shape, its weights, and the number of its parameters."""

import json
import struct
from pathlib import Path
from typing import Any

from antiphon.core.errors import DataError
from antiphon.core.modelscope import modelscope_id
from antiphon.weights.checkpoint_files import list_weight_files

A_MODEL = "a directory, a Hugging Face id, or modelscope:OWNER/NAME"  # of paths that may not be functions


def is_function(path: str) -> bool:
    """Return True if the path of a model is package.module:function, which writes one."""
    return ":" in path and not modelscope_id(path)


def check_model_path(path: str) -> None:
    """Raise `DataError` unless `path` is an existing directory, an id of a hub, or package.module:function."""
    if ":" in path or Path(path).is_dir():
        return
    parts = path.split("/")
    if len(parts) > 2 or not all(part and not part.startswith((".", "~")) for part in parts):
        raise DataError(f"model {path!r}: there is no such directory", path=path)


def model_shape(model: Path) -> dict[str, Any]:
    """Return the language model's part of config.json in a model directory; `DataError` if the file is missing.

    Of a vision-language model it also has `vision_config`.
    """
    try:
        shape: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        message = f"model {str(model)!r} has no config.json that can be read, as Hugging Face models have"
        raise DataError(message, path=model / "config.json") from error
    return {**shape.get("text_config", shape), **{key: shape[key] for key in ("vision_config",) if key in shape}}


def check_weights(directory: Path) -> None:
    """Raise `DataError` if a model directory has a config.json and no weights."""
    if (directory / "config.json").is_file() and not {*directory.glob("*.safetensors"), *directory.glob("*.bin")}:
        raise DataError(
            f"model {str(directory)!r} has a config.json and no weights (*.safetensors): enough for `antiphon plan` and "
            "--dry-run, and for nothing else",
            path=directory,
        )


def count_parameters(path: str) -> int | None:
    """Return the number of parameters in a model directory, read from safetensors headers; None without such files."""
    files = list_weight_files(Path(path))
    total = 0
    for file in files:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for extent in tensor["shape"]:
                    count *= extent
                total += count
    return total if files else None
