"""Our household engine and ALFWorld's own, side by side: the same rooms, the same commands, what each answers.

    pip install alfworld
    python benchmarks/alfworld_transcripts.py [--games 48] [--store FILE]

Rooms of all task types and many sizes are drawn by `alfworld`, written as games for ALFWorld's engine (its domain, its grammar,
Fast Downward's states) and played in both: half of the commands (in every second game a tenth) are our expert's, 0.15 are drawn
from what could be said, the others from the admissible ones, every verb as often. Two more games are played by scripts that do
what chance seldom does. Compared are, word for word, what each answers, the reward and the end, and the set of commands that
each admits. Left out on purpose are the banner that ALFWorld begins with and the command `help`. Known to differ, and not sent:
capital letters and `put O in/on X`, which ours also takes.

`--store` keeps short transcripts of ALFWorld's engine: the unit tests replay them where the package is missing.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from _alfworld_games import ComparedStep, compare_engines, digest_commands, mixed_policy, verb_of
from _common import table, write_result

from antiphon.core.rng import generator
from antiphon_envs.alfworld.environment import AlfWorld
from antiphon_envs.alfworld.households import TASK_TYPES, Household, draw_household
from antiphon_envs.alfworld.state import NOTHING

MEASURES = (
    "antiphon_envs.alfworld.environment",
    "antiphon_envs.alfworld",
    "antiphon_envs.alfworld",
    "antiphon_envs.alfworld",
)

SHOWN = 10  # differences
BREAKFAST = Household(
    task_type="heat_and_place",
    object="egg",
    receptacle="diningtable",
    receptacles=("cabinet 1", "countertop 1", "diningtable 1", "fridge 1", "microwave 1", "sinkbasin 1"),
    objects={"egg 1": "fridge 1", "knife 1": "countertop 1", "apple 1": "countertop 1", "mug 1": "cabinet 1"},
)
EVENING = Household(
    task_type="look_in_light",
    object="book",
    receptacle="",
    receptacles=("desk 1", "drawer 1", "drawer 2", "sidetable 1"),
    objects={"book 1": "sidetable 1", "desklamp 1": "desk 1", "book 2": "drawer 2", "pen 1": "drawer 1"},
)
SCRIPTS = (
    (
        BREAKFAST,
        """look; examine mug 1; go to countertop 1; go to countertop 1; examine apple 1; take apple 1 from countertop 1;
        take knife 1 from countertop 1; go to microwave 1; heat apple 1 with microwave 1; examine apple 1; move apple 1 to
        microwave 1; heat apple 1 with microwave 1; go to fridge 1; cool apple 1 with fridge 1; examine apple 1; cool apple 1
        with fridge 1; go to sinkbasin 1; clean apple 1 with sinkbasin 1; examine apple 1; move apple 1 to sinkbasin 1; look;
        go to countertop 1; take knife 1 from countertop 1; examine knife 1; go to fridge 1; slice egg 1 with knife 1; open
        fridge 1; open fridge 1; slice egg 1 with knife 1; slice apple 1 with knife 1; take egg 1 from fridge 1; move knife 1
        to fridge 1; go to sinkbasin 1; slice apple 1 with knife 1; clean knife 1 with sinkbasin 1; examine knife 1; move
        knife 1 to sinkbasin 1; examine sinkbasin 1; take apple 1 from sinkbasin 1; examine apple 1; move apple 1 to sinkbasin
        1; go to fridge 1; take egg 1 from fridge 1; examine egg 1; close fridge 1; close fridge 1; move egg 1 to fridge 1; go
        to microwave 1; heat egg 1 with microwave 1; examine egg 1; go to fridge 1; cool egg 1 with fridge 1; examine egg 1; go
        to diningtable 1; move egg 1 to diningtable 1; inventory; take egg 1 from diningtable 1; go to sinkbasin 1; clean egg 1
        with sinkbasin 1; examine egg 1; go to microwave 1; open microwave 1; heat egg 1 with microwave 1; examine egg 1; move
        egg 1 to microwave 1; examine microwave 1; close microwave 1; take egg 1 from microwave 1; open microwave 1; take egg 1
        from microwave 1; go to cabinet 1; open cabinet 1; move egg 1 to cabinet 1; go to diningtable 1; move egg 1 to
        diningtable 1""",
    ),
    (
        EVENING,
        """use desklamp 1; go to desk 1; use desklamp 1; use desklamp 1; examine desklamp 1; take desklamp 1 from desk 1;
        inventory; go to drawer 1; take pen 1 from drawer 1; open drawer 1; take pen 1 from drawer 1; go to desk 1; use
        desklamp 1; examine pen 1; move pen 1 to desk 1; examine desk 1; go to drawer 2; open drawer 2; take book 2 from drawer
        2; inventory; go to desk 1""",
    ),
)


def household(game: int, least: int = 4, most: int = 24) -> Household:
    """A room of its own for each game; the six task types take turns."""
    rng = generator(game, "alfworld_transcripts")
    receptacles, objects = (int(number) for number in rng.integers(least, most, size=2, endpoint=True))
    return draw_household(rng, [list(TASK_TYPES)[game % len(TASK_TYPES)]], receptacles, objects)


def scripted() -> Iterator[list[ComparedStep]]:
    """The games with a script."""
    for room, script in SCRIPTS:
        commands = iter(" ".join(script.split()).split("; "))
        yield list(compare_engines(room, lambda _, commands=commands: next(commands), script.count(";") + 1))


def compare(games: int) -> Iterator[list[ComparedStep]]:
    """What is exchanged in each game."""
    for game in range(games):
        room = household(game)
        yield list(compare_engines(room, mixed_policy(room, game, (0.5, 0.1)[game // len(TASK_TYPES) % 2])))


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


def stored(room: Household, exchanges: Iterable[ComparedStep]) -> str:
    """A game and what ALFWorld's engine answered, on one line."""
    steps = [
        [each.command, each.theirs.observation, each.theirs.won, digest_commands(each.theirs.admissible)]
        for each in exchanges
    ]
    return json.dumps({**asdict(room), "steps": steps})


