"""Which docker image a sandbox of the service gets."""

import pytest

from antiphon.core.config import load
from antiphon.core.errors import ConfigError
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.quotas import make_backend_config
from antiphon.sandbox.service.records import Sandbox
from antiphon.sandbox.service.rock import STATUS_CODES, ListQuery, StartBody

TWO = ServiceConfig(images=("python", "node:22"))


def start(config: ServiceConfig, **body) -> Sandbox:
    """The record of the sandbox that a request gets."""
    request = StartBody.model_validate(body).to_request({})
    return Sandbox(id="a", request=request, backend_config=make_backend_config(config, request))


@pytest.mark.parametrize(
    ("body", "image"), [({}, "python"), ({"image": "python"}, "python"), ({"image": "node:22"}, "node:22")]
)
def test_a_client_gets_the_image_that_it_names(body, image):
    sandbox = start(TWO, **body)
    assert sandbox.backend_config.image == sandbox.image == image
    assert ListQuery(image=image).matches(sandbox) and not ListQuery(image="x").matches(sandbox)


@pytest.mark.parametrize(
    "image", ["node", "node:23", "python:latest", "docker.io/library/python", "--privileged", " python"]
)
def test_an_image_that_is_not_offered_is_refused(image):
    with pytest.raises(RefusedError) as refused:
        start(TWO, image=image)
    assert refused.value.reason is Reason.INPUT and STATUS_CODES[Reason.INPUT][0] == 400
    assert all(word in str(refused.value) for word in ("image", image, "python", "node:22"))


def test_without_images_the_name_is_a_label():
    sandbox = start(ServiceConfig(), image="anything")
    assert (sandbox.backend_config.image, sandbox.image) == ("", "anything")
    assert start(ServiceConfig()).image is None


def test_an_image_is_no_option_of_docker():
    with pytest.raises(ConfigError) as error:
        load(None, ["images=[python,--privileged]"], model=ServiceConfig)
    assert error.value.key.startswith("images")
