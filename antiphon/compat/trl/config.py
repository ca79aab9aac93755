"""Arguments of TRL's trainer, ours or TRL's own object, as the fields that a user has set."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from antiphon.compat.trl.options import FORMER, MAPPED, NO_EFFECT, REFUSED
from antiphon.core.errors import ConfigError

MAIN = "GRPOConfig"  # of which fields are keys in errors


class GRPOConfig:
    """TRL's `GRPOConfig` without TRL: its fields by name, with its defaults.

    Raises:
        ConfigError: There is no such field, or it has no counterpart here.
    """

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        self.fields = {"output_dir": output_dir, **fields}
        for name, value in self.fields.items():
            check_field(name, value)

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        if name in MAPPED:
            return MAPPED[name].default
        raise AttributeError(f"{MAIN} has no field {name!r} that is set or has a counterpart")

    def __repr__(self) -> str:
        return f"{MAIN}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


def check_field(name: str, value: Any) -> None:
    """Raise `ConfigError` if a field does not exist, or is refused."""
    if name in MAPPED or name in NO_EFFECT:
        return
    key = f"{MAIN}.{name}"
    if name in FORMER:
        raise ConfigError(f"TRL has no such field any more: {FORMER[name]}", key=key, value=value, valid=sorted(MAPPED))
    if name in REFUSED:
        raise ConfigError(f"is not supported: {REFUSED[name]}", key=key, value=value, valid=sorted(MAPPED))
    nearest = difflib.get_close_matches(name, [*MAPPED, *NO_EFFECT, *REFUSED], n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    message = f"there is no such field. {hint}Valid are {', '.join(sorted(MAPPED))}"
    raise ConfigError(message, key=key, value=value, valid=sorted(MAPPED), suggestions=nearest)


def read_fields(args: Any) -> dict[str, Any]:
    """Return all mapped fields, those that are not set with TRL's defaults.

    Args:
        args: Our `GRPOConfig`, TRL's, a mapping, or None.

    Raises:
        ConfigError: A field is unknown or refused, or `args` is none of these.
    """
    if args is None:
        given: Mapping[str, Any] = {}
    elif isinstance(args, GRPOConfig):
        given = args.fields
    elif isinstance(args, Mapping):
        given = GRPOConfig(**args).fields
    elif dataclasses.is_dataclass(args) and not isinstance(args, type):
        given = _changed_fields(args)
    else:
        message = f"is {type(args).__name__}; give a GRPOConfig of Antiphon or TRL, or a mapping of its fields"
        raise ConfigError(message, key="args", value=type(args).__name__)
    defaults = {name: option.default for name, option in MAPPED.items()}
    return defaults | {name: _plain(value) for name, value in given.items() if name in MAPPED}


def _changed_fields(args: Any) -> dict[str, Any]:
    """Return the fields of TRL's object that are mapped or differ from its defaults, after a check of each."""
    default = type(args)(output_dir=args.output_dir, use_cpu=True, bf16=False)  # which every machine can
    found = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in MAPPED:
            found[field.name] = value
        elif value != getattr(default, field.name):
            check_field(field.name, value)
    if found.get("generation_batch_size") is not None:
        found["steps_per_generation"] = None  # TRL sets both, from each other
    return found


def _plain(value: Any) -> Any:
    """Return the value of an enumeration, or any other value as it is."""
    return getattr(value, "value", value) if type(value).__module__.startswith("transformers") else value
