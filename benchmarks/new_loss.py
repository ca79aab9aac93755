"""The page on a loss of your own, followed to its end: how long each of its commands takes.

    python benchmarks/new_loss.py

The files and commands are those of sections 1 to 3 of `docs/new_loss.md`, run one after another in an empty copy of the recipe.
Seconds and accuracies are those of the tests and of the run `my_loss`, but for the accuracy after `ppo_clip`.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import ROOT, WHOLE_RUN, table, write_result

PAGE = (ROOT / "docs" / "new_loss.md").read_text(encoding="utf-8").split("\n## 4. ")[0]


def main() -> None:
    files = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
    commands = re.findall(r"^(?:python -m )?(pytest|antiphon) ((?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    figures: dict[str, float] = {"loss_lines": len(files["my_loss.py"].splitlines())}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "my_experiment"
        shutil.copytree(ROOT / "recipes" / "tiny_arithmetic", folder)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        for verb, arguments in commands:
            began = time.perf_counter()
            words = shlex.split(arguments.replace("\\\n", " "))
            command = [sys.executable, "-m", verb, *words]
            subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}, check=True)
            if verb == "pytest" or "name=my_loss" in words:
                figures[f"{verb}_seconds"] = time.perf_counter() - began
        summary, of_recipe = (
            json.loads((folder / "runs" / name / "summary.json").read_text(encoding="utf-8"))
            for name in ("my_loss", "ppo_clip")
        )
    figures |= {key: summary[key] for key in ("accuracy_before", "accuracy_after", "train_seconds")}
    figures["accuracy_after_ppo_clip"] = of_recipe["accuracy_after"]
    print(table(["figure", ""], [[name, f"{value:.4g}"] for name, value in figures.items()]))
    print("written:", write_result("new_loss", figures, measures=WHOLE_RUN))


if __name__ == "__main__":
    main()
