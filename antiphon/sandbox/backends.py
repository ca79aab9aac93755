"""Opens the sandbox for Python programs that a configuration names."""

from collections.abc import Mapping
from types import CodeType, MappingProxyType

from antiphon.sandbox.base import PythonSandbox
from antiphon.sandbox.config import SandboxConfig
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.sandbox.remote import RemotePython
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.system_python import SystemPython


def open_sandbox(config: SandboxConfig, modules: Mapping[str, CodeType] = MappingProxyType({})) -> PythonSandbox:
    """Open a service, containers of an image, or processes of this machine.

    Args:
        config: Names the backend, its minimum level and its limits.
        modules: Code objects by module name, which programs in processes of this machine find imported.

    Raises:
        UnsupportedError: The backend is missing here, or does not reach the minimum level.
        SandboxError: The service does not answer.
    """
    if config.service:
        return RemotePython(config)
    if config.image:
        return SystemPython(ShellSandboxConfig(limits=config.limits.limits, image=config.image))
    return ForkedPython(config, modules=modules)
