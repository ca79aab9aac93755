"""The tool `search`: full-text search over the documents of a prompt."""

from collections.abc import Mapping

from antiphon.core.types import Prompt
from antiphon.tasks.environments.tools.bm25 import Index
from antiphon.tasks.environments.tools.problems import build_corpus
from antiphon.tasks.environments.tools.toolbox import Tool

RESULTS = 3  # documents that a search returns


def search_tool(prompt: Prompt) -> Tool:
    """Return a tool that searches the payload's `documents`, a list of texts; without them, the made-up corpus `corpus`."""
    payload = prompt.payload if isinstance(prompt.payload, Mapping) else {}
    if "documents" in payload:
        documents = [str(document) for document in payload["documents"]]
        index = Index(documents)
    else:
        documents, index = build_corpus(int(payload.get("corpus", 0)))

    def search(query: str) -> str:
        """Find documents that have words of the query."""
        found = [documents[number] for number in index.search(query, RESULTS)]
        return "\n".join(f"[{rank}] {text}" for rank, text in enumerate(found, start=1)) or "nothing found"

    return Tool.of(search)
