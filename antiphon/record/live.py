"""Views of a running run: a live panel in a terminal or below a notebook's cell, one line a step elsewhere.

view.start("tiny_arithmetic", "groups alive 64")
view.step(3, 100, metrics, waits)      after each step
view.message("checkpoint written")     between steps
view.close()
"""

import importlib
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TextIO

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from antiphon.core.deadlines import Deadlines, Wait

Display = Callable[..., Any]  # IPython's
HISTORY = 48  # steps in a sparkline


class View(Protocol):
    """Shows a run to a person."""

    def start(self, name: str, note: str = "") -> None:
        """Begin; `note` describes the run in one line."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float], deadlines: Deadlines) -> None:
        """Show step `step` (from 1) of `steps` with its reduced metrics, and from now on the open waits of `deadlines`."""

    def message(self, text: str) -> None:
        """Show a line."""

    def close(self) -> None:
        """End, and leave the last state on the screen."""


def make_view(mode: Literal["auto", "on", "off"] = "auto", stream: TextIO | None = None) -> View:
    """Make the view that `record.live` asks for, on `stream` or standard output."""
    stream = stream or sys.stdout
    if mode != "off" and (display := _find_notebook()) is not None:
        return NotebookView(stream, display)
    live = mode == "on" or (mode == "auto" and stream.isatty())
    return LiveView(stream) if live else PlainView(stream)


def _find_notebook() -> Display | None:
    """Return the function that shows objects below the cell of the notebook that this process runs; None outside of one."""
    ipython = sys.modules.get("IPython")  # imported already, if there is a notebook
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not shell.has_trait("kernel"):
        return None
    return importlib.import_module("IPython.display").display


# --- one line a step ---------------------------------------------------------------------------------------------------

# The metrics in the line of a step, where they are known: label, metric, format.
COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "evaluation/accuracy", "{:.3f}"),
    ("loss", "learner/loss", "{:.4f}"),
    ("in training", "learner/accuracy", "{:.3f}"),
    ("likelihood loss", "sft/loss", "{:.4f}"),
    ("accuracy", "sft/accuracy", "{:.3f}"),
    ("age", "age/mean", "{:.2f}"),
    ("length", "length/mean", "{:.1f}"),
    ("live", "groups/live", "{:.0f}"),
    ("tok/s", "tokens/per_second", "{:.0f}"),
    ("waited", "step/wait_groups_share", "{:.0%}"),
    ("s", "step/seconds", "{:.2f}"),
)


def format_step(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """Return the line of a step."""
    shown = [f"{label} {form.format(metrics[name])}" for label, name, form in COLUMNS if name in metrics]
    return f"step {step:>{len(str(steps))}}/{steps}  " + "  ".join(shown)


class PlainView:
    """Prints one line a step, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, name: str, note: str = "") -> None:
        """Print the name of the run."""
        self.message(f"{name}: {note}" if note else name)

    def step(self, step: int, steps: int, metrics: Mapping[str, float], deadlines: Deadlines) -> None:
        """Print the step's line."""
        self.message(format_step(step, steps, metrics))

    def message(self, text: str) -> None:
        """Print a line at once."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: no line is buffered."""


