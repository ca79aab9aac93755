"""All that the pages of one dashboard share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.dashboard.audits import Audits
from antiphon.dashboard.cards import CardReader, KeptByRun, RunCard
from antiphon.dashboard.curves import Metrics, MetricsCache
from antiphon.dashboard.differences import Differences
from antiphon.dashboard.folder import RunFolder
from antiphon.dashboard.index.worker import IndexWorker
from antiphon.dashboard.model_server import ModelServer


@dataclass(frozen=True, slots=True)
class Site:
    """The folder that is served, and what has been read of it."""

    folder: RunFolder
    cards: CardReader
    findings: KeptByRun[Any]
    metrics: MetricsCache
    index: IndexWorker
    audits: Audits
    differences: Differences
    model_server: ModelServer | None

    @classmethod
    def make(cls, folder: Path, cache: Path, model_server: ModelServer | None = None) -> "Site":
        """Make the site of a folder, with indices below `cache`, whose chat page talks to a model server."""
        readers = (RunFolder(folder), CardReader(), KeptByRun[Any](), MetricsCache())
        return cls(*readers, IndexWorker(cache), Audits(), Differences(), model_server)

    def read_card(self, name: str) -> RunCard:
        """Return the card of a run; raise `NotFoundError` if there is none."""
        return self.cards.read(name, self.folder.find(name))

    def read_metrics(self, name: str) -> Metrics:
        """Return the metrics of a run; raise `NotFoundError` if there is no such run."""
        return self.metrics.read(self.folder.find(name))
