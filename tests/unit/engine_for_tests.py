"""An engine that hangs in starting, the first time that it is started for a model."""

import threading
from pathlib import Path


class Idle:
    """What an `EngineCore` says of itself."""

    version = 0
    loads = 0
    capacity = 1
    max_length = 8
    vocabulary = 7
    busy = False

    def sleep(self):
        """Takes nothing."""

    def wake(self):
        """Takes nothing."""


def open_engine(model, config, receive):
    try:
        (Path(model) / "begun").mkdir()
    except FileExistsError:
        (Path(model) / "opened").touch()
        return Idle()
    return threading.Event().wait()
