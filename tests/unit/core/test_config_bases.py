"""A configuration may change others that it names as its base, and every value has the place that gave it."""

import sys
from functools import partial

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.config import Config, add_import_folders, load, locate_mistakes, read_document
from antiphon.core.errors import ConfigError, RecordError
from antiphon.core.yaml_text import annotate_yaml, dump_yaml, parse_yaml
from antiphon.inspect.recorded_config import load_recorded
from antiphon.run.config import RunConfig
from tests.raising import raises_with

COMPLETE = """\
{name: a, steps: 1, model: {path: m}, tasks: [{name: t, prompts: {source: "m:p"}}],
 rollout: {groups_per_step: 1, sampling: {max_tokens: 1}}}
"""


class Inner(Config):
    """A section that its first key stands for."""

    SHORT_FOR = "kind"
    kind: str = "plain"
    size: int = 0
    sizes: tuple[int, ...] = ()


class Outer(Config):
    """The root."""

    name: str = ""
    inner: Inner = Inner()
    other: Inner | None = None


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_a_file_changes_its_base_key_by_key(write):
    write("common.yaml", "name: common\ninner: {kind: a, size: 3, sizes: [1, 2, 3]}\nother: {size: 5}\n")
    path = write("run.yaml", "base: common.yaml\nname: mine\ninner: {sizes: [9]}\nother: null\n")
    expected = Outer(name="mine", inner=Inner(kind="a", size=3, sizes=(9,)), other=None)
    assert load(path, model=Outer) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("{kind: b, size: 4}", Inner(kind="b", size=4)),
        ("b", Inner(kind="b")),
        ("{kind: a, size: 4}", Inner(kind="a", size=4, sizes=(1, 2))),
        ("{size: 4}", Inner(kind="a", size=4, sizes=(1, 2))),
    ],
)
def test_another_kind_of_a_section_begins_it_anew(write, changed, expected):
    """What the base said of its own kind does not reach the other one."""
    write("common.yaml", "inner: {kind: a, size: 3, sizes: [1, 2]}\n")
    assert load(write("run.yaml", f"base: common.yaml\ninner: {changed}\n"), model=Outer).inner == expected


def test_later_bases_win_and_bases_have_bases(write):
    write("deep/root.yaml", "name: root\ninner: {kind: root, size: 1}\n")
    write("deep/first.yaml", "base: root.yaml\ninner: {size: 2}\n")
    write("second.yaml", "name: second\n")
    path = write("run.yaml", "base: [deep/first.yaml, second.yaml]\nother: {}\n")
    assert load(path, model=Outer) == Outer(name="second", inner=Inner(kind="root", size=2), other=Inner())
    swapped = write("swapped.yaml", "base: [second.yaml, deep/first.yaml]\n")
    assert load(swapped, model=Outer).name == "root"


def test_two_files_may_share_a_base(write):
    write("root.yaml", "name: root\n")
    write("left.yaml", "base: root.yaml\n")
    write("right.yaml", "base: root.yaml\ninner: {size: 4}\n")
    path = write("run.yaml", "base: [left.yaml, right.yaml]\n")
    assert load(path, model=Outer) == Outer(name="root", inner=Inner(size=4))


def test_a_mistake_in_a_base_names_its_line(write):
    base = write("common.yaml", "name: common\ninner:\n  size: many\n")
    path = write("run.yaml", "base: common.yaml\nother: {sise: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, model=Outer)
    places = {mistake.key: mistake.path for mistake in caught.value.mistakes}
    assert places == {"inner.size": f"{base}:3", "other.sise": f"{path}:2"}


@pytest.mark.parametrize("named", ["run.yaml", "other.yaml", "[fine.yaml, other.yaml]"])
def test_a_file_is_no_base_of_itself(write, named):
    write("fine.yaml", "name: fine\n")
    other = write("other.yaml", "name: x\nbase: run.yaml\n")
    path = write("run.yaml", f"name: run\nbase: {named}\n")
    place, value = (f"{path}:2", "run.yaml") if named == "run.yaml" else (f"{other}:2", "run.yaml")
    with raises_with(ConfigError, key="base", path=place, value=value):
        load(path, model=Outer)


@pytest.mark.parametrize(
    ("named", "value"), [("gone.yaml", "gone.yaml"), ("[fine.yaml, no/such.yaml]", "no/such.yaml")]
)
def test_a_missing_base_is_named_with_its_line(write, named, value):
    write("fine.yaml", "name: fine\n")
    path = write("run.yaml", f"name: run\n\nbase: {named}\n")
    with raises_with(ConfigError, key="base", path=f"{path}:3", value=value):
        load(path, model=Outer)


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("{a: b}", {"a": "b"}), ("[x.yaml, 4]", ["x.yaml", 4]), ("''", "")]
)
def test_a_base_that_is_no_name_is_refused(write, text, value):
    path = write("run.yaml", f"base: {text}\n")
    with raises_with(ConfigError, key="base", path=f"{path}:1", value=value):
        load(path, model=Outer)


def test_a_base_that_is_no_yaml_names_its_own_line(write):
    base = write("common.yaml", "name: a\nname: b\n")
    with raises_with(ConfigError, path=f"{base}:2"):
        load(write("run.yaml", "base: common.yaml\n"), model=Outer)


def test_base_is_a_key_of_the_top_alone(write):
    path = write("run.yaml", "inner: {base: other.yaml}\n")
    with raises_with(ConfigError, key="inner.base", path=f"{path}:1"):
        load(path, model=Outer)


