"""Tiny vision-language models with random weights, each with tokenizer and processor, and images to show to them."""

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from antiphon.learning.model.tiny import make_tokenizer
from antiphon.tasks.image_prompts import WithoutVideos

PROCESSORS = {
    "llava": LlavaProcessor,
    "idefics3": Idefics3Processor,
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
}

MARKERS = {
    "llava": "<image>",
    "idefics3": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
TEMPLATE = (
    "{%% for m in messages %%}{%% if m.content is string %%}{{ m.content }}{%% else %%}{%% for p in m.content %%}"
    "{%% if p.type == 'image' %%}%s{%% else %%}{{ p.text }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "{%% if m.role == 'assistant' %%}<eos>{%% else %%}:{%% endif %%}{%% endfor %%}"
)
SPECIAL = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    "\n",
    "\n\n",
)
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def picture(color: tuple[int, int, int], size: tuple[int, int] = (28, 28), dots: int = 0) -> bytes:
    """A PNG file of one color, with some dots of another along its diagonal."""
    image = Image.new("RGB", size, color)
    for place in range(dots):
        image.putpixel((place % size[0], place % size[1]), (255 - color[0], color[1], 128))
    image.save(file := io.BytesIO(), format="png")
    return file.getvalue()


def write_vision_model(directory: Path, family: str, seed: int = 0, scale: float = 4.0) -> None:
    """Write a model of a family in `MARKERS`; its matrices are scaled, so that its distributions are not flat."""
    tokenizer = make_tokenizer("abcdefghijklmnopqrstuvwxyz:? ")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE % MARKERS[family]
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = {**TEXT, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(seed)
    model, processor = globals()[f"_{family}"](tokenizer, text, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def load_processor(directory: Path) -> Any:
    """The processor of a model that `write_vision_model` wrote."""
    kind = PROCESSORS[AutoConfig.from_pretrained(directory).model_type]
    return type(kind.__name__, (WithoutVideos, kind), {}).from_pretrained(directory, backend="pil")


def _llava(tokenizer: Any, text: dict[str, Any], ids: dict[str, int]) -> tuple[Any, Any]:
    vision = CLIPVisionConfig(**VISION, image_size=28, patch_size=7)
    decoder = LlamaConfig(**text)
    config = LlavaConfig(
        vision_config=vision, text_config=decoder, image_token_id=ids["<image>"], vision_feature_layer=-1
    )
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return LlavaForConditionalGeneration(config), processor


def _idefics3(tokenizer: Any, text: dict[str, Any], ids: dict[str, int]) -> tuple[Any, Any]:
    vision = {**VISION, "image_size": 28, "patch_size": 7}
    config = Idefics3Config(
        vision_config=vision, text_config=LlamaConfig(**text), image_token_id=ids["<image>"], scale_factor=2
    )
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)
    return Idefics3ForConditionalGeneration(config), processor


def _qwen2_5_vl(tokenizer: Any, text: dict[str, Any], ids: dict[str, int]) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {
        **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32},
        **{"patch_size": 7, "window_size": 28, "fullatt_block_indexes": [1]},
    }
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        **_qwen_ids(ids),
    )
    return Qwen2_5_VLForConditionalGeneration(config), _qwen_processor(Qwen2_5_VLProcessor, tokenizer)


def _qwen3_vl(tokenizer: Any, text: dict[str, Any], ids: dict[str, int]) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "mrope_interleaved": True}
    vision = {
        **{"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32},
        **{"patch_size": 7, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    }
    config = Qwen3VLConfig(
        text_config={**text, "head_dim": 8, "rope_parameters": rope},
        vision_config=vision,
        **_qwen_ids(ids),
    )
    return Qwen3VLForConditionalGeneration(config), _qwen_processor(Qwen3VLProcessor, tokenizer)


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    return {key: ids[f"<|{name}|>"] for key, name in names.items()}


def _qwen_processor(kind: type, tokenizer: Any) -> Any:
    pixels = Qwen2VLImageProcessorPil(min_pixels=14 * 14, max_pixels=28 * 42, patch_size=7, merge_size=2)
    return type(kind.__name__, (WithoutVideos, kind), {})(pixels, tokenizer, chat_template=tokenizer.chat_template)
