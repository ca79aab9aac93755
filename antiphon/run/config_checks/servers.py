"""Requirements on servers that a run trains through."""

from typing import TYPE_CHECKING

from antiphon.core.config import read_secret
from antiphon.core.errors import ConfigError
from antiphon.core.types import OnUpdate
from antiphon.engines.server_protocols import SERVER_PROTOCOLS, resolve_protocol
from antiphon.run.config_checks.common import iterate_engines

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


def check_servers(config: "RunConfig", *, dry_run: bool = False) -> None:
    """Raise `ConfigError` if a server that is an engine of the run cannot load weights.

    An evaluation publishes no weights and needs no such check.

    Args:
        config: The configuration of a training run.
        dry_run: Read no API keys, and import no protocol of the user's.
    """
    for at, engine in iterate_engines(config):
        servers = engine.server_options
        if servers is None:
            continue
        if servers.key and not dry_run:
            read_secret(servers.key)
        key = f"{at}.options.flavour"
        imports = servers.flavour not in SERVER_PROTOCOLS.shipped
        if not (imports and dry_run) and not resolve_protocol(servers.flavour, key).loads_weights:
            able = [name for name in sorted(SERVER_PROTOCOLS.shipped) if resolve_protocol(name, key).loads_weights]
            raise ConfigError(
                f"a server of flavour {servers.flavour!r} cannot be given weights, and is for "
                f"`antiphon eval` only; those that can are {', '.join(able)}, or a class of your own (docs/engines.md)",
                key=key,
                value=servers.flavour,
                valid=able,
            )
        if config.rollout.on_update is OnUpdate.KEEP:
            raise ConfigError(
                f"'keep' is not for servers ({at}.kind): what they send does not tell which weights a "
                "token came from; valid are recompute, restart and drain",
                key="rollout.on_update",
            )
