"""The tiny recipe with a learner of one rank and of several: the same learning, the same books.

    python benchmarks/meshes.py [--rounds 3]

Two engines, asynchronous ratio 1; round by round, each with a seed of its own. On two cores all ranks and engines share the
processor: what a step takes says what ranks cost here, and nothing of devices of their own.
"""

import argparse
from pathlib import Path
from statistics import fmean, stdev

from _common import WHOLE_RUN, table, write_result
from clusters import rounds

MEASURES = (
    *WHOLE_RUN,
    "antiphon.learning.mesh",
    "antiphon.learning.parallel",
    "antiphon.learning.parallel.pipeline",
    "antiphon.learning.parallel.rank_group",
)

WAYS = {
    "one": (),
    "shard_2_tensor_2": ("learner.mesh.shard=2", "learner.mesh.tensor=2"),
    "pipeline_2": ("learner.mesh.pipeline=2",),
}


def main() -> None:
    """All runs; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--runs", type=Path, default=Path("runs/meshes"))
    options = arguments.parse_args()
    found = rounds(WAYS, options.rounds, options.runs)
    figures = {f"{way}_{name}": fmean(values) for way, each in found.items() for name, values in each.items()}
    if options.rounds > 1:
        figures |= {f"{way}_accuracy_deviation": stdev(each["accuracy_after"]) for way, each in found.items()}
    rows = [[way, *(f"{fmean(values):.4g}" for values in each.values())] for way, each in found.items()]
    print(table(["learner", *found["one"]], rows))
    print("written:", write_result("meshes", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
