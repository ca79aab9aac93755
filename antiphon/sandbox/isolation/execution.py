"""Runs an untrusted program as `__main__` in a process that has given up its rights."""

import gc
import os
import signal
import sys
import types
from typing import NoReturn


def execute(program: str) -> NoReturn:
    """Run the program as Python runs `__main__` and end the process, even if the program has replaced functions of `os`."""
    end = os._exit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    sys.argv = ["program.py"]
    sys.path.insert(0, "")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        buffering = 1 if name == "stderr" else -1
        stream = open(number, "w" if number else "r", buffering=buffering, closefd=False)  # noqa: SIM115 - for good
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    gc.enable()
    code = 1
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), main_module.__dict__)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:  # noqa: BLE001 - named boundary: the program's own error, shown as Python shows it
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        end(_finish(code))


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def _finish(code: int) -> int:
    """Do what the interpreter does at exit: wait for threads, run exit handlers and flush output."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - named boundary: the program's own error
        return 120
    return code
