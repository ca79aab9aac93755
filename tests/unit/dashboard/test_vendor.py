"""Third-party JavaScript is what the lock file names, with its licence, and nothing is fetched from elsewhere."""

import json
import re
from pathlib import Path

import pytest

import antiphon.dashboard

STATIC = Path(antiphon.dashboard.__file__).parent / "static"
VENDOR = STATIC / "vendor"
FOR_TESTS = Path(__file__).parents[2] / "browser" / "vendor"


@pytest.mark.parametrize("vendor", [VENDOR, FOR_TESTS], ids=["dashboard", "tests"])
def test_vendored_libraries_are_locked_and_licensed(vendor):
    wanted = json.loads((vendor / "package.json").read_text())["dependencies"]
    locked = json.loads((vendor / "package-lock.json").read_text())["packages"]
    assert {path.name for path in vendor.iterdir() if path.is_dir() and path.name != "node_modules"} == wanted.keys()
    for name, version in wanted.items():
        entry = locked[f"node_modules/{name}"]
        assert entry["version"] == version and entry["integrity"].startswith("sha512-")
        assert re.search("permission|mozilla public license", (vendor / name / "LICENSE").read_text().lower())


def test_own_files_name_no_other_site():
    own = [
        path
        for path in STATIC.parent.rglob("*")
        if path.suffix in (".js", ".css", ".html") and VENDOR not in path.parents
    ]
    assert len(own) > 10
    for path in own:
        found = set(re.findall(r"https?://[\w.-]+", path.read_text(encoding="utf-8")))
        assert found <= {"https://ui.perfetto.dev"}, path  # a link, which nothing follows by itself


def test_templates_have_no_inline_script_or_style():
    for path in (STATIC.parent / "templates").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|\|\s*safe|autoescape", text), path.name
        assert all("src=" in script for script in re.findall(r"<script[^>]*>", text))


def test_own_scripts_write_no_markup_and_run_no_text():
    for path in STATIC.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), (
            path.name
        )