def store(path: Path) -> None:
    """Keep a short game of each type, and those with a script."""
    rooms = [household(game, least=4, most=7) for game in range(len(TASK_TYPES))]
    games = [stored(room, compare_engines(room, mixed_policy(room, game))) for game, room in enumerate(rooms)]
    games += [stored(room, played) for (room, _), played in zip(SCRIPTS, scripted(), strict=True)]
    path.write_text("[\n" + ",\n".join(games) + "\n]\n")


def main() -> None:
    """The command."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--games", type=int, default=48)
    arguments.add_argument("--store", type=Path)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    given = sys.argv[1:]  # before Fast Downward sets it to something else
    command = " ".join(["python benchmarks/alfworld_transcripts.py", *given])
    if options.store:
        store(options.store)
        return
    began = time.perf_counter()
    played = [*scripted(), *compare(options.games)]
    exchanges = [each for game in played for each in game]
    spent = time.perf_counter() - began
    different = [each for each in exchanges if each.ours != each.theirs]
    for each in different[:SHOWN]:
        print(f"> {each.command}\n  ours:   {each.ours}\n  theirs: {each.theirs}")
    count, steps = len(exchanges), len(exchanges) - len(played)
    done = Counter(verb_of(each.command) for each in exchanges if each.theirs.observation != NOTHING)
    figures = {
        "games": len(played),
        "games_won": sum(game[-1].theirs.won for game in played),
        "steps": steps,
        "observations": count,
        "nothing_happens_share": sum(each.theirs.observation == NOTHING for each in exchanges) / count,
        **{f"done_{verb}": number for verb, number in sorted(done.items()) if verb},
        "equal_observations": sum(each.ours.observation == each.theirs.observation for each in exchanges) / count,
        "equal_rewards_and_ends": sum((e.ours.reward, e.ours.won) == (e.theirs.reward, e.theirs.won) for e in exchanges)
        / count,
        "equal_admissible_commands": sum(each.ours.admissible == each.theirs.admissible for each in exchanges) / count,
        "both_engines_steps_per_second": steps / spent,
        "ours_steps_per_second": steps_a_second(),
    }
    print(table(["figure", "value"], [[name, f"{value:.4f}"] for name, value in figures.items()]))
    write_result("alfworld_transcripts", figures, options.out, command, measures=MEASURES)


if __name__ == "__main__":
    main()
