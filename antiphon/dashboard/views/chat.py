"""The page on which one talks to a checkpoint, beside what the run sampled for the same prompt."""

from dataclasses import dataclass, field

from antiphon.core.types import Trajectory
from antiphon.dashboard.cards import RunCard, require_attempts
from antiphon.dashboard.errors import NotFoundError
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.dashboard.views.attempt import parse_attempt, read_trajectory
from antiphon.dashboard.views.group import GroupPage, query_group
from antiphon.dashboard.views.rollouts import query_rollouts
from antiphon.record import reader

MAX_TOKENS = 256  # of an answer, where no attempt says how many the run sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPage:
    """A conversation with a model server, and a group of the run.

    Attributes:
        card: The run.
        server: Address of the model server; empty if the dashboard was given none.
        attempt: `lineage:group.sibling.try` of the attempt whose prompt is asked; empty if there is none.
        prompt: Token ids of its prompt, up to its first sampled token.
        group: Its group: the prompt as text, and what the run sampled.
        problem: The reason why there is no prompt, or no answer; empty if there is one.
        temperature: Of what is sampled next; at first as the attempt was sampled.
        max_tokens: Of what is sampled next.
        samples: How many answers to the prompt are sampled next.
        answers: Answers of the server to the prompt.
        turns: The conversation: role and text of each message.
    """

    card: RunCard
    server: str
    attempt: str = ""
    prompt: list[int] = field(default_factory=list)
    group: GroupPage | None = None
    problem: str = ""
    temperature: float = 1.0
    max_tokens: int = MAX_TOKENS
    samples: int = 4
    answers: list[str] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)


def query_chat(site: Site, params: Params) -> ChatPage:
    """Return the prompt and the siblings of the attempt `id`, by default of the newest one that was trained on."""
    run, card = site.folder.find(params.name), site.read_card(params.name)
    require_attempts(card)
    server = site.model_server.address if site.model_server else ""
    name = params.text("id") or _find_newest(site, card)
    if not name:
        return ChatPage(card=card, server=server)
    lineage, attempt = parse_attempt(name)
    with reader.RunReader.open(run, check_pages=False) as record:
        row = record.find_attempt(attempt, lineage)
    if row is None:
        raise NotFoundError(f"the run has no attempt {name}")
    trajectory, problem = read_trajectory(run, row)
    group = query_group(site, Params([("group", str(row.id.group)), ("lineage", str(row.lineage))], params.name))
    if trajectory is None:
        return ChatPage(card=card, server=server, attempt=row.name, group=group, problem=problem)
    if trajectory.segments[0].images:
        problem = "its prompt has images, which this page cannot send"
        return ChatPage(card=card, server=server, attempt=row.name, group=group, problem=problem)
    prompt, temperature, max_tokens = _read_prompt(trajectory)
    return ChatPage(
        card=card,
        server=server,
        attempt=row.name,
        prompt=prompt,
        group=group,
        temperature=temperature,
        max_tokens=max_tokens,
    )


def _find_newest(site: Site, card: RunCard) -> str:
    """Return the newest attempt that a step trained on; empty if there is none."""
    rows = query_rollouts(site, Params([("status", "trained")], card.name)).rows
    return rows[0].id if rows else ""


def _read_prompt(trajectory: Trajectory) -> tuple[list[int], float, int]:
    """Return the tokens before the first one that was sampled, and temperature and limit of its turn."""
    segment = trajectory.segments[0]
    if not segment.turns:
        return segment.tokens.tolist(), 1.0, MAX_TOKENS
    first = segment.turns[0]
    return segment.tokens[: first.start].tolist(), first.sampling.temperature, first.sampling.max_tokens
