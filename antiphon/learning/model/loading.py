"""Hugging Face decoder models: loading, and the one place that knows their parts."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from antiphon.core.decoder_checks import require_separable_sequences
from antiphon.core.errors import DataError, UnsupportedError
from antiphon.core.vision import attention_names, decoder_of, model_class


def resolve_device(name: str) -> torch.device:
    """Return the device; `auto` is the GPU where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def load_model(
    path: str,
    *,
    attention: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    kind: Any = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a model from a directory or Hugging Face id, without dropout.

    Args:
        path: Directory or Hugging Face id.
        attention: Name of the attention implementation.
        device: Device of the weights. On `meta`, tensors that the files hold get no memory yet; others begin on the CPU, with
            the same values as on any device.
        dtype: Precision of the weights.
        kind: Class of the model; by default a causal language model, or the vision-language model that it is.
        options: Options of the model's configuration.

    Raises:
        DataError: There is no such model.
        UnsupportedError: The model cannot be of this kind, or cannot compute sequences that lie end to end.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        message = f"model {path!r}: the directory has no config.json, so it is not a Hugging Face model"
        raise DataError(message, path=Path(path) / "config.json")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
        kind, attention_of_parts = kind or model_class(config), attention_names(config, attention)
        _disable_dropout(config)
        if device.type == "meta":
            model: PreTrainedModel = _without_memory(
                path, kind, config, dtype=dtype, attn_implementation=attention_of_parts
            )
        else:
            model = kind.from_pretrained(
                path, config=config, dtype=dtype, attn_implementation=attention_of_parts, trust_remote_code=False
            ).to(device)
    except ValueError as error:
        name = kind.__name__ if kind else "language model"
        raise UnsupportedError(f"model {path!r} cannot be a {name}: {str(error).splitlines()[0]}") from error
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"model {path!r} cannot be loaded: {reason}", path=path) from error
    require_separable_sequences(model)
    return model


def _disable_dropout(config: PreTrainedConfig) -> None:
    """Set every rate of dropout, and every jitter of routers, to 0: log-probs must be those that tokens are sampled with.

    Evaluation mode would do that too, but gradient checkpointing works in training mode alone.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _disable_dropout(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)


def build_on_meta(directory: Path) -> PreTrainedModel:
    """The causal language model in a directory, without memory: nothing but its config.json is read.

    `UnsupportedError` if it is none.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with torch.device("meta"):
            model: PreTrainedModel = model_class(config).from_config(config)
    except ValueError as error:
        raise UnsupportedError(f"model {str(directory)!r}: {str(error).splitlines()[0]}") from error
    return model


def _without_memory(path: str, kind: Any, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    if getattr(config, "quantization_config", None):
        raise UnsupportedError(f"model {path!r} is quantized: several ranks load float weights alone")
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, **options)
    files = Checkpoint(path, type(model), model.config)
    for name, other in files.find_untied():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, torch.nn.Parameter(torch.empty_like(model.get_parameter(other))))
    for name, parameter in model.named_parameters():
        if name in files:
            parameter._is_hf_initialized = True  # else it would be drawn, and what is drawn after it be another
        else:
            allocate(parameter, torch.device("cpu"))
    buffers = dict(model.named_buffers())
    for buffer in buffers.values():
        allocate(buffer, torch.device("cpu"))
    model.initialize_weights()
    for name in buffers.keys() & files.keys():
        buffers[name].copy_(files[name])
    model._weight_conversions = files.conversions  # by which it is saved
    return model


