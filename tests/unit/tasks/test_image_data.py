"""Images in the rows of data sets."""

import base64
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from antiphon.core.errors import DataError, RequestError
from antiphon.core.image_checks import check_image, open_image
from antiphon.core.types import IMAGE_MARKER, Message
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.image_data import place_images
from antiphon.tasks.image_prompts import template_content
from antiphon.tasks.prompts import load_prompts
from tests.vision_models import picture

RED, GREEN = picture((255, 0, 0)), picture((0, 255, 0))


def load(path, rows, source="jsonl", **options):
    """The prompts of rows, by way of a file."""
    if source == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    prompts = PromptsConfig(source=source, path=str(path), **options)
    return load_prompts(TaskConfig(name="seen", prompts=prompts), prompts, 0)


def url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def test_every_form_of_an_image_is_the_same_file(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    rows = [{"prompt": "<image>", "images": each} for each in ([url(RED)], ["red.png"], {"path": "red.png"}, url(RED))]
    found = load(tmp_path / "a.jsonl", rows)
    rows = [{"prompt": "<image>", "images": each} for each in ([{"bytes": RED, "path": None}],)]
    found += load(tmp_path / "a.parquet", rows, "parquet")
    assert [prompt.messages[0].images for prompt in found] == [(RED,)] * 5
    assert all("images" not in prompt.payload for prompt in found)


def test_decoded_images_become_files_without_loss():
    prompts = PromptsConfig(source=f"{__name__}:rows_of_pillow")
    (prompt,) = load_prompts(TaskConfig(name="seen", prompts=prompts), prompts, 0)
    (image,) = prompt.messages[0].images
    assert Image.open(io.BytesIO(image)).tobytes() == Image.open(io.BytesIO(GREEN)).tobytes()


def rows_of_pillow(split):
    yield {"prompt": "<image>", "images": [Image.open(io.BytesIO(GREEN))]}


def test_messages_get_the_images_that_they_name(tmp_path):
    parts = [{"type": "text", "text": "or "}, {"type": "image"}, {"type": "text", "text": "?"}]
    chat = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": parts},
    ]
    (prompt,) = load(tmp_path / "a.jsonl", [{"prompt": chat, "images": [url(RED), url(GREEN)]}])
    assert [message.images for message in prompt.messages] == [(), (RED,), (), (GREEN,)]
    assert template_content(prompt.messages[3]) == [parts[0], {"type": "image"}, parts[2]]
    assert template_content(prompt.messages[0]) == "look"


def test_prompts_that_differ_in_an_image_have_other_ids(tmp_path):
    rows = [{"prompt": "<image>", "images": [url(each)]} for each in (RED, GREEN, RED)]
    red, green, again = (prompt.id for prompt in load(tmp_path / "a.jsonl", rows))
    assert red != green and again == f"{red}#2"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "none", "images": [url(RED)]}, "prompt"),
        ({"prompt": "<image> <image>", "images": [url(RED)]}, "prompt"),
        ({"prompt": "<image>", "images": ["missing.png"]}, "images"),
        ({"prompt": "<image>", "images": ["data:image/png;base64,%%%"]}, "images"),
        ({"prompt": "<image>", "images": [7]}, "images"),
        ({"prompt": "<image>", "images": [{"bytes": None}]}, "images"),
        ({"prompt": "<image>", "images": []}, "prompt"),
        ({"prompt": "<image>", "images": ["/etc/passwd"]}, "images"),
        ({"prompt": "<image>", "images": ["../a.jsonl"]}, "images"),
        ({"prompt": "<image>", "images": ["a.jsonl"]}, "images"),
        ({"prompt": "<image>", "images": ["nul\0"]}, "images"),
        ({"prompt": "<image>", "images": ["data:image/png;base64,ä"]}, "images"),
        ({"prompt": "<image>", "images": ["data:image/png;base64,bm8gaW1hZ2U="]}, "images"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "red.png"}]}], "images": []}, "prompt"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "prompt"),
    ],
    ids=str,
)
def test_what_is_no_image_is_named_with_its_row(tmp_path, row, column):
    good = {"prompt": "plain"}
    with pytest.raises(DataError) as raised:
        load(tmp_path / "a.jsonl", [good, row])
    assert (raised.value.row, raised.value.column) == (2, column)


def test_wrong_name_of_the_column_is_named(tmp_path):
    with pytest.raises(DataError) as raised:
        load(tmp_path / "a.jsonl", [{"prompt": "<image>", "pics": [url(RED)]}], image_column="pictures")
    assert raised.value.row == 1 and "pics" in str(raised.value)


def test_images_are_turned_upright():
    image = Image.new("RGB", (40, 20))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(file := io.BytesIO(), format="jpeg", exif=exif)
    assert open_image(file.getvalue()).size == (20, 40)


def test_bomb_is_refused_by_its_header():
    Image.new("1", (1 << 13, 1 << 12)).save(file := io.BytesIO(), format="png")
    with pytest.raises(RequestError):
        check_image(file.getvalue())


def test_marker_without_images_is_text(tmp_path):
    (prompt,) = load(tmp_path / "a.jsonl", [{"prompt": "what does <image> mean?"}])
    assert prompt.messages[0].images == () and template_content(prompt.messages[0]) == "what does <image> mean?"


@given(st.lists(st.lists(st.sampled_from(["text ", IMAGE_MARKER]), max_size=5), min_size=1, max_size=4))
def test_images_keep_their_order(contents):
    messages = [Message("user", "".join(parts)) for parts in contents]
    count = sum(message.content.count(IMAGE_MARKER) for message in messages)
    images = [str(number).encode() for number in range(count)]
    placed = place_images(messages, images, DataError)
    assert [image for message in placed for image in message.images] == images
    for message, parts in zip(placed, contents, strict=True):
        content = template_content(message)
        kinds = [each["type"] for each in content if each["type"] == "image"] if isinstance(content, list) else []
        assert len(kinds) == len(message.images) == parts.count(IMAGE_MARKER)


def test_messages_in_the_form_of_an_api():
    message = Message("user", "a <image> b <image>", images=(RED, b"\xff\xd8rest"))
    texts = [part.get("text") for part in message.to_openai()["content"]]
    urls = [part["image_url"]["url"] for part in message.to_openai()["content"] if part["type"] == "image_url"]
    assert texts == ["a ", None, " b ", None]
    assert urls == [url(RED), "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8rest").decode()]
    assert Message("user", "a <image>").to_openai() == {"role": "user", "content": "a <image>"}
