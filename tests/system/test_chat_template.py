"""`model.chat_template` in whole runs, read back by transformers and from what was recorded."""

import pandas
import pytest
from transformers import AutoTokenizer

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}~{% endif %}"


@pytest.fixture
def template(project):
    file = project.folder / "square.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.mark.parametrize("path", ["", "mytask:build"], ids=["directory", "function"])
def test_prompts_and_checkpoints_have_the_template(project, template, path):
    before = {file.name: file.read_bytes() for file in project.model.iterdir()}
    model = {"path": path or str(project.model), "chat_template": str(template)}
    done = project.run("train", project.config(steps=1, model=model, checkpoint={"every": 1}))
    assert done.returncode == 0, done.stderr
    run = project.folder / "runs" / "run"
    rows = pandas.read_parquet(run / "rollouts")
    tokenizer = AutoTokenizer.from_pretrained(project.model)
    texts = [tokenizer.decode(list(tokens)) for tokens in rows.tokens]
    assert len(texts) >= 8 and all(text[0] == "[" and text[4:7] == "=]~" for text in texts), texts
    checkpoint = run / "checkpoints" / "step_000001"
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template == TEMPLATE
    assert {file.name: file.read_bytes() for file in project.model.iterdir()} == before

    template.unlink()  # the run has its own
    done = project.run("train", project.config(steps=2, model=model, checkpoint={"every": 1}), "--resume")
    assert done.returncode == 0, done.stderr
    assert project.summary()["steps"] == 2


def test_a_template_takes_the_place_of_the_models_own(project, template):
    """That of a tokenizer's settings, which older models have, and that of a file."""
    tokenizer = AutoTokenizer.from_pretrained(project.model)
    for number, to_file in enumerate([False, True]):
        folder = project.folder / f"model-{number}"
        folder.mkdir()
        for file in project.model.iterdir():
            (folder / file.name).symlink_to(file)  # as in the cache of a hub
        tokenizer.chat_template = "{{ messages[0].content }} own"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
        tokenizer.save_pretrained(folder, save_jinja_files=to_file)
        model = {"path": str(folder), "chat_template": str(template)}
        done = project.run("train", project.config(name=f"run-{number}", steps=1, model=model))
        assert done.returncode == 0, done.stderr
        made = project.folder / "runs" / f"run-{number}" / "model"
        assert AutoTokenizer.from_pretrained(made).chat_template == TEMPLATE
        assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages[0].content }} own"


@pytest.mark.parametrize("content", ["{% for message in %}", "{{ raise_exception('never') }}", b"\xff\xfe", None])
def test_a_template_that_cannot_be_used_is_refused(project, template, content):
    template.unlink()
    if content is not None:
        template.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = project.run("train", project.config(model={"path": str(project.model), "chat_template": str(template)}))
    assert done.returncode == 2
    assert done.stderr.startswith(f"antiphon: model.chat_template: {template}"), done.stderr
    assert not (project.folder / "runs" / "run" / "ledger.db").exists()
