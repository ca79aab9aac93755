"""Boards by number, and examples of how they are crossed: not well, so that there is something left to learn."""

from collections.abc import Iterator, Mapping
from typing import Any

from antiphon.seeds import derive, generator
from antiphon.tasks.base import Environment
from antiphon.tasks.environments import environment_factory
from antiphon.types import Prompt


def boards(split: str, number: int = 4000) -> Iterator[dict[str, str]]:
    """So many prompts without words: the seed of a board comes from its id."""
    for index in range(number):
        yield {"id": f"{split}-{index}", "prompt": ""}


def moves(
    split: str, environment: str, options: Mapping[str, Any], number: int = 4000, mistakes: float = 0.5
) -> Iterator[dict[str, str]]:
    """What a clumsy player does in each state that it comes to, on so many boards: the expert's move, or by mistake any."""
    make, nobody = environment_factory(environment, options), Prompt(id="", task="", messages=())
    for index in range(number):
        world: Environment = make(nobody)
        luck = generator(derive(0, split, "moves", index))
        state, _ = world.reset(derive(0, split, index))
        over = False
        while not over:
            move = luck.choice(world.actions()) if luck.random() < mistakes else world.expert()
            yield {"prompt": state, "response": str(move)}
            state, _, terminated, truncated, _ = world.step(str(move))
            over = terminated or truncated
