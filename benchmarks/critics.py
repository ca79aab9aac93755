"""What critics cost: a step of SmolLM2-135M-Instruct with one of the actor's size, with two small ones, and with none.

    python benchmarks/critics.py --rounds 2 --steps 2

The same prompts, lengths and rewards for all: 4 prompts x 8 siblings x exactly 64 tokens a step, synchronous, each process with
one thread. `ppo` has one critic that begins as the actor; `asyppo` two of an eighth of its parameters (of random weights:
neither time nor memory asks what a critic has learned), each of which learns from half of the responses; `grpo` none. They
run one after the other, and again in each round; the first step of each run is left out. Memory is the peak of the summed
proportional set size of all processes.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from _common import WHOLE_RUN, smollm2, table, write_result
from step import Measured, endless_model, our_command, run
from transformers import AutoConfig, AutoModelForCausalLM

MEASURES = (*WHOLE_RUN, "antiphon.learning.objectives.critic")

WORK = ["rollout.groups_per_step=4", "engine.replicas=1", "engine.threads=1", "learner.threads=1", "engine.slots=32"]
SMALL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 16}
SMALL |= {"num_attention_heads": 3, "num_key_value_heads": 1}


def small_model(folder: Path) -> int:
    """SmolLM2's architecture, narrower and of fewer layers, with its tokenizer, in `folder`; returns its parameters."""
    config = AutoConfig.from_pretrained(smollm2(), **SMALL)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for file in smollm2().glob("*token*"):
        (folder / file.name).symlink_to(file)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a run")
    parser.add_argument("--warm", type=int, default=1, help="steps before them")
    parser.add_argument("--tokens-per-pack", type=int, default=400)
    parser.add_argument("--logits-chunk", type=int, default=128)
    parser.add_argument("--learner-threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch) / "small"
        parameters = small_model(small)
        systems = {
            "grpo": ["algorithm=grpo"],
            "ppo": ["algorithm=ppo", "critic={count: 1}"],
            "asyppo": ["algorithm=asyppo", f"critic={json.dumps({'path': str(small), 'count': 2, 'disjoint': True})}"],
        }
        measured = {name: Measured() for name in systems}
        for number in range(args.rounds):
            for name, settings in systems.items():
                folder = Path(scratch) / f"{name}-{number}"
                folder.mkdir()
                endless_model(folder / "model")
                command, metrics = our_command(folder, args, 0)
                for line in run([*command, *WORK, *settings], metrics, folder / "log", args.warm, measured[name]):
                    assert line["learner/grad_norm"] > 0, line
                    measured[name].steps.append(line["step/seconds"])
                print(f"round {number}  {name:6}  {measured[name].steps[-1]:.1f} s a step", flush=True)
    figures: dict[str, float] = {"small_critic_parameters": parameters}
    for name, system in measured.items():
        figures |= {f"{name}_step_seconds": statistics.median(system.steps), f"{name}_peak_gib": system.gibibytes}
    for name in ("grpo", "asyppo"):
        for what in ("step_seconds", "peak_gib"):
            figures[f"{what}_{name}_over_ppo"] = figures[f"{name}_{what}"] / figures[f"ppo_{what}"]
    print(table(["figure", ""], [[key, f"{value:.4g}"] for key, value in figures.items()]))
    print("written:", write_result("critics", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
