"""Our household engine and ALFWorld's own, side by side: the same rooms, the same commands, what each answers.

    pip install alfworld
    python benchmarks/alfworld_transcripts.py [--games 60] [--store FILE]

Rooms of all task types and many sizes are drawn by `alfworld`, written as games for ALFWorld's engine (its domain, its grammar,
Fast Downward's states) and played in both: half of the commands are our expert's, a third are drawn from the admissible ones,
every verb as often, the others from what could be said. Compared are, word for word, what each answers, the reward and the end,
and the set of commands that each admits. Left out on purpose are the banner that ALFWorld begins with and the command `help`.
Known to differ, and not sent: capital letters and `put O in/on X`, which ours also takes.

`--store` keeps short transcripts of ALFWorld's engine: the unit tests replay them where the package is missing.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from _common import table, write_result

from antiphon.seeds import generator
from antiphon.tasks.environments.alfworld import AlfWorld
from antiphon.tasks.environments.alfworld_games import Exchange, digest, side_by_side, verb_of
from antiphon.tasks.environments.alfworld_rooms import TASK_TYPES, Household, draw_household
from antiphon.tasks.environments.alfworld_world import NOTHING

SHOWN = 10  # differences


def household(game: int, least: int = 4, most: int = 24) -> Household:
    """A room of its own for each game; the six task types take turns."""
    rng = generator(game, "alfworld_transcripts")
    receptacles, objects = (int(number) for number in rng.integers(least, most, size=2, endpoint=True))
    return draw_household(rng, [list(TASK_TYPES)[game % len(TASK_TYPES)]], receptacles, objects)


def compare(games: int) -> tuple[list[Exchange], float]:
    """All exchanges of so many games, and how many of the games were won."""
    exchanges, won = [], 0
    for game in range(games):
        played = list(side_by_side(household(game), game))
        won += played[-1].theirs.won
        exchanges += played
    return exchanges, won


def steps_a_second(seconds: float = 2.0) -> float:
    """How fast ours is with default options, resets included, when an expert plays."""
    steps, seed, began = 0, 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        world, over = AlfWorld(), False
        world.reset(seed)
        while not over:
            _, _, terminated, truncated, _ = world.step(world.expert())
            over = terminated or truncated
            steps += 1
        seed += 1
    return steps / (time.perf_counter() - began)


def store(path: Path) -> None:
    """Keep two short games of each type."""
    games = []
    for game in range(2 * len(TASK_TYPES)):
        room = household(game, least=4, most=7)
        steps = [
            [step.command, step.theirs.observation, step.theirs.won, digest(step.theirs.admissible)]
            for step in side_by_side(room, game)
        ]
        plain = {"task_type": room.task_type, "object": room.object, "receptacle": room.receptacle}
        games.append({**plain, "receptacles": room.receptacles, "objects": room.objects, "steps": steps})
    path.write_text("[\n" + ",\n".join(json.dumps(game) for game in games) + "\n]\n")


def main() -> None:
    """The command."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--games", type=int, default=60)
    arguments.add_argument("--store", type=Path)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    if options.store:
        store(options.store)
        return
    began = time.perf_counter()
    exchanges, won = compare(options.games)
    spent = time.perf_counter() - began
    different = [each for each in exchanges if each.ours != each.theirs]
    for each in different[:SHOWN]:
        print(f"> {each.command}\n  ours:   {each.ours}\n  theirs: {each.theirs}")
    count = len(exchanges)
    done = Counter(verb_of(each.command) for each in exchanges if each.theirs.observation != NOTHING)
    figures = {
        "games": options.games,
        "games_won": won,
        "steps": count - options.games,
        "observations": count,
        "nothing_happens_share": sum(each.theirs.observation == NOTHING for each in exchanges) / count,
        **{f"done_{verb}": number for verb, number in sorted(done.items()) if verb},
        "equal_observations": sum(each.ours.observation == each.theirs.observation for each in exchanges) / count,
        "equal_rewards_and_ends": sum((e.ours.reward, e.ours.won) == (e.theirs.reward, e.theirs.won) for e in exchanges)
        / count,
        "equal_admissible_commands": sum(each.ours.admissible == each.theirs.admissible for each in exchanges) / count,
        "both_engines_steps_per_second": (count - options.games) / spent,
        "ours_steps_per_second": steps_a_second(),
    }
    print(table(["figure", "value"], [[name, f"{value:.4f}"] for name, value in figures.items()]))
    write_result("alfworld_transcripts", figures, options.out)


if __name__ == "__main__":
    main()
