"""TRL's side of `shared_prefix.py`, which calls it with the Python of TRL's own environment.

    python benchmarks/shared_prefix_trl.py SPECIFICATION.json

Prints one JSON line: the median seconds from the moment a step has its tokens to the end of its update, and peak bytes.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


class Clock(TrainerCallback):
    """Seconds of each step from `begin` to its end."""

    def __init__(self) -> None:
        self.began = 0.0
        self.seconds: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimiser has moved."""
        self.seconds.append(time.perf_counter() - self.began)


def main() -> None:
    """Train on the same group again and again."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    siblings, clock = len(spec["completions"]), Clock()

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        clock.began = time.perf_counter()
        logprobs = [[-10.8] * len(tokens) for tokens in spec["completions"]]
        return {
            "prompt_ids": [spec["prompt"]] * siblings,
            "completion_ids": spec["completions"],
            "logprobs": logprobs,
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        found: list[float] = spec["rewards"]
        return found

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=spec["steps"] + 1,
        per_device_train_batch_size=siblings,
        gradient_accumulation_steps=1,
        num_generations=siblings,
        max_completion_length=len(spec["completions"][0]),
        temperature=1.0,
        learning_rate=1e-6,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=spec["model"],
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": "w1"}] * 8),
        rollout_func=rollout,
        callbacks=[clock],
    )
    assert next(trainer.model.parameters()).dtype == torch.float32
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": median(clock.seconds[1:]), "peak": peak}))


if __name__ == "__main__":
    main()
