"""No option changes its default or its bounds unnoticed: results depend on both, and `options.txt` has them all.

After a change that is meant: python tests/unit/test_options.py > tests/unit/options.txt, and read the difference.
"""

import json
from pathlib import Path

import pytest

from antiphon.offline.config import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig
from antiphon.run.config import RunConfig

MODELS = {"train": RunConfig, "sft": OfflineConfig, "dpo": DpoConfig, "reward-model": RewardModelConfig}
MODELS |= {"distill": DistillConfig}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
BOUNDS |= {"minLength": "length >=", "minItems": "items >=", "maxItems": "items <="}
OPTIONS = Path(__file__).with_name("options.txt")


def options_of(schema, definitions, path="", given=None):
    """Yield the dotted path of each option that is no section, and its default and bounds in words.

    `given` is its default in the default of the section around it, which holds.
    """
    if given is not None:
        schema = schema | {"default": given}
    branches = [
        definitions[each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in alternatives(schema)
    ]
    for branch in branches:
        for name, option in branch.get("properties", {}).items():
            inner = (schema.get("default") or {}).get(name)
            yield from options_of(option, definitions, f"{path}.{name}".strip("."), inner)
        if "$ref" in (items := branch.get("items", {})):
            yield from options_of(items, definitions, f"{path}[]")
    if not any("properties" in branch for branch in branches):
        items = [item for each in branches for item in [each.get("items", {}), *each.get("prefixItems", [])]]
        found = {words: each[name] for each in [*branches, *items] for name, words in BOUNDS.items() if name in each}
        default = json.dumps(schema["default"]) if "default" in schema else "required"
        yield path, ", ".join([default, *(f"{words} {bound}" for words, bound in found.items())])
    for kind in schema.get("kinds", {}).values():
        yield from options_of(kind, {}, path)


def alternatives(schema):
    return schema.get("anyOf") or schema.get("allOf") or schema.get("oneOf") or [schema]


def all_options(command):
    schema = MODELS[command].model_json_schema()
    found = dict(options_of(schema, schema.get("$defs", {})))
    return [f"{command}: {path} = {text}" for path, text in found.items()]


@pytest.mark.parametrize("command", MODELS)
def test_no_option_changes_unnoticed(command):
    expected = OPTIONS.read_text(encoding="utf-8").splitlines()
    assert all_options(command) == [line for line in expected if line.startswith(f"{command}: ")]


if __name__ == "__main__":
    print("\n".join(line for command in MODELS for line in all_options(command)))
