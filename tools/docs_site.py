"""What mkdocs needs beside mkdocs.yml: the generated reference, pages outside docs/, and search without a network.

A page keeps its place in the repository, without `docs/`: `docs/concepts.md` is `concepts.md` on the site, and
`recipes/webshop/README.md` stays where it is. Links are written for the repository and translated here for the site.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from reference import build_pages  # noqa: E402

OUTSIDE = (
    "*.md",
    "recipes/*/*",
    "antiphon/sandbox/SECURITY.md",
    "antiphon_envs/README.md",
    "antiphon_envs/*/README.md",
)
SHOWN = {".md", ".png", ".py", ".yaml"}  # pages, and what they show or link to
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)")
SHIM = (
    "https://unpkg.com/iframe-worker/shim"  # which the theme would fetch, to search pages that are opened from a disk
)
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/ and the generated ones."""
    for path in sorted(found for pattern in OUTSIDE for found in ROOT.glob(pattern)):
        if path.is_file() and path.suffix in SHOWN:
            files.append(File.generated(config, site_place(path), abs_src_path=str(path)))
    for name, text in build_pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    place = page.file.src_uri
    outside = page.file.generated_by is not None and not place.startswith("reference/")
    source = place if outside else f"docs/{place}"
    kept = [found.span() for found in CODE.finditer(markdown)]

    def translate(link: re.Match[str]) -> str:
        if any(start <= link.start() < stop for start, stop in kept):
            return link.group()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link.group()))
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(place) or ".")

    return LINK.sub(translate, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Let the page load our script in place of the one that the theme fetches from elsewhere."""
    return output.replace(SHIM, posixpath.relpath("javascripts/file_worker.js", posixpath.dirname(page.url) or "."))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the page of unknown addresses, which is shown at any depth."""
    return output_content.replace(SHIM, "/javascripts/file_worker.js")


def site_place(path: Path) -> str:
    """Return where a file of the repository lies on the site."""
    return path.relative_to(ROOT).as_posix().removeprefix("docs/")
