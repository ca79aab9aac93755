"""TRL's quick start of GRPO: a reward for completions of many different characters, in conversations."""

import sys

from arguments import arguments, report
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset(sys.argv[1], split="train")


def reward_num_unique_chars(completions, **kwargs):
    completion_contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in completion_contents]


trainer = GRPOTrainer(
    model=sys.argv[2],
    reward_funcs=reward_num_unique_chars,
    args=GRPOConfig(**arguments(max_completion_length=24)),
    train_dataset=dataset,
)
trainer.train()
report(trainer)
