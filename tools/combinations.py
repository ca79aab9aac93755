"""Check the table of learners and settings in `docs/support.md` against the checks of configurations; `--write` updates it.

A cell is what a run with this setting says before it starts: `yes`, or the reason why it is refused.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from antiphon.core.config import parse
from antiphon.learning.config import LearnerConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"
TABLE = re.compile(r"(?<=<!-- learners -->\n).*?(?=<!-- end of learners -->)", re.DOTALL)
LEARNERS = {"torch": "torch", "deepspeed": "DeepSpeed", "megatron": "Megatron-Core"}
PLAIN: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
MIXTURE = {**PLAIN, "model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True}
SEEING = {**PLAIN, "vision_config": {}}
# What is asked for, the settings that ask for it, and the model.
SETTINGS: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("`mesh.shard`", {"mesh": {"shard": 2}}, PLAIN),
    ("`mesh.replicate`", {"mesh": {"replicate": 2, "shard": 2}}, PLAIN),
    ("`mesh.tensor`", {"mesh": {"tensor": 2}}, PLAIN),
    ("`mesh.tensor`, a mixture of experts", {"mesh": {"tensor": 2}}, MIXTURE),
    ("`mesh.pipeline`", {"mesh": {"pipeline": 2}}, PLAIN),
    ("`mesh.pipeline_chunks`", {"mesh": {"pipeline": 2, "pipeline_chunks": 2}}, PLAIN),
    ("`mesh.context`", {"mesh": {"context": 2}}, PLAIN),
    ("`mesh.context_attention: keys`", {"mesh": {"context": 2, "context_attention": "keys"}}, PLAIN),
    ("`mesh.expert`", {"mesh": {"shard": 2, "expert": 2}}, MIXTURE),
    ("`mesh.context` with `mesh.expert`", {"mesh": {"shard": 2, "expert": 2, "context": 2}}, MIXTURE),
    ("`lora`", {"lora": {}}, PLAIN),
    ("`lora.dropout`", {"lora": {"dropout": 0.1}}, PLAIN),
    ("`lora.modules_to_save`", {"lora": {"modules_to_save": ["lm_head"]}}, PLAIN),
    ("`lora.quantize: nf4`", {"lora": {"quantize": "nf4"}}, PLAIN),
    ("`freeze`", {"freeze": ["lm_head.*"]}, PLAIN),
    ("`optimizer.moments: 8bit`", {"optimizer": {"moments": "8bit"}}, PLAIN),
    ("`gradient_checkpointing`", {"gradient_checkpointing": True}, PLAIN),
    ("`activation_offload`", {"gradient_checkpointing": True, "activation_offload": True}, PLAIN),
    ("`cpu_offload`", {"cpu_offload": True}, PLAIN),
    ("a vision-language model", {}, SEEING),
)


def find_refusals(kind: str, settings: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why a kind of learner refuses settings for a model, from its config.json."""
    base = {"mesh": {"shard": 2}} if kind == "deepspeed" else {}  # which trains on several ranks only
    mesh = {**base.get("mesh", {}), **settings.get("mesh", {})}
    learner = parse(LearnerConfig, {**settings, "kind": kind, "mesh": mesh})
    yield from (f"`{key}` {message}" for key, message in (*learner.problems(), *learner.incompatibilities(shape)))


def make_table() -> str:
    """Return the table in Markdown."""
    rows = [["setting of `learner`", *LEARNERS.values()], ["---"] * (1 + len(LEARNERS))]
    rows += [
        [name, *("; ".join(find_refusals(kind, settings, shape)) or "yes" for kind in LEARNERS)]
        for name, settings, shape in SETTINGS
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    """Compare the table with the page, or write it; exit 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update the table of the page")
    write, page = parser.parse_args().write, PAGE.read_text(encoding="utf-8")
    updated = TABLE.sub(lambda _: make_table(), page)
    if write:
        PAGE.write_text(updated, encoding="utf-8")
    same = write or updated == page
    print("the table is as the checks are" if same else f"{PAGE.name}: run {Path(__file__).name} --write")
    sys.exit(not same)


if __name__ == "__main__":
    main()
