"""Environments that block, for test_worlds.py."""

import os
import threading


class Meets:
    """Steps return when two of them are under way in one process."""

    barrier = threading.Barrier(2)

    def reset(self, seed):
        return f"{os.getpid()}", {}

    def step(self, action):
        self.barrier.wait(60)
        return action, 1.0, True, False, {}

    def close(self):
        pass


class Odd:
    """Does what it is told."""

    def __init__(self, prompt, greeting="hello"):
        if prompt.id == "unmade":
            raise ValueError("there is no such world")
        self.greeting = greeting
        self.id = prompt.id

    def reset(self, seed):
        return f"{self.greeting} {self.id} {seed}", {"state_key": os.getpid(), "lock": threading.Lock()}

    def step(self, action):
        match action:
            case "hang":
                threading.Event().wait()
            case "raise":
                raise KeyError("no such thing")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(3)
            case "text":
                return "only an observation"
        return action.upper(), 0.5, False, False, {}

    def close(self):
        if self.id == "cannot close":
            raise OSError("stuck")
