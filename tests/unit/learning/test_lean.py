"""Lean layers: the same values and derivatives as the layers they replace."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.learning.lean import _GatedProjection, _RMSNorm, make_lean

from .conftest import MODELS


def test_derivatives_are_right():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, 1e-5), (random(2, 3, 5), random(5)))
    assert torch.autograd.gradcheck(_GatedProjection.apply, (random(2, 3, 5), random(2, 3, 5), random(4, 5)))


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_computes_the_same(model_directories, kind):
    plain = AutoModelForCausalLM.from_pretrained(model_directories[kind])
    lean = AutoModelForCausalLM.from_pretrained(model_directories[kind])
    make_lean(lean)
    swapped = [name for name, module in lean.named_modules() if "forward" in vars(module)]
    assert any(name.endswith("mlp") for name in swapped) and any(name.endswith("norm") for name in swapped)
    tokens = torch.arange(20)[None]
    for model in (plain, lean):
        model(tokens, labels=tokens).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_norm_of_another_kind_is_left_alone():
    class OtherRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4))
            self.variance_epsilon = 1e-5

        def forward(self, x):
            return x * (1 + self.weight)

    module = OtherRMSNorm()
    make_lean(module)
    assert "forward" not in vars(module)
