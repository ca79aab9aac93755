"""One run as a folder of static pages, which opens from a disk, in an archive or on any web server, and fetches nothing."""

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from antiphon import __version__
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.dashboard.export import chart_csv, chart_svg
from antiphon.dashboard.pages import PAGES, Page
from antiphon.dashboard.params import Params
from antiphon.dashboard.rendering import HERE, Templates
from antiphon.dashboard.site import Site
from antiphon.record import safe_files

FIRST, ABSENT = "index.html", "not_in_bundle.html"
STATIC = ("style.css", "icon.svg")
MOST_ATTEMPTS = 200  # that have pages
# Kinds of pages in the order in which they are made: lists before what they link to, since the first links get a page.
# Each has the parameters that its addresses may have, and the number of its pages.
KINDS: dict[str, tuple[set[str], int]] = {
    "/run/": (set(), 1),
    "/rollouts/": ({"sort", "status", "task", "flag", "step", "score_min", "score_max", "page"}, 60),
    "/group/": ({"group", "lineage"}, 150),
    "/attempt/": ({"id", "color", "segment", "from"}, 1_500),
    "/record/": (set(), 1),
    "/timeline/": ({"lineage"}, 20),
    "/svg/chart/": ({"chart"}, 300),
    "/csv/chart/": ({"chart"}, 300),
}
Address = tuple[str, tuple[tuple[str, str], ...]]  # path and parameters


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was written: its folder, its number of pages and its size in bytes."""

    folder: Path
    pages: int
    bytes: int


def write_bundle(run: Path, out: Path, cache: Path, report: Callable[[int], None] = lambda pages: None) -> Bundle:
    """Write the pages of a run into a new folder.

    Args:
        run: The run directory.
        out: The folder, which must not exist.
        cache: Folder for the index of the run.
        report: Called with the number of pages after each.

    Raises:
        ConfigError: The folder exists or cannot be written.
        RecordError: The run cannot be read.
    """
    if out.exists():
        raise ConfigError("exists already; name a new folder", key="--out", value=str(out))
    safe_files.resolve_file(run, "config.yaml")
    site = Site.make(run, cache)
    name = next((name for name, path in site.folder.list_runs().items() if path == run.resolve()), None)
    if name is None:
        raise ConfigError("has neither metrics nor a ledger yet", key="RUN", value=str(run))
    if (run / "ledger.db").exists():
        site.index.build(run.resolve())
        site.audits.run_now(run.resolve())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as draft:
            folder = Path(draft) / "bundle"
            (folder / "static").mkdir(parents=True)
            for each in STATIC:
                shutil.copyfile(HERE / "static" / each, folder / "static" / each)
            pages = _write_pages(site, name, folder, report)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            folder.rename(out)  # a bundle is whole or not there
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--out", value=str(out)) from error
    return Bundle(out, pages, size)


def _write_pages(site: Site, name: str, folder: Path, report: Callable[[int], None]) -> int:
    links = Links()
    templates = BundleTemplates(links, __version__)
    by_path = {page.path: page for page in PAGES}
    links.find("/run/", "")
    written = 0
    while (found := links.take()) is not None:
        address, file = found
        (folder / file).write_bytes(_render(site, name, templates, by_path, address).encode("utf-8", "replace"))
        written += 1
        report(written)
    absent = templates.render(ABSENT, Params([]), {"here": "", "run": name})
    (folder / ABSENT).write_bytes(absent.encode("utf-8", "replace"))
    return written + 1


def _render(site: Site, name: str, templates: "BundleTemplates", by_path: dict[str, Page], address: Address) -> str:
    path, query = address
    params = Params(query, name)
    page = by_path[re.sub("^/(svg|csv)/", "/", path)]
    try:
        result = page.query(site, params)
    except AntiphonError as error:
        context = {"status": 422, "message": str(error)[:2000], "here": "", "retry": False, "run": name}
        return templates.render("error.html", Params([]), context)
    if page.template:
        return templates.render(page.template, params, {"page": result, "here": path})
    return chart_svg(result) if path.startswith("/svg/") else chart_csv(result)


class Links:
    """The addresses that the pages of a bundle link to, and the file of each that gets one."""

    def __init__(self) -> None:
        self._files: dict[Address, str] = {}
        self._waiting: dict[str, list[Address]] = {path: [] for path in KINDS}
        self._counts = dict.fromkeys(KINDS, 0)
        self._names: set[str] = set()
        self._attempts: set[str] = set()

    def find(self, path: str, query: str) -> str:
        """Return the file of an address, a new one if the address gets a page and has none yet."""
        if path.startswith("/static/"):
            return path[1:]
        if path == "/runs":
            return FIRST
        params = dict(sorted(parse_qsl(query)))
        if path == "/attempt/":
            params.setdefault("color", "logprob")
        address = (path, tuple(sorted(params.items())))
        if address not in self._files and self._is_wanted(path, params):
            self._counts[path] += 1
            if "id" in params:
                self._attempts.add(params["id"])
            self._files[address] = self._name(path, params)
            self._waiting[path].append(address)
        return self._files.get(address, ABSENT)

    def take(self) -> tuple[Address, str] | None:
        """Return an address whose page is not written yet, with its file; None if there is none."""
        for waiting in self._waiting.values():
            if waiting:
                address = waiting.pop(0)
                return address, self._files[address]
        return None

    def _is_wanted(self, path: str, params: dict[str, str]) -> bool:
        valid, most = KINDS.get(path, (set(), 0))
        if self._counts.get(path, 0) >= most or not set(params) <= valid:
            return False
        if path == "/attempt/":
            return params.get("id", "") in self._attempts or len(self._attempts) < MOST_ATTEMPTS
        # Of lists, each filter by itself or within a task: those of several would be without end.
        filters = {key.split("_")[0] for key in params} - {"page", "task"}
        return path != "/rollouts/" or len(filters) < 2

    def _name(self, path: str, params: dict[str, str]) -> str:
        if path == "/run/":
            return FIRST
        ending = {"svg": ".svg", "csv": ".csv"}.get(path.split("/")[1], ".html")
        shown = [value for key, value in params.items() if (key, value) != ("color", "logprob")]
        stem = re.sub(r"[^a-z0-9._]+", "-", "-".join([path.split("/")[-2], *shown]).lower())[:80].strip("-")
        name, number = stem + ending, 1
        while name in self._names:
            number += 1
            name = f"{stem}-{number}{ending}"
        self._names.add(name)
        return name


class BundleTemplates(Templates):
    """Templates whose links lead to files beside the page."""

    def __init__(self, links: Links, version: str) -> None:
        super().__init__("", version, is_bundle=True)
        self._links = links

    def url(self, path: str, name: str = "", query: str = "", **params: object) -> str:
        """Return the file of a page; `ABSENT` if the bundle does not have it."""
        given = [(key, str(value)) for key, value in params.items() if value is not None and value != ""]
        return self._links.find(path, "&".join(part for part in (query, urlencode(given, errors="replace")) if part))
