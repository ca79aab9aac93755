"""Lives that crash, on a modelled disk that forgets what was not forced to it: after each the ledger must balance.

python benchmarks/crashes.py --seeds 1000
"""

import argparse
import time

from _common import SIMULATION, table, write_result

from antiphon.simulate.crashes import run_crashes

MEASURES = (
    *SIMULATION,
    "antiphon.simulate.crashes",
    "antiphon.record.ledger",
    "antiphon.record.store",
    "antiphon.record.checkpoint",
    "antiphon.record.resume",
)


def main() -> None:
    """Play all seeds, print how lives ended, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000)
    options = parser.parse_args()
    began = time.perf_counter()
    seen = run_crashes(range(options.seeds))
    crashes = sum(count for end, count in seen.items() if end.startswith("crashed"))
    print(table(["life ended", "times"], [[end, str(count)] for end, count in sorted(seen.items())]))
    figures = {
        "seeds": options.seeds,
        "crashes": crashes,
        "runs_done": seen["done"],
        "seconds": time.perf_counter() - began,
    }
    print("written:", write_result("crashes", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
