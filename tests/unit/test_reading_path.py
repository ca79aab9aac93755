"""`docs/reading_path.md` names functions that exist, in the order in which they are called, with their line counts."""

import pytest

from tools.reading_path import PAGE, ROW, count_lines, find_errors, find_mentions, find_unreached, read_page, update

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
        ("| 2 | ", "| 3 | ", "not numbered from 1"),
        ("`resume_after_deaths` resumes", "`run_again_and_again` resumes", "no source has `run_again_and_again`"),
        ("`Scheduler.admit` ", "`Scheduler.take_group_count` ", "no function before `Scheduler.take_group_count`"),
    ],
)
def test_errors_say_what_to_update(old, new, error):
    assert old in TEXT
    assert any(error in each for each in find_errors(TEXT.replace(old, new)))


def test_update_restores_the_counts():
    assert update(TEXT.replace("`Run._steps` ", "`Run._steps` 9")) == update(TEXT)


def make_page(*rows):
    """Return a page of functions of the tool itself, from (function, text) of each row."""
    return "\n".join(
        f"| {number} | `tools/reading_path.py` | `{name}` 1 | {text} |" for number, (name, text) in enumerate(rows, 1)
    )


def test_each_function_is_called_by_one_before_it():
    names = ("main", "__doc__", "find_errors", "find_unreached", "find_mentions", "find_definitions")
    assert find_unreached(make_page(*((name, "") for name in names))) == []
    (error,) = find_unreached(make_page(("find_unreached", ""), ("find_errors", "")))
    assert error.startswith("row 2: no function before `find_errors` mentions it")


def test_a_docstring_calls_nothing():
    (error,) = find_unreached(make_page(("main", ""), ("__doc__", ""), ("count_lines", "")))
    assert error.startswith("row 3: no function before `count_lines`")


def errors_of_note(note):
    """Return the errors about the third of four rows, which has a note. The fourth calls it too, but comes too late."""
    page = make_page(("main", ""), ("update", ""), ("find_unreached", note), ("find_errors", ""))
    return [each for each in find_unreached(page) if each.startswith("row 3")]


@pytest.mark.parametrize(
    "caller",
    ["called from row 1 through `find_errors`", "called from row 1 as `find_errors`", "chosen in row 2 as `sub`"],
)
def test_a_row_may_name_the_caller(caller):
    assert errors_of_note(f"`find_unreached` is {caller}.") == []


@pytest.mark.parametrize(
    ("row", "link"), [(2, "find_errors"), (3, "find_errors"), (4, "find_unreached"), (5, "find_errors"), (1, "gone")]
)
def test_the_caller_must_mention_what_it_calls(row, link):
    (error,) = errors_of_note(f"`find_unreached` is called from row {row} through `{link}`.")
    assert f"no function of row {row} before `find_unreached` mentions `{link}`" in error


def test_a_note_without_another_name_means_its_own():
    (error,) = errors_of_note("`find_unreached` is called from row 1.")
    assert error.endswith("mentions `find_unreached`")


def test_a_note_is_about_a_function_of_its_row():
    (error,) = errors_of_note("`find_unreached` and `update` are chosen in row 1 through `find_errors`.")
    assert "`update`, which the row does not name" in error


def test_strings_that_are_names_count_as_calls():
    mentions = find_mentions("antiphon/engines/remote_engine.py", "RemoteEngine.start")
    assert {"handle", "send", "add"} <= mentions  # "add" is a string: a method of the worker
    assert "start" not in mentions  # its own name


def test_lines_are_counted_from_decorator_to_end():
    counts = count_lines("tools/reading_path.py")
    assert counts["Entry"] == 8 and counts["update.update_row"] < counts["update"]
