"""Where Python programs run, as a configuration says: the same for whoever asks."""

from collections.abc import Mapping
from types import CodeType, MappingProxyType

from antiphon.sandbox.base import PythonSandbox
from antiphon.sandbox.config import SandboxConfig
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.sandbox.remote import RemotePython
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.system_python import SystemPython


def open_sandbox(config: SandboxConfig, modules: Mapping[str, CodeType] = MappingProxyType({})) -> PythonSandbox:
    """Processes of this machine, which find `modules` imported; containers of an image; or a service. `UnsupportedError` if
    there is nothing of the kind here, or it keeps programs apart less than it must; `SandboxError` if it does not answer."""
    if config.service:
        return RemotePython(config)
    if config.image:
        return SystemPython(ShellSandboxConfig(limits=config.limits.limits, image=config.image))
    return ForkedPython(config, modules=modules)