def test_a_recorded_configuration_reads_no_other_file(write, tmp_path):
    whole = write("whole.yaml", COMPLETE)
    assert load(write("mine.yaml", "base: whole.yaml\n"), model=RunConfig) == load(whole, model=RunConfig)
    write("run/config.yaml", "base: ../whole.yaml\n")
    with raises_with(RecordError, path=tmp_path / "run" / "config.yaml"):
        load_recorded(tmp_path / "run")


# --- sections that a text stands for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["{size: 7}", "{size: 7, kind: a}"])
def test_a_section_given_by_name_can_be_extended(write, changed):
    write("common.yaml", "inner: a\n")
    path = write("run.yaml", f"base: common.yaml\ninner: {changed}\n")
    assert load(path, model=Outer).inner == Inner(kind="a", size=7)


def test_an_override_extends_a_section_given_by_name(write):
    path = write("run.yaml", "inner: a\n")
    assert load(path, ["inner.size=7"], model=Outer).inner == Inner(kind="a", size=7)
    assert load(path, ["inner=b", "inner.size=7"], model=Outer).inner == Inner(kind="b", size=7)
    with raises_with(ConfigError, key="inner.kind", value="a"):
        load(path, ["inner.kind.more=7"], model=Outer)


@pytest.mark.parametrize("text", ["run #2", "Solve # this"])
def test_an_override_is_not_cut_at_a_comment(write, text):
    path = write("run.yaml", "name: a")
    with raises_with(ConfigError, match="comment"):
        read_document(path, [f"name={text}"])
    assert read_document(path, [f'name="{text}"']).data == {"name": text}


def test_mistakes_found_later_have_their_override(write):
    path, override = write("run.yaml", "inner: a\n"), "inner.size=7"
    located = partial(locate_mistakes, path, [override], model=Outer)
    with raises_with(ConfigError, key="inner.size", path=f"override {override!r}"), located():
        raise ConfigError("is too large", key="inner.size")
    with raises_with(ConfigError, key="inner.kind", path=f"{path}:1"), located():
        raise ConfigError("is unknown", key="inner.kind")


def test_a_recipe_by_name_can_be_extended(write):
    class Root(Config):
        algorithm: AlgorithmConfig = AlgorithmConfig()

    path = write("run.yaml", "algorithm: dapo\n")
    found = load(path, ["algorithm.loss=my:loss"], model=Root).algorithm
    assert (found.recipe, found.loss, found.clip_high, found.weight.mask_truncated) == ("dapo", "my:loss", 0.28, True)
    over = write("over.yaml", "base: run.yaml\nalgorithm: {weight: {by: none}, clip_high: 0.5}\n")
    found = load(over, model=Root).algorithm
    assert (found.recipe, found.clip_high, found.weight.mask_truncated) == ("dapo", 0.5, True)
    assert load(over, ["algorithm=grpo"], model=Root).algorithm == AlgorithmConfig()


# --- places ------------------------------------------------------------------------------------------------------------


def test_every_value_has_the_place_that_gave_it(write):
    base = write("common.yaml", "name: common\ninner: a\nother: {size: 5, sizes: [1, 2]}\n")
    path = write("run.yaml", "base: common.yaml\n\nname: mine\n")
    document = read_document(path, ["inner.size=7"], model=Outer)
    sources = {
        ("name",): f"{path}:3",
        ("inner", "kind"): f"base {base}:2",
        ("inner", "size"): "command line",
        ("inner", "sizes"): "",
        ("other", "kind"): "",
        ("other", "size"): f"base {base}:3",
        ("other", "sizes", 1): f"base {base}:3",
        ("missing", "key"): "",
    }
    assert {keys: document.source_of(keys) for keys in sources} == sources
    assert document.files == (path, base)


def test_modules_beside_a_base_can_be_named(write, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    write("shared/common.yaml", "name: a\n")
    add_import_folders(write("mine/run.yaml", "base: ../shared/common.yaml\n"))
    at = sys.path.index(str(tmp_path / "mine"))
    assert sys.path[at + 1] == str(tmp_path / "shared")


TEXTS = st.text(max_size=200) | st.sampled_from(["# no comment", "a: b", "word " * 60, "two\nlines\n", "'", '"'])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
TREES = st.dictionaries(
    st.text(min_size=1, max_size=20),
    st.recursive(
        PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    min_size=1,
    max_size=4,
)


@given(TREES)
@settings(max_examples=150)
def test_comments_leave_the_values_as_they_are(tree):
    try:
        expected, _ = parse_yaml(dump_yaml(tree), "the tree")
    except ConfigError:  # a character that YAML cannot hold
        return
    annotated = annotate_yaml(dump_yaml(tree), lambda keys: f"of {len(keys)}")
    assert parse_yaml(annotated, "the text")[0] == expected


def test_comments_say_what_they_are_about():
    text = dump_yaml({"a": {"b": 1, "c": [2, "x" * 10]}, "d": {}, "e": "word " * 40})
    annotated = annotate_yaml(text, lambda keys: "/".join(map(str, keys)))
    assert yaml.safe_load(annotated) == yaml.safe_load(text)
    found = {line.split("#")[0].strip(): line.split("# ")[1] for line in annotated.splitlines() if "#" in line}
    assert found == {"b: 1": "a/b", "- 2": "a/c/0", "- xxxxxxxxxx": "a/c/1", "d: {}": "d", "": "e"}
