"""Dishonest programs against the code reward: how many there are, by how many causes, and how many it pays.

    python benchmarks/reward_hacks.py

The programs are those of `tests/system/reward_hacks.py`. The honest program of each task must be paid, or nothing is written.
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

from _common import write_result

from antiphon.core.types import Message, Prompt
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code.reward import Code

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.system.reward_hacks import HACKS, TASKS

MEASURES = ("antiphon.tasks.rewards",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-result", action="store_true", help="print only")
    options = parser.parse_args()
    with closing(Code(seconds=8.0, case_seconds=1.0, sandbox={"packages": ["pytest"]})) as reward:

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
        print(write_result("reward_hacks", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
