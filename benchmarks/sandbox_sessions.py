"""What shell sessions cost: a command, a box, its memory, a snapshot.

    python benchmarks/sandbox_sessions.py [--commands 2000] [--boxes 200]

A command is `true`, sent to a shell that is there, one after the other; the yardstick measured with it is a `bwrap` that runs
`true` anew each time, which is what a command costs without sessions. The boxes are alive at once, each with a session that
has answered. Memory is the proportional share (PSS) of all processes of the boxes.
"""

import argparse
import asyncio
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from _common import table, write_result

from antiphon.core.deadlines import Deadlines
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox

MEASURES = (
    "antiphon.sandbox.sessions.shell_sandbox",
    "antiphon.sandbox.sessions.files",
    "antiphon.sandbox.sessions.runtime_dirs",
    "antiphon.sandbox.sessions.session",
    "antiphon.sandbox.sessions.command",
    "antiphon.sandbox.sessions.shell",
)
SETTINGS = {
    "ours": "true in a shell of a box that lives, one command after the other",
    "bubblewrap": "bwrap --ro-bind / / --unshare-all true, anew each time",
    "why its best": "bubblewrap has no sessions: to start it anew is what a command costs without them",
}

TREE = "for d in {1..50}; do mkdir d$d; for f in {1..20}; do head -c 10000 /dev/urandom > d$d/f$f; done; done"


async def session_command_ms(rooms: RuntimeDirs, commands: int) -> dict[str, float]:
    """Milliseconds of a command, and of a new shell, a new box, a snapshot and its restoration (1,000 files, 10 MB)."""
    began = time.perf_counter()
    async with await ShellSandbox.start(rooms, ShellSandboxConfig(), Deadlines()) as box:
        session, files = Session(box), SandboxFiles(box)
        await session.run("true")
        figures = {"first_command_ms": time.perf_counter() - began}
        figures |= await _commands(session, commands)
        await session.run(TREE)
        await files.list()
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "snapshot"
            for name, work in (("snapshot_ms", files.snapshot), ("restore_ms", files.restore)):
                began = time.perf_counter()
                await work(kept)
                figures[name] = time.perf_counter() - began
    return {name: round(1000 * value, 3) for name, value in figures.items()}


async def _commands(session: Session, commands: int) -> dict[str, float]:
    times, anew = [], []
    for number in range(commands):
        began = time.perf_counter()
        await session.run("true")
        times.append(time.perf_counter() - began)
        if number % 100 == 0:
            began = time.perf_counter()
            subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"], check=True)
            anew.append(time.perf_counter() - began)
    times.sort()
    return {
        "session_command_ms": statistics.median(times),
        "session_command_p99_ms": times[len(times) * 99 // 100],
        "bubblewrap_anew_ms": statistics.median(anew),
    }


async def boxes_alive(rooms: RuntimeDirs, number: int) -> dict[str, float]:
    """Boxes at once: seconds until all have answered, memory of each, and seconds until all are gone."""
    deadlines, began = Deadlines(), time.perf_counter()
    boxes = [await ShellSandbox.start(rooms, ShellSandboxConfig(), deadlines) for _ in range(number)]
    sessions = [Session(box) for box in boxes]
    answers = await asyncio.gather(*(session.run("echo $((6 * 7))") for session in sessions))
    assert all(answer.stdout == "42\n" for answer in answers)
    figures = {"boxes_alive": float(number), "boxes_start_seconds": round(time.perf_counter() - began, 2)}
    figures["memory_each_mb"] = round(_share_of_memory() / number / 1e6, 2)
    began = time.perf_counter()
    await asyncio.gather(*(session.run("true") for session in sessions))
    figures["command_in_all_ms"] = round(1000 * (time.perf_counter() - began), 1)
    began = time.perf_counter()
    await asyncio.gather(*(box.close() for box in boxes))
    figures["boxes_close_seconds"] = round(time.perf_counter() - began, 2)
    return figures


def _share_of_memory() -> int:
    """Bytes (PSS) of all bwrap processes and their descendants; this process is not one of them."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            ours = words[0].endswith(b"bwrap") or b"/run/antiphon" in b" ".join(words) or b"--noediting" in words
            if ours:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=2000)
    parser.add_argument("--boxes", type=int, default=200)
    parser.add_argument("--no-result", action="store_true", help="print only")
    arguments = parser.parse_args()
    rooms = RuntimeDirs()
    try:
        figures = asyncio.run(session_command_ms(rooms, arguments.commands))
        figures |= asyncio.run(boxes_alive(rooms, arguments.boxes))
    finally:
        rooms.close()
    print(table(["figure", "value"], [[name, f"{value:g}"] for name, value in figures.items()]))
    if not arguments.no_result:
        print(write_result("sandbox_sessions", figures, measures=MEASURES, settings=SETTINGS))


if __name__ == "__main__":
    main()
