"""TRL's first GRPO example: completions of plain prompts are to have 20 characters."""

import sys

from arguments import arguments, report
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset(sys.argv[1], split="train")


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


training_args = GRPOConfig(**arguments(max_completion_length=32))
trainer = GRPOTrainer(model=sys.argv[2], reward_funcs=reward_len, args=training_args, train_dataset=dataset)
trainer.train()
report(trainer)
