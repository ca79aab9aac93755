"""TRL's side of `step.py`, which calls it with the Python of TRL's own environment: GRPO steps as its specification says.

    python benchmarks/step_trl.py SPECIFICATION.json

Appends one JSON line a finished step to the specification's `metrics`: seconds, and what shows that the step did the
work it was asked for.
"""

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]


class Clock(TrainerCallback):
    """Writes a line at the end of each step. The first step's seconds include the loading that it sets off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.perf_counter()
        self._seconds = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimiser has moved: that was one step."""
        now = time.perf_counter()
        self._seconds, self._began = now - self._began, now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """What the trainer says of the step just ended."""
        if logs and "completions/mean_length" in logs:
            line = {
                "seconds": self._seconds,
                "length": float(logs["completions/mean_length"]),
                "groups_without_spread": float(logs["frac_reward_zero_std"]),
                "tokens": float(logs["num_tokens"]),
                "grad_norm": float(logs["grad_norm"]),
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def spread(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """A number that differs between siblings, as good as at random: a checksum of the text."""
    return [zlib.crc32(messages[0]["content"].encode()) / 2**32 for messages in completions]


def main() -> None:
    """Train for the asked number of steps."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    logging.set_verbosity_error()
    samples, micro = spec["prompts_per_step"] * spec["group_size"], spec["micro_batch"]
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in spec["questions"]]
    config = GRPOConfig(
        output_dir=spec["output"],
        max_steps=spec["steps"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=spec["group_size"],
        max_completion_length=spec["tokens"],
        generation_kwargs={"min_new_tokens": spec["tokens"]},
        temperature=1.0,
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=spec["cuda"],
        gradient_checkpointing=spec["gradient_checkpointing"],
        use_cpu=not spec["cuda"],
        dataloader_pin_memory=spec["cuda"],
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=spec["model"],
        args=config,
        reward_funcs=spread,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock(Path(spec["metrics"]))],
    )
    assert next(trainer.model.parameters()).dtype == torch.float32
    trainer.train()


if __name__ == "__main__":
    main()
