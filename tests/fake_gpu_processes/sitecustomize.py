"""Gives each Python process that a test with the fake GPU starts that GPU, too: its `PYTHONPATH` has this folder."""

import tests.fake_gpu  # noqa: F401
