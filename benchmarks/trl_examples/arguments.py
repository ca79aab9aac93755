"""The arguments that all examples share, and how they report; read from the command line after data and model."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")


def arguments(max_completion_length: int, learning_rate: float = 1e-3) -> dict[str, Any]:
    """The fields of both sides' `GRPOConfig`."""
    output, seed, steps = sys.argv[3:6]
    return {
        "output_dir": output,
        "seed": int(seed),
        "max_steps": int(steps),
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": max_completion_length,
        "learning_rate": learning_rate,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


def report(trainer: Any) -> None:
    """Write the mean reward of each step."""
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    Path(sys.argv[6]).write_text(json.dumps(rewards), encoding="utf-8")
