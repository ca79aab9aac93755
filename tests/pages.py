"""Tutorials as tests: what a page shows is pasted into one shell, with fewer steps of smaller batches."""

import os
import re
import subprocess
import sys
from pathlib import Path

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
# `antiphon VERB` with more arguments; `python` is the interpreter of the tests.
COMMANDS = """set -e
python() { "$PYTHON" "$@"; }
antiphon() { case "$1" in train) "$PYTHON" -m antiphon "$@" $SMALL;; *) "$PYTHON" -m antiphon "$@";; esac; }
"""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def read_script(page: str) -> str:
    """Return a page as one shell script: its commands, and its files as they come, written where the commands have led.

    A file is a block that begins with a comment that has a name and nothing else; blocks of other languages are not run.
    """
    parts = []
    for language, text in BLOCK.findall((TUTORIALS / page).read_text(encoding="utf-8")):
        if language == "sh":
            parts.append(text)
        elif name := re.match(r"# ([\w.]+\.(?:py|yaml))\n", text):
            parts.append(f"cat > {name[1]} <<'END OF FILE'\n{text}END OF FILE\n")
    return "".join(parts)


def run_page(page: str, folder: Path, small: str) -> str:
    """Run a page in `folder`; `small` are the arguments that make its training short. Returns all output."""
    done = subprocess.run(
        ["bash", "-c", COMMANDS + read_script(page)],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable, "SMALL": small, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
