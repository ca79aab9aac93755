"""What all tests share: no test depends on how fast the machine is."""

import os

# One thread of arithmetic a process, set before anything imports numpy or torch: the machines that run the tests are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings

# derandomize: a red build is the change's fault and never the draw's; `make chaos` is where fresh seeds are tried.
settings.register_profile("antiphon", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("antiphon")