def allocate(tensor: torch.Tensor, device: torch.device) -> None:
    """Give memory to a tensor on the device `meta`. It stays the same object, whoever shares it."""
    found = torch.empty_like(tensor, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        found = torch.nn.Parameter(found, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, found)


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors in a model's safetensors files, by the names of its parameters and buffers.

    In the files they may have other names and be in pieces. Each is read on access, in the precision of the file; one that is
    stored as the model has it is mapped into memory and read where it is accessed.
    """

    def __init__(self, path: str | Path, kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
        """Open the files of a model.

        Raises:
            DataError: They cannot be read.
        """
        self.path = path
        with torch.device("meta"):
            self._model = kind(copy.deepcopy(config))
        self._own = self._model.state_dict()
        try:
            files: list[Any] = [safe_open(file, framework="pt") for file in _safetensors(str(path))]
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"model {str(path)!r} cannot be read: {reason}", path=path) from error
        self._files = {key: file for file in files for key in file.keys()}  # noqa: SIM118 - which is no mapping
        transforms = get_model_conversion_mapping(self._model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        # Of each parameter: the first that is made of the same tensors, how, and of which.
        self._sources: dict[str, tuple[str, WeightConverter | None, list[tuple[str, str]]]] = {}
        self._strange: list[str] = []
        for key in sorted(self._files, key=dot_natural_key):
            self._place(key)
        self.conversions = [one for one in transforms if one.was_used()]
        self._tied = dict(self._model.all_tied_weights_keys)
        for one, other in [*self._tied.items(), *((other, one) for one, other in self._tied.items())]:
            if one not in self._sources and other in self._sources:
                self._sources[one] = self._sources[other]

    def _place(self, key: str) -> None:
        """Find the parameter that a tensor of the files belongs to, as transformers does."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._own)
        if name not in self._own and key in self._own:
            name, pattern = rename_source_key(key, [], [], prefix, self._own)
        if name not in self._own:
            self._strange.append(key)
            return
        converter = self._by_pattern.get(pattern)
        _, _, parts = source = self._sources.setdefault(name, (name, converter, []))
        parts.append((pattern or key, key))
        first, *others = converter.target_patterns if converter else [name]
        for other in others:
            self._sources[name.replace(first, other)] = source

    def __getitem__(self, name: str) -> torch.Tensor:
        first, converter, parts = self._sources[name]
        if converter is None:
            tensor = self._read(parts[0][1])
        else:
            converter = copy.deepcopy(converter)
            for pattern, key in parts:
                converter.add_tensor(first, key, pattern, self._read(key))
            made = converter.convert(first, model=self._model, config=self._model.config)[name]
            tensor = made[0] if isinstance(made, list) else made
        if tensor.shape != self._own[name].shape:
            there, here = list(tensor.shape), list(self._own[name].shape)
            message = f"model {str(self.path)!r}: {name} has the shape {there}, and should have {here}"
            raise DataError(message, path=self.path)
        return tensor

    def _read(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[key].get_tensor(key)  # of no memory but the file's
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def stored_names(self, names: Iterable[str]) -> list[str]:
        """Return the names of the tensors in the files that hold a parameter, which may be tied and have several names.

        Raises:
            UnsupportedError: The files hold it in pieces.
        """
        sources = [self._sources[name] for name in names]
        for name, converter, _ in sources:
            if converter is not None:
                message = f"learner.lora.modules_to_save: files hold {name} in pieces, which cannot be trained beside adapters"
                raise UnsupportedError(message, key="learner.lora.modules_to_save", value=name)
        return sorted({key for _, _, parts in sources for _, key in parts})

    @property
    def incompatibilities(self) -> list[str]:
        """Names that the files lack, and names in them that the model lacks."""
        return sorted({*(self._own.keys() - self._sources.keys()), *self._strange})

    def find_untied(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of parameters that the configuration ties, and of which the files have two that differ."""
        for name, other in self._tied.items():
            apart = name in self and other in self and self._sources[name] is not self._sources[other]
            if apart and not torch.equal(self[name], self[other]):
                yield name, other


def _safetensors(path: str) -> list[str]:
    """Return the files with a model's weights."""
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if file := cached_file(path, SAFE_WEIGHTS_NAME, **options):
        return [file]
    if index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **options):
        files: list[str] = get_checkpoint_shard_files(path, index)[0]
        return files
    raise DataError(
        f"model {path!r} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}: each of several ranks "
        "reads its share from such files, which transformers' save_pretrained writes",
        path=path,
    )


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the language model head [V, H].

    Raises:
        UnsupportedError: The head does more than one matrix product.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise UnsupportedError(f"{type(model).__name__}: the language model head is not one matrix without a bias")
    for knob in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(model.config, knob, None) not in (None, 1, 1.0):
            raise UnsupportedError(f"{type(model).__name__}: {knob} is not supported")
    weight: torch.Tensor = head.weight
    return weight


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the layers of a decoder, in order."""
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UnsupportedError(f"{type(model).__name__} has no list of layers called layers, as other decoders have")
    return layers
