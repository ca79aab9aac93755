"""Grading processes get this process's import path: it must lead to the hostile rewards, and tests need the recipes."""

import sys
from pathlib import Path

for _folder in (Path(__file__).parent, Path(__file__).parents[3]):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
