"""Settings that a process makes for itself, seen from outside."""

import subprocess
import sys
import textwrap

PROGRAM = """
    import atexit, sys, threading
    from concurrent.futures import ThreadPoolExecutor
    from antiphon.core.processes.own_process import end_process

    class Library:
        def __del__(self):
            print("finalized")

    kept = Library()
    atexit.register(print, "exit functions")
    say = sys.stdout.write  # a word and its end at once, which print is not
    ThreadPoolExecutor(1).submit(say, "pool\\n")  # its thread waits for more
    threading.Thread(target=lambda: (threading.main_thread().join(0.01), say("thread\\n"))).start()
    sys.stdout.write("unflushed ")
    end_process()
"""


def test_a_process_ends_after_its_threads_and_exit_functions_alone():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert sorted(words) == ["exit", "functions", "pool", "thread", "unflushed"] and words[-2:] == ["exit", "functions"]
