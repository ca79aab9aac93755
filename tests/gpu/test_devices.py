"""What is said of the GPUs that are there."""

import pytest
import torch

from antiphon.cluster.devices import gpus_have_bfloat16
from antiphon.inspect.doctor import describe_hardware

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_gpus_are_named():
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    assert describe_hardware()["CUDA devices"] == ", ".join(names)


def test_gpus_since_ampere_compute_in_bfloat16():
    assert gpus_have_bfloat16() == (torch.cuda.get_device_properties(0).major >= 8)
