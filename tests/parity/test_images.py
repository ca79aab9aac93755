"""Vision-language models: engine and learner compute what transformers computes with its own processor."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core.errors import DataError, RequestError
from antiphon.core.image_checks import open_image
from antiphon.core.types import (
    AttemptId,
    GenerateRequest,
    Message,
    OnUpdate,
    PlacedImage,
    Sampling,
    Segment,
    WeightsUpdate,
)
from antiphon.core.vision import VisionEncoder
from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.data_samples import sample_from_tokens, token_mean_batch
from antiphon.learning.packing import pack_samples, split_packs
from antiphon.learning.torch_learner import TorchLearner
from antiphon.tasks.rendering import Renderer
from tests.vision_models import MARKERS, load_processor, picture, write_vision_model

RED, GREEN, DOTTED = picture((255, 0, 0)), picture((0, 255, 0), (50, 30)), picture((255, 0, 0), dots=9)
CONVERSATIONS = {
    "two": [Message("user", "what is <image> or <image>?", images=(RED, GREEN))],
    "sibling": [Message("user", "what is <image> or <image>?", images=(RED, GREEN))],
    "other": [Message("user", "what is <image> or <image>?", images=(DOTTED, GREEN))],
    "text": [Message("user", "hello")],
    "turns": [
        Message("user", "<image>?", images=(GREEN,)),
        Message("assistant", "abc"),
        Message("user", "<image>", images=(DOTTED,)),
    ],
}


class Oracle:
    """The model by transformers alone: text and images go through its own processor, all images of a text at once."""

    def __init__(self, directory, weights=None):
        self.model = AutoModelForImageTextToText.from_pretrained(directory).eval()
        self.processor = load_processor(directory)
        self.renderer = Renderer(directory)
        if weights is not None:
            self.model.load_state_dict(weights)

    def inputs(self, messages):
        images = [open_image(image) for message in messages for image in message.images]
        text = self.renderer._render(messages, ())
        return self.processor(
            text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=False
        )

    def logprobs(self, messages, response):
        """Log-probs [C] of a response, with a gradient.

        The response follows the prompt by the KV cache, as in `generate`: a sampled image token is a token like others.
        """
        self.model.model.rope_deltas = None  # Qwen's models keep it of the last prompt with images
        prompt = self.model(**self.inputs(messages), use_cache=True)
        after = torch.tensor([list(response)])
        said = self.model(input_ids=after, past_key_values=prompt.past_key_values)
        logits = torch.cat([prompt.logits[0, -1:], said.logits[0, :-1]]).log_softmax(-1)
        return logits.gather(1, after[0][:, None])[:, 0]


@pytest.fixture(scope="module", params=MARKERS)
def directory(request, tmp_path_factory):
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp(request.param)
    write_vision_model(place, request.param)
    return place


def encode(directory, messages):
    renderer = Renderer(directory)
    return (
        renderer.encode_images(messages) if any(m.images for m in messages) else (renderer.encode_prompt(messages), ())
    )


def make_request(directory, name, messages, **sampling):
    tokens, images = encode(directory, messages)
    sampling = Sampling(max_tokens=12, **{"seed": len(name), **sampling})
    return GenerateRequest(id=name, tokens=tokens, attachments=images, sampling=sampling)


def open_engine(directory, receive=lambda update: (), **options):
    options = {"slots": 4, "device": "cpu", **options}
    return NativeEngine(str(directory), EngineConfig(**options), receive=receive)


def run(engine, steps=10_000):
    """Step until nothing is left; return tokens and log-probs by request."""
    found = {}
    while engine.busy and (steps := steps - 1):
        for delta in engine.step():
            if delta.restarted:
                found.pop(delta.request, None)
            tokens, logprobs = found.setdefault(delta.request, ([], []))
            tokens += delta.tokens.tolist()
            logprobs += delta.logprobs.tolist()
    return found


def test_prompt_tokens_are_those_of_the_processor(directory):
    oracle = Oracle(directory)
    for messages in CONVERSATIONS.values():
        tokens, images = encode(directory, messages)
        assert tokens.tolist() == oracle.inputs(messages)["input_ids"][0].tolist()
        assert [image.data for image in images] == [image for message in messages for image in message.images]
        own = oracle.processor.image_token_id
        inside = [place for image in images for place in range(image.start, image.stop) if tokens[place] == own]
        assert inside == np.flatnonzero(tokens == own).tolist()


@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 5}, {"draft_tokens": 4}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engine_samples_what_transformers_says(directory, options, temperature):
    engine, oracle = open_engine(directory, **options), Oracle(directory)
    for name, messages in CONVERSATIONS.items():
        engine.add(make_request(directory, name, messages, temperature=temperature))
    for name, (tokens, logprobs) in run(engine).items():
        with torch.no_grad():
            np.testing.assert_allclose(logprobs, oracle.logprobs(CONVERSATIONS[name], tokens), atol=2e-5)
        if not temperature:
            said = oracle.model.generate(**oracle.inputs(CONVERSATIONS[name]), max_new_tokens=12, do_sample=False)
            assert said[0, -len(tokens) :].tolist() == tokens
    assert abs(engine_difference(directory)) > 100 * 2e-5  # the images matter


def engine_difference(directory):
    """Difference of the first log-prob between prompts that differ by an image alone."""
    oracle = Oracle(directory)
    with torch.no_grad():
        return float(oracle.logprobs(CONVERSATIONS["two"], [5]) - oracle.logprobs(CONVERSATIONS["other"], [5]))


def test_siblings_share_what_was_read(directory):
    """... and no prompt with another image does."""
    engine = open_engine(directory)
    alone = len(encode(directory, CONVERSATIONS["two"])[0])
    for name in ("two", "sibling"):
        engine.add(make_request(directory, name, CONVERSATIONS[name]))
    run(engine)
    assert engine.counters.read_tokens == alone
    engine.add(make_request(directory, "other", CONVERSATIONS["other"]))
    run(engine)
    assert engine.counters.read_tokens > alone + 0.5 * alone


def test_next_turn_reads_no_image_again(directory):
    engine, oracle = open_engine(directory), Oracle(directory)
    first = make_request(directory, "first", CONVERSATIONS["two"], temperature=0.0)
    engine.add(first)
    (tokens, _), before = run(engine)["first"], engine.counters.read_tokens
    longer = np.concatenate([first.tokens, tokens]).astype(np.int32)
    engine.add(replace(first, id="second", tokens=longer, sampled=len(tokens)))
    (more, logprobs) = run(engine)["second"]
    assert engine.counters.read_tokens - before <= 2
    with torch.no_grad():
        want = oracle.logprobs(CONVERSATIONS["two"], tokens + more)[len(tokens) :]
    np.testing.assert_allclose(logprobs, want, atol=2e-5)


@pytest.mark.parametrize("mode", [OnUpdate.RECOMPUTE, OnUpdate.RESTART])
def test_new_weights_see_images_anew(directory, mode):
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_pretrained(directory)
    new = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    engine = open_engine(directory, receive=lambda update: new.items())
    engine.add(make_request(directory, "two", CONVERSATIONS["two"]))
    old, _ = run(engine, steps=4)["two"]
    engine.load(WeightsUpdate(version=1, location="", manifest=None), mode)
    said, logprobs = run(engine)["two"]
    kept = old if mode is OnUpdate.RECOMPUTE else []
    with torch.no_grad():
        want = Oracle(directory, new).logprobs(CONVERSATIONS["two"], kept + said)[len(kept) :]
    np.testing.assert_allclose(logprobs, want, atol=5e-5)


def written(tokens, start, number):
    return sample_from_tokens(AttemptId(number, 0, 0), tokens[:start], tokens[start:])


def test_order_of_images_is_that_of_their_places(directory):
    """... whatever order they are given in."""
    model = AutoModelForImageTextToText.from_pretrained(directory).eval()
    encoder = VisionEncoder(model, str(directory))
    tokens, images = encode(directory, CONVERSATIONS["two"])
    tokens = torch.from_numpy(tokens.astype(np.int64))
    given = [(encoder.tokens_of(tokens, image), encoder.features(encoder.pixels(image.data))) for image in images]
    hidden = []
    for order in (given, given[::-1]):
        places, features = zip(*order, strict=True)
        with torch.no_grad():
            hidden.append(model.get_decoder()(**encoder.decoder_inputs(tokens, places, features)).last_hidden_state)
    torch.testing.assert_close(*hidden, atol=1e-6, rtol=0)


def samples_with_images(directory):
    """A sample of each conversation, by an engine; and the conversations of the samples."""
    engine = open_engine(directory)
    requests = {name: make_request(directory, name, messages) for name, messages in CONVERSATIONS.items()}
    for request in requests.values():
        engine.add(request)
    said, samples = run(engine), []
    for number, (name, request) in enumerate(requests.items()):
        response = np.array(said[name][0], np.int32)
        sample = written(np.concatenate([request.tokens, response]), len(request.tokens), number)
        segment = replace(sample.segment, images=request.attachments)
        samples.append(replace(sample, segment=segment))
    return samples, [said[name][0] for name in requests]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("pack", [40, 1000])
def test_learner_computes_what_transformers_computes(directory, share, pack):
    samples, responses = samples_with_images(directory)
    learner, oracle = TorchLearner(str(directory), LearnerConfig(device="cpu"), seed=0), Oracle(directory)
    members, packs = pack_samples(samples, pack, share=share)
    assert share or sum(len(each.tokens) for each in packs) == sum(len(each.segment.tokens) for each in samples)
    predicted = split_packs(samples, members, learner.predict(packs), share)
    for messages, response, found in zip(CONVERSATIONS.values(), responses, predicted, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(found[-len(response) :], oracle.logprobs(messages, response), atol=2e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_the_vision_encoder(directory, checkpointing):
    samples, responses = samples_with_images(directory)
    config = LearnerConfig(device="cpu", gradient_checkpointing=checkpointing)
    learner, oracle = TorchLearner(str(directory), config, seed=0), Oracle(directory)
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(), 1)
    (update,) = token_mean_batch([[sample] for sample in samples], 1000).updates
    for pack in update.packs[0]:
        learner._backward(pack)
    total = sum(oracle.logprobs(each, said).sum() for each, said in zip(CONVERSATIONS.values(), responses, strict=True))
    (-total / sum(map(len, responses))).backward()
    wanted = {name: parameter.grad for name, parameter in oracle.model.named_parameters()}
    for name, parameter in learner.model.named_parameters():
        if wanted[name] is not None:
            torch.testing.assert_close(parameter.grad, wanted[name], atol=2e-5, rtol=2e-3)
    of_vision = [grad for name, grad in wanted.items() if "vis" in name and grad is not None]
    assert of_vision and max(float(grad.abs().max()) for grad in of_vision) > 1e-4


def test_images_of_one_size_do_not_share_a_prefix():
    tokens = np.array([1, 9, 9, 9, 2, 3], np.int32)
    base = written(tokens, 4, 0).segment

    def with_image(data: bytes) -> Segment:
        return replace(base, images=(PlacedImage(data, 1, 4),))

    one, same, other = (with_image(data) for data in (b"one", b"one", b"other"))
    assert one.token_keys().tolist() == same.token_keys().tolist() != other.token_keys().tolist()
    assert (one.token_keys() == other.token_keys()).tolist() == [True, False, False, False, True, True]


def test_image_that_cannot_be_shown_fails_alone(directory):
    engine, oracle = open_engine(directory), Oracle(directory)
    good = make_request(directory, "two", CONVERSATIONS["two"])
    bad = [PlacedImage(b"no image", image.start, image.stop) for image in good.attachments]
    short = [replace(good.attachments[0], stop=good.attachments[0].stop - 1), good.attachments[1]]
    engine.add(good)
    for name, images in {"bad": bad, "short": short, "outside": [replace(good.attachments[0], stop=999)]}.items():
        with pytest.raises(RequestError):
            engine.add(replace(good, id=name, attachments=tuple(images)))
    (said, logprobs) = run(engine)["two"]
    with torch.no_grad():
        np.testing.assert_allclose(logprobs, oracle.logprobs(CONVERSATIONS["two"], said), atol=2e-5)


def test_markers_of_the_model_in_texts_are_refused(directory):
    marker = Renderer(directory)._images().marker
    messages = [*CONVERSATIONS["two"], Message("assistant", f"a {marker}"), Message("user", "so?")]
    with pytest.raises(DataError):
        encode(directory, messages)


def test_families_that_were_not_compared_are_refused(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"model_type": "gemma3"}))
    with pytest.raises(DataError):
        encode(tmp_path / "other", CONVERSATIONS["two"])


def test_model_without_processor_reads_text(directory, tmp_path):
    place = shutil.copytree(directory, tmp_path / "bare")
    for file in place.glob("*processor_config.json"):
        file.unlink()
    engine = open_engine(place)
    engine.add(make_request(place, "text", CONVERSATIONS["text"]))
    assert len(run(engine)["text"][0]) > 0
