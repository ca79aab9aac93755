"""A bundle is whole: each link leads to a file, nothing is fetched from elsewhere, and texts stay harmless."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from antiphon.core.errors import ConfigError, RecordError
from antiphon.dashboard import bundle
from tests.unit.dashboard.sites import change_tokens, copy_run, read_lines, write_tokenizer


class PageReader(HTMLParser):
    """Collects the links, names and texts of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.names, self.tags, self.text = [], set(), set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for key, value in attrs:
            assert not key.startswith("on"), f"<{tag} {key}>"
            if key in ("href", "src", "action", "srcset", "poster", "data", "xlink:href"):
                self.links.append((tag, value))
            elif key == "id":
                self.names.add(value)

    def handle_data(self, data):
        self.text.append(data)


def find_dead_links(folder):
    """Return the links of the pages of a folder that lead to no file of it, or to no place in a page."""
    pages = {path.name: PageReader(path) for path in folder.glob("*.html")}
    dead = []
    for name, page in pages.items():
        for tag, link in page.links:
            target, _, fragment = link.partition("#")
            if tag == "a" and target.startswith("https://"):
                continue  # nothing fetches it
            file = unquote(target) or name
            is_there = "/" not in file.removeprefix("static/") and (folder / file).is_file()
            if not is_there or (fragment and fragment not in pages[file].names):
                dead.append((name, link))
    return dead


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """The bundle of a run whose texts are hostile."""
    folder = tmp_path_factory.mktemp("bundle")
    run = copy_run(runs / "simulated", folder, "a run")
    write_tokenizer(run, ["one", "<script>", "alert(1)", "</script>", "\u202e", "\x00", '"><img src=x>'])
    change_tokens(run, lambda number, tokens: tokens)
    return bundle.write_bundle(run, folder / "deep" / "out", folder / "cache")


def test_no_link_is_dead_and_each_file_is_reached(written):
    assert find_dead_links(written.folder) == []
    pages = {path.name: PageReader(path) for path in written.folder.glob("*.html")}
    reached, waiting = set(), ["index.html"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [link.partition("#")[0] or name for _, link in pages[name].links] if name in pages else []
    files = {path.relative_to(written.folder).as_posix() for path in written.folder.rglob("*") if path.is_file()}
    assert files <= reached
    assert written.pages == len([name for name in files if "/" not in name])
    assert written.bytes == sum((written.folder / name).stat().st_size for name in files)


def test_checker_of_links_sees_a_dead_one(written, tmp_path):
    for name, link in (("index.html", "gone.html"), ("index.html", "#gone"), ("a.html", "https://x.y/z")):
        (tmp_path / name).write_text(f'<a href="index.html"></a><img src="{link}">')
        assert find_dead_links(tmp_path) == [(name, link)]
        (tmp_path / name).write_text("")


def test_pages_have_no_script_and_no_form(written):
    for path in written.folder.glob("*.html"):
        page = PageReader(path)
        assert not page.tags & {"script", "form", "iframe", "object", "embed"}, path.name
        assert [link for tag, link in page.links if tag == "img" and not link.endswith((".svg", ".png"))] == []
    for path in written.folder.glob("*.svg"):
        ElementTree.parse(path)


def test_lists_have_all_attempts_and_curves_all_values(written, runs):
    index = PageReader(written.folder / "index.html")
    assert ("img", "chart-reward.svg") in index.links
    lines = (written.folder / "chart-reward.csv").read_text().splitlines()[1:]
    rewards = [line["reward/mean"] for line in read_lines(runs / "simulated" / "metrics.jsonl")]
    assert [float(line.split(",")[2]) for line in lines] == rewards
    listed = PageReader(written.folder / "rollouts-best.html")
    attempts = [link for _, link in listed.links if link.startswith("attempt-")]
    assert len(attempts) == 50
    assert '"><img src=x>' in "".join(PageReader(written.folder / attempts[0]).text)


def test_what_has_no_page_leads_to_a_page_that_says_so(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_ATTEMPTS", 3)
    found = bundle.write_bundle(runs / "simulated", tmp_path / "out", tmp_path / "cache")
    assert (
        len([path for path in found.folder.iterdir() if re.fullmatch(r"attempt-0-\d+\.\d\.\d\.html", path.name)]) == 3
    )
    assert find_dead_links(found.folder) == []
    assert "antiphon dashboard simulated" in "".join(PageReader(found.folder / bundle.ABSENT).text)


def test_bundle_is_whole_or_not_there(runs, tmp_path):
    (tmp_path / "full").mkdir()
    with pytest.raises(ConfigError) as caught:
        bundle.write_bundle(runs / "simulated", tmp_path / "full", tmp_path / "cache")
    assert caught.value.key == "--out"
    with pytest.raises(RecordError):
        bundle.write_bundle(tmp_path / "nothing", tmp_path / "out", tmp_path / "cache")

    def interrupt(pages):
        if pages == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundle.write_bundle(runs / "simulated", tmp_path / "out", tmp_path / "cache", interrupt)
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["cache", "full"]


def test_run_without_a_ledger_is_bundled(runs, tmp_path):
    run = copy_run(runs / "simulated", tmp_path, "supervised")
    for path in run.glob("ledger.db*"):
        path.unlink()
    found = bundle.write_bundle(run, tmp_path / "out", tmp_path / "cache")
    assert find_dead_links(found.folder) == []
