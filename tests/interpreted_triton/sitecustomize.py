"""Lets vLLM run its Triton kernels on a CPU in Triton's interpreter, for tests: `PYTHONPATH` has this folder.

vLLM looks for a backend of Triton for the CPU, which the package on PyPI does not have; the interpreter needs none.
"""

from triton.backends import Backend, backends

backends["cpu"] = Backend(compiler=None, driver=None)
