"""The status page in HTML: without scripts or external resources, and with all values escaped."""

from collections.abc import Iterable, Sequence
from html import escape

from antiphon.sandbox.service.environments import Environments
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.records import Sandbox

MOST_ROWS = 500
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1d2733 }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem }
p { color: #5b6875; margin: .2rem 0 1.2rem }
table { border-collapse: collapse; width: 100% }
th { text-align: left; font-weight: 600; color: #5b6875; font-size: .85rem }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #e4e8ec; vertical-align: top }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
td:first-child { font-family: ui-monospace, monospace; font-size: .85rem }
.running { color: #14804a } .pending { color: #9a6700 } .stopped { color: #5b6875 }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 0 } dt { color: #5b6875; font-size: .85rem }
dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums }
"""


def render_page(sandboxes: Sandboxes, environments: Environments, busy: int) -> str:
    """Return the page.

    Args:
        sandboxes: All sandboxes of the service.
        environments: All environments of the service.
        busy: Number of commands under way.
    """
    gauges, metrics = sandboxes.gauges(), sandboxes.metrics
    known = [sandbox for sandbox in sandboxes.all() if sandbox.state != "deleted"]
    states = gauges["antiphon_sandboxes"]
    memory = f"{gauges['antiphon_sandbox_memory_bytes'][''] / 2**20:,.0f} of {sandboxes.config.memory:,} MiB"
    numbers = {
        "running": f"{states['running']:.0f} of {sandboxes.config.sandboxes}",
        "pending": f"{states['pending']:.0f}",
        "warm": f"{gauges['antiphon_sandboxes_warm']['']:.0f}",
        "memory": memory,
        "commands now": str(busy),
        "commands so far": f"{metrics.total('antiphon_sandbox_commands'):,}",
        "refused": f"{metrics.total('antiphon_requests_refused'):,}",
        "lost": f"{metrics.total('antiphon_sandbox_losses'):,}",
    }
    shown = sorted(known, key=lambda sandbox: not sandbox.live)[:MOST_ROWS]
    rows = [(each.id, each.name, str(each.steps)) for each in environments.all()]
    return "".join(
        (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">',
            f"<title>Antiphon sandboxes</title><style>{_STYLE}</style><h1>Antiphon sandboxes</h1>",
            "<p>Sandboxes and environments of this service. The page reloads every five seconds.</p><dl>",
            *(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers.items()),
            f"</dl><h2>Sandboxes ({len(known)})</h2>",
            _table(_COLUMNS, (_row(sandboxes, sandbox) for sandbox in shown)),
            f"<h2>Environments ({len(rows)})</h2>",
            _table(("environment", "name", "steps"), rows),
        )
    )


def render_upstreams(states: Iterable[tuple[str, str]]) -> str:
    """Return a page that shows the services behind this one.

    Args:
        states: The name of each, and why it does not answer; an empty text if it does.
    """
    rows = [(name, problem or "answers") for name, problem in states]
    return f"<!doctype html><style>{_STYLE}</style>{_table(('served by', ''), rows)}"


_COLUMNS = ("sandbox", "state", "image", "memory", "sessions", "commands", "now", "idle ends in", "")


def _row(sandboxes: Sandboxes, sandbox: Sandbox) -> Sequence[str]:
    left = f"{max(0.0, sandboxes.idle_seconds_left(sandbox)) / 60:.1f} min" if sandbox.state == "running" else ""
    return (
        sandbox.id,
        sandbox.state,
        sandbox.image or "",
        f"{sandbox.backend_config.limits.memory >> 20:,} MiB",
        str(len(sandbox.sessions)),
        str(sandbox.commands),
        str(sandbox.busy),
        left,
        sandbox.failure,
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    states = {"pending", "running", "stopped"}
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{cell}">{cell}</td>' if cell in states else f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{''.join(f'<th>{escape(heading)}</th>' for heading in headings)}</tr>{body}</table>"
