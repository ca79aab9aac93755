"""TRL's README: mathematics, checked by TRL's own `accuracy_reward`, which reads the column `solution`."""

import sys

from arguments import arguments, report
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset(sys.argv[1], split="train")

trainer = GRPOTrainer(
    model=sys.argv[2],
    reward_funcs=accuracy_reward,
    args=GRPOConfig(**arguments(max_completion_length=6, learning_rate=1e-4)),
    train_dataset=dataset,
)
trainer.train()
report(trainer)
