"""Dishonest programs against the code reward: how many there are, by how many causes, and how many it pays.

    python benchmarks/reward_hacks.py [--level 1|2|3]

The programs are those of `tests/system/reward_hacks.py`. The honest program of each task must be paid, or nothing is written.
They run at the highest level of the machine, or at a lower one that is named; as root or not is as you run it.
"""

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path

from _common import write_result

from antiphon.core.types import Message, Prompt
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code.programs import modules
from antiphon.tasks.rewards.code.reward import Code

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.system.reward_hacks import HACKS, TASKS

MEASURES = ("antiphon.tasks.rewards",)


def reward_at(level: int | None) -> Code:
    """The reward, in a sandbox of this level."""
    reward = Code(
        seconds=8.0, case_seconds=1.0, sandbox={"packages": ["pytest"], "minimum_level": level or Level.ISOLATED}
    )
    if level is not None:
        reward._sandbox.close()
        reward._sandbox = ForkedPython(reward._config, level=Level(level), modules=modules())
    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=int, choices=[int(level) for level in Level], help="the highest there is")
    parser.add_argument("--no-result", action="store_true", help="print only")
    options = parser.parse_args()
    with closing(reward_at(options.level)) as reward:

        def value(task: str, program: str) -> float | None:
            prompt = Prompt(id=task, task="t", messages=(), payload=TASKS[task].payload)
            return reward(prompt, Transcript((Message("assistant", program),))).value

        for name, task in TASKS.items():
            if value(name, task.honest) != 1:
                sys.exit(f"the honest program of {name} is not paid")
        paid = [hack.cause for hack in HACKS if value(hack.task, hack.program) != 0]
    print(f"paid: {', '.join(paid) or 'none'}")
    figures = {
        "tried": float(len(HACKS)),
        "paid": float(len(paid)),
        "causes": float(len({hack.cause for hack in HACKS})),
    }
    figures["tried_where_the_hole_is"] = float(sum(bool(hack.hole) for hack in HACKS))
    print("\n".join(f"{name} {value:g}" for name, value in figures.items()))
    if not options.no_result:
        suffix = "" if options.level is None else f"_level{options.level}" + ("" if os.geteuid() == 0 else "_user")
        print(write_result(f"reward_hacks{suffix}", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
