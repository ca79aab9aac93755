"""Boards that have no layout in common between splits, and how a clumsy player goes about them."""

from collections.abc import Iterator, Mapping
from typing import Any

from antiphon.core.rng import derive, generator
from antiphon.core.types import Prompt
from antiphon.tasks.environments import environment_factory
from antiphon.tasks.environments.turns import TurnBasedGame
from antiphon.tasks.splits import split_of

LAYOUT = str.maketrans("PXS√", "__GG")  # what moves, and what is under it


def boards(split: str, game: str, options: Mapping[str, Any], number: int = 4000) -> Iterator[Prompt]:
    """Those of so many boards that are of this split. Where ice, holes, walls and goals are decides it, wherever player and box
    stand: so a board to be tested on has a layout that was never trained on."""
    for seed in range(1, number + 1):
        _, board = _begun(game, options, seed)
        if split_of(board.translate(LAYOUT)) == split:
            yield Prompt(id=str(seed), task="", messages=(), seed=seed)


def moves(split: str, mistakes: float = 0.25, **games: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Every state that a clumsy player comes to on the `boards` of each game, and what it does there: mostly what the expert
    would, and by mistake anything."""
    for game, settings in games.items():
        for prompt in boards(split, game, **settings):
            luck, over = generator(prompt.seed, "moves"), False
            world, board = _begun(game, settings["options"], prompt.seed)
            while not over:
                move = str(luck.choice(world.actions())) if luck.random() < mistakes else world.expert()
                yield {"prompt": board, "response": move}
                board, _, terminated, truncated, _ = world.step(move)
                over = terminated or truncated


def _begun(game: str, options: Mapping[str, Any], seed: int) -> tuple[TurnBasedGame, str]:
    """The game that attempts at the prompt with this seed play, and its first board."""
    world: Any = environment_factory(game, options)(Prompt(id="", task="", messages=(), seed=seed))
    return world, world.reset(derive(seed, "environment"))[0]
