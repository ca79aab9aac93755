"""TRL's example of several tasks: each reward function is for one task, and returns None for the other's rows."""

import sys

from arguments import arguments, report
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset(sys.argv[1], split="train")


def digits_reward_func(prompts, completions, task, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [
        sum(map(str.isdigit, text)) / 16 if kind == "digits" else None for text, kind in zip(texts, task, strict=True)
    ]


def signs_reward_func(prompts, completions, task, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [
        sum(not each.isalnum() for each in text) / 16 if kind == "signs" else None
        for text, kind in zip(texts, task, strict=True)
    ]


trainer = GRPOTrainer(
    model=sys.argv[2],
    reward_funcs=[digits_reward_func, signs_reward_func],
    args=GRPOConfig(**arguments(max_completion_length=16)),
    train_dataset=dataset,
)
trainer.train()
report(trainer)
