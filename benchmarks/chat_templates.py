"""Whether what is trained is what was sampled, whatever chat templates and clients make of a conversation: many drawn ones.

    python benchmarks/chat_templates.py [--conversations 200]

Each is that of a client of its own mind, of OpenAI's or Anthropic's protocol, and up to eight requests long: it goes on, asks
again, edits, drops, compacts, gives calls other ids, writes them with other spaces and their keys in another order. Chat
templates forget thoughts or what is old, trim, number, shout, sort, pack, list and drop calls. A *mismatch* is a prompt that is
not the recorded tokens of what it goes on from, or a trained token that did not follow the tokens it was sampled after, or is
not trained exactly once (`tests/unit/rollout/test_gateway_capture.py` has the checks). `rendered_otherwise` counts the prompts
that would have been others, had the template been given the whole conversation again.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from _common import ROOT, table, write_result
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT))
from tests.unit.rollout.gateway_support import TEMPLATES, make
from tests.unit.rollout.test_gateway_capture import converse

MEASURES = (
    "antiphon.rollout.gateway",
    "antiphon.tasks.rendering",
    "antiphon.tasks.tool_calls",
)


def measure(template: str, conversations: int, draw_seed: int) -> Counter[str]:
    """Counts of so many conversations."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        renderer = make(Path(directory), TEMPLATES[template])

        @seed(draw_seed)
        @settings(
            max_examples=conversations,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def check(data: st.DataObject) -> None:
            found["conversations"] += 1
            try:
                requests = converse(renderer, data.draw)
            except AssertionError:
                found["mismatches"] += 1
                return
            found["requests"] += len(requests)
            for chat, request in requests:
                anew = renderer.encode_prompt(chat.messages, chat.tools)
                found["rendered_otherwise"] += anew.tolist() != request.tokens.tolist()

        check()
    return found


def main() -> None:
    """All templates; print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=200, help="with each template")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    names = ("conversations", "requests", "rendered_otherwise", "mismatches")
    rows, total = [], Counter[str]()
    figures: dict[str, float] = {"templates": len(TEMPLATES)}
    for number, template in enumerate(TEMPLATES):
        found = measure(template, options.conversations, options.seed + number)
        total += found
        rows.append([template, *(str(found[name]) for name in names)])
        print(*rows[-1], flush=True)
        figures[f"{template.replace(' ', '_')}_rendered_otherwise"] = found["rendered_otherwise"]
    figures |= {name: total[name] for name in names}
    print(table(["template", *names], rows))
    print("written:", write_result("chat_templates", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
