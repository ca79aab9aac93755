"""`docs/reading_path.md` names functions that exist, with their line counts."""

import pytest

from tools.reading_path import PAGE, ROW, count_lines, find_errors, read_page, update

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_as_the_sources_are():
    errors = find_errors(TEXT)
    assert errors == [], "\n".join(
        [*errors, "mend docs/reading_path.md; `python tools/reading_path.py --write` updates counts"]
    )


def test_every_step_names_a_function():
    assert len(ROW.findall(TEXT)) == TEXT.count("| `antiphon/") and len(read_page(TEXT)) > len(ROW.findall(TEXT))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("`Run._steps` ", "`Run._stride` ", "no `Run._stride`"),
        ("antiphon/run/loop.py", "antiphon/run/gone.py", "does not exist"),
        ("antiphon/run/loop.py", "antiphon/run/build.py", "twice"),
        ("`Run._steps` ", "`Run._steps` 9", "the page says 9"),
        (" files, each", "0 files, each", "the page must say"),
    ],
)
def test_errors_say_what_to_update(old, new, error):
    assert old in TEXT
    assert any(error in each for each in find_errors(TEXT.replace(old, new)))


def test_update_restores_the_counts():
    assert update(TEXT.replace("`Run._steps` ", "`Run._steps` 9")) == update(TEXT)


def test_lines_are_counted_from_decorator_to_end():
    counts = count_lines("tools/reading_path.py")
    assert counts["Entry"] == 7 and counts["update.update_row"] < counts["update"]
