"""What one card can train, as `antiphon plan` says: models whose learner and engine use it in turns, in full and as adapters.

    python benchmarks/cards.py

Prompts of 256 tokens, responses of 1,024, 32 slots, packs of 4,096 tokens, all in bfloat16. Nothing of it has run on the cards:
the estimate of a learner's memory was compared with torch's tracker (`memory_plan.py`).

Figures are 2 for a run that fits as it is, 1 for one that fits with changes of its configuration, a half if
`learner.cpu_offload` is one of them, which is tried last and may take 128 GB of host memory, and 0 for one that does not fit.
"""

import json
import tempfile
from pathlib import Path

from _common import ROOT, table, write_result
from memory_plan import MODELS

from antiphon.core.config import load
from antiphon.run.config import RunConfig
from antiphon.simulate.device_memory import host_memory
from antiphon.simulate.devices import DEVICES
from antiphon.simulate.fitting import find_changes
from antiphon.simulate.model_facts import ModelFacts
from antiphon.simulate.model_shape import Architecture

MEASURES = ("antiphon.simulate.device_memory", "antiphon.simulate.fitting", "antiphon.simulate.model_shape")
RECIPE = ROOT / "recipes" / "clusters" / "dense_7b_8gpu_colocated.yaml"
ONE_CARD = (
    "placement={learner: 'gpu:0', engine: 'gpu:0'}",
    "learner={dtype: bfloat16, tokens_per_pack: 4096}",
    "engine={kind: native, slots: 32, dtype: bfloat16}",
    "rollout.sampling.max_tokens=1024",
)
ADAPTERS = "learner.lora={rank: 32}"
PROMPT_TOKENS = 256
HOST_MEMORY = 128e9  # bytes
CARDS = ("rtx4090", "l40s", "h100", "h200")
DENSE = [name for name, (shape, _) in MODELS.items() if "num_experts" not in shape]


def plan(folder: Path, card: str, way: str) -> tuple[float, list[str]]:
    """Return the figure of a run, and the changes with which it fits."""
    given = [*ONE_CARD, *([ADAPTERS] if way == "lora" else [])]
    model = ModelFacts(shape=Architecture.read(folder), prompt_tokens=(PROMPT_TOKENS,))

    def load_changed(changes: list[str]) -> RunConfig:
        return load(RECIPE, [*given, *changes], model=RunConfig)

    changes = find_changes(model, load_changed, DEVICES[card])
    if changes is None or (way == "full" and any("lora" in change for change in changes)):  # which would be another way
        return 0, []
    if sum(host_memory(model, load_changed(changes)).values()) > HOST_MEMORY:
        return 0, []
    if "learner.cpu_offload=true" in changes:
        return 0.5, changes
    return (1, changes) if changes else (2, [])


def main() -> None:
    """Plan each model on each card."""
    figures: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in DENSE:
            folder = Path(scratch) / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(MODELS[name][0]), encoding="utf-8")
            for way in ("full", "lora"):
                for card in CARDS:
                    figure, changes = plan(folder, card, way)
                    figures[f"{name}_{way}_{card}"] = figure
                    rows.append(
                        [name, way, card, "with " + " ".join(changes) if changes else "yes" if figure else "no"]
                    )
    print(table(["model", "trained", "card", "fits"], rows))
    print("written:", write_result("cards", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
