"""Vision-language models of transformers: what engines and learners compute from images, in the same way.

The decoder of such a model reads tokens. Where a token stands for a part of an image, its embedding is replaced by a feature
that the vision encoder computes. `PlacedImage` says which tokens these are: those between `start` and `stop` that are the
model's image token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from antiphon.core.errors import RequestError, UnsupportedError
from antiphon.core.image_checks import open_image
from antiphon.core.types import PlacedImage

CACHED_IMAGES = 64  # siblings of a group have the same

# Model types that are compared with transformers in the tests. Others may attend to an image in both directions, as Gemma 3
# does, or want more of it than is passed on here.
FAMILIES = ("idefics3", "llava", "qwen2_5_vl", "qwen3_vl")


def reads_images(config: Any) -> bool:
    """Return True if a configuration of transformers is that of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def model_class(config: Any) -> Any:
    """Return the class of transformers that loads the language model, or vision-language model, of a configuration."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def model_class_of(directory: str) -> Any:
    """Return `model_class` of the model in a directory."""
    return model_class(AutoConfig.from_pretrained(directory, trust_remote_code=False))


def attention_names(config: Any, name: str) -> str | dict[str, str]:
    """Return `attn_implementation` with which the decoder has the attention `name`, and a vision encoder torch's own."""
    return {"": name, "text_config": name, "vision_config": "sdpa"} if reads_images(config) else name


def decoder_of(model: Any) -> Any:
    """Return the decoder of a language model, or of a vision-language model."""
    return model.get_decoder() if reads_images(model.config) else model.base_model


@dataclass(frozen=True, slots=True)
class Pixels:
    """Inputs of the vision encoder for one image, by the names that the model has for them."""

    inputs: dict[str, Tensor]

    @property
    def grid(self) -> Tensor | None:
        """The image's numbers of patches in time, height and width [1, 3], in models whose positions depend on them."""
        return self.inputs.get("image_grid_thw")


class VisionEncoder:
    """The parts of a vision-language model around its decoder."""

    def __init__(self, model: Any, directory: str) -> None:
        """Use the encoder of `model`, and the settings of pixels in its directory, once there is an image."""
        self._model = model
        self._body = model.base_model
        self._directory = directory
        self.token = image_token(model.config)
        self.pixels = lru_cache(maxsize=CACHED_IMAGES)(self._compute_pixels)
        """Returns the `Pixels` of an image file; raises `RequestError` if it cannot be read or shown to the model."""

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        require_family(self._model.config)
        # Of the two implementations this one needs no more packages, and gives the same pixels on every machine.
        return AutoImageProcessor.from_pretrained(self._directory, backend="pil")

    def _compute_pixels(self, data: bytes) -> Pixels:
        image, processor = open_image(data), self._processor
        try:
            return Pixels(dict(processor(images=[image], return_tensors="pt")))
        except Exception as error:  # named boundary: processors refuse some sizes, each with errors of its own
            raise RequestError(f"an image of {image.width} x {image.height} pixels is refused: {error}") from error

    def features(self, pixels: Pixels) -> Tensor:
        """Compute the features [K, N, H] of an image with N tokens; with gradient if gradients are on.

        The first of K is the embedding of each token. The others, which few models have, are added after the first K - 1 layers
        of the decoder (Meng et al. 2024, "DeepStack").
        """
        like = next(self._model.parameters())
        given = {name: tensor.to(like.device) for name, tensor in pixels.inputs.items()}
        given["pixel_values"] = given["pixel_values"].to(like.dtype)
        found = self._body.get_image_features(**given, return_dict=True)
        layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return torch.stack([torch.cat([part.reshape(-1, part.shape[-1]) for part in layer]) for layer in layers])

    def tokens_of(self, tokens: Tensor, image: PlacedImage) -> Tensor:
        """Return the places [N] of the tokens [L] of a sequence that stand for an image."""
        return image.start + torch.nonzero(tokens[image.start : image.stop] == self.token)[:, 0]

    def decoder_inputs(self, tokens: Tensor, places: Sequence[Tensor], features: Sequence[Tensor]) -> dict[str, Any]:
        """Return what the decoder gets of tokens [T] in which images stand.

        Args:
            tokens: The tokens.
            places: The places [N] of tokens of each image.
            features: The features [K, N, H] of these tokens.

        Raises:
            RequestError: There are more or fewer features than places.
        """
        embedded: Tensor = self._model.get_input_embeddings()(tokens)
        if not places:
            return {"inputs_embeds": embedded[None]}
        order = torch.argsort(at := torch.cat(list(places)))
        first, *others = torch.cat(list(features), 1).to(embedded.dtype)
        if len(at) != len(first):
            raise RequestError(
                f"the images have {len(at)} tokens, and the model computes {len(first)} features of them"
            )
        given: dict[str, Any] = {"inputs_embeds": embedded.index_copy(0, at, first)[None]}
        if others:
            mask = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, at, value=True)
            given |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": [rows[order] for rows in others]}
        return given

    def positions(self, tokens: Tensor, images: Sequence[PlacedImage], pixels: Sequence[Pixels]) -> Tensor | None:
        """Return the positions [3, L] of a sequence with images in the model's rotary embedding; None if they are plain.

        Args:
            tokens: The sequence [L].
            images: Its images.
            pixels: The pixels of each.

        Source: Wang et al. 2024, "Qwen2-VL": multimodal rotary position embedding.
        """
        if not hasattr(self._body, "get_rope_index"):
            return None
        kinds = torch.zeros_like(tokens, dtype=torch.int32)
        for image in images:
            kinds[self.tokens_of(tokens, image)] = 1
        grid = torch.cat([each.grid for each in pixels if each.grid is not None]).to(tokens.device)
        positions, _ = self._body.get_rope_index(
            input_ids=tokens[None], mm_token_type_ids=kinds[None], image_grid_thw=grid
        )
        return positions[:, 0]


def require_family(config: Any) -> None:
    """Raise `UnsupportedError` for a vision-language model of a family that is not known to be computed correctly."""
    if config.model_type not in FAMILIES:
        message = f"models of the type {config.model_type!r} are not supported with images; those of {', '.join(FAMILIES)} are"
        raise UnsupportedError(message)


def image_token(config: Any) -> int:
    """Return the id of the token that stands for a part of an image."""
    named = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token for token in named if token is not None), -1)


def encoder_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the trained parameters of a vision-language model that are neither its decoder's nor its head's."""
    head = model.get_output_embeddings()
    others = {id(parameter) for part in (decoder_of(model), head) for parameter in part.parameters()}
    return [each for each in model.parameters() if each.requires_grad and id(each) not in others]