# --- the live panel ----------------------------------------------------------------------------------------------------

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: "deque[float]") -> str:
    """Return the values as a row of bars."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in known)


# Rows of the panel: title, then (label, metric, format) each; the first metric of a row also has a sparkline.
ROWS = (
    (
        "reward",
        (
            ("", "reward/mean", "{:.3f}"),
            ("ungraded", "reward/ungraded", "{:.3g}"),
            ("alarms", "reward/alarms", "{:.0f}"),
        ),
    ),
    ("accuracy", (("", "evaluation/accuracy", "{:.3f}"),)),
    ("warm start", (("loss", "sft/loss", "{:.4f}"), ("sampled accuracy", "sft/accuracy", "{:.3f}"))),
    (
        "learner",
        (
            ("loss", "learner/loss", "{:.4f}"),
            ("accuracy", "learner/accuracy", "{:.3f}"),
            ("entropy", "learner/entropy", "{:.3f}"),
            ("grad norm", "learner/grad_norm", "{:.3f}"),
            ("mismatch", "learner/mismatch_kl", "{:.2g}"),
            ("lr", "learner/lr", "{:.1e}"),
        ),
    ),
    ("age", (("mean", "age/mean", "{:.2f}"), ("most", "age/max", "{:.0f}"))),
    ("groups", (("live", "groups/live", "{:.0f}"), ("filtered", "groups/filtered", "{:.0f}"))),
    ("speed", (("tokens/s", "tokens/per_second", "{:.0f}"), ("tokens each", "length/mean", "{:.1f}"))),
    (
        "step",
        (
            ("s", "step/seconds", "{:.2f}"),
            ("waiting for groups", "step/wait_groups_share", "{:.0%}"),
            ("learner s", "learner/seconds", "{:.2f}"),
        ),
    ),
)


class LiveView:
    """Draws a panel twice a second, so that open waits are current between steps too."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True)
        self._name = ""
        self._note = ""
        self._step = 0
        self._steps = 0
        self._metrics: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}
        self._deadlines: Deadlines | None = None
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=2)

    def start(self, name: str, note: str = "") -> None:
        """Show the empty panel."""
        self._name, self._note = name, note
        self._live.start()

    def step(self, step: int, steps: int, metrics: Mapping[str, float], deadlines: Deadlines) -> None:
        """Update the panel; metrics that a step does not have keep their last value."""
        self._step, self._steps, self._deadlines = step, steps, deadlines
        self._metrics = {**self._metrics, **metrics}
        for _, ((_, name, _), *_) in ROWS:
            if name in metrics:
                self._history.setdefault(name, deque(maxlen=HISTORY)).append(metrics[name])

    def message(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Draw the last state and stop."""
        self._live.stop()

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for title, cells in ROWS:
            known = [(label, form.format(self._metrics[name])) for label, name, form in cells if name in self._metrics]
            if known:
                history = self._history.get(cells[0][1], deque())
                numbers = "   ".join(f"{label} {value}".strip() for label, value in known)
                table.add_row(Text(title, style="bold"), Text(numbers), Text(sparkline(history), style="cyan"))
        table.add_row(
            Text("waiting", style="bold"), Text(_format_waits(self._deadlines.open() if self._deadlines else []))
        )
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            Text(f"step {self._step}/{self._steps or '?'}"),
            ProgressBar(total=self._steps or 1, completed=self._step, width=40),
            Text(self._note, style="dim"),
        )
        return Panel(Group(progress, table), title=Text(self._name, style="bold"), title_align="left")


class NotebookView(LiveView):
    """Redraws the panel below a notebook's cell after each step, and keeps the last few messages in it."""

    def __init__(self, stream: TextIO, display: Display) -> None:
        """Show nothing yet.

        Args:
            stream: Unused output of the panel's console.
            display: Shows an object, and with `display_id` returns a handle that updates it.
        """
        super().__init__(stream)
        self._display = display
        self._handle: Any = None
        self._messages: deque[str] = deque(maxlen=4)

    def start(self, name: str, note: str = "") -> None:
        """Show the empty panel."""
        self._name, self._note = name, note
        self._handle = self._display(Panel(self._render(), box=SIMPLE), display_id=True)

    def step(self, step: int, steps: int, metrics: Mapping[str, float], deadlines: Deadlines) -> None:
        """Update the panel."""
        super().step(step, steps, metrics, deadlines)
        self._redraw()

    def message(self, text: str) -> None:
        """Show a line below the panel."""
        self._messages.append(text)
        self._redraw()

    def close(self) -> None:
        """Draw the last state."""
        self._deadlines = None
        self._redraw()

    def _redraw(self) -> None:
        if self._handle is not None:
            self._handle.update(Panel(Group(self._render(), *map(Text, self._messages)), box=SIMPLE))


def _format_waits(deadlines: list[Wait]) -> str:
    """Return who waits for whom; equal waits are counted, since hundreds of episodes may wait for one engine."""
    counts: dict[str, int] = {}
    for wait in deadlines:
        what = f"{wait.owner.split(' ')[0]} → {wait.on}"
        counts[what] = counts.get(what, 0) + 1
    shown = [f"{what} ×{count}" if count > 1 else what for what, count in list(counts.items())[:4]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") or "nobody"
