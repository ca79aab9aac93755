"""Lean layers: the same values and derivatives as the layers they replace."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from antiphon.learning.model.memory_efficient_layers import _GatedProjection, _RMSNorm, use_memory_efficient_layers

from .conftest import MODELS, SHAPE


def test_derivatives_are_right():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, 1e-5), (random(2, 3, 5), random(5)))
    assert torch.autograd.gradcheck(_GatedProjection.apply, (random(2, 3, 5), random(2, 3, 5), random(4, 5)))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_computes_the_same(model_directories, kind, half):
    plain = AutoModelForCausalLM.from_pretrained(model_directories[kind])
    lean = AutoModelForCausalLM.from_pretrained(model_directories[kind])
    use_memory_efficient_layers(lean)
    swapped = [name for name, module in lean.named_modules() if "forward" in vars(module)]
    assert any(name.endswith("mlp") for name in swapped) and any(name.endswith("norm") for name in swapped)
    tokens = torch.arange(20)[None]
    for model in (plain, lean):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
    for (name, a), b in zip(plain.named_parameters(), lean.parameters(), strict=True):
        assert (b.grad - a.grad).norm() <= (2e-2 if half else 1e-4) * a.grad.norm(), name


def norms(kind, weight_dtype):
    """A norm of transformers with random weights, and the same that is lean."""
    torch.manual_seed(0)
    plain = kind(64, eps=1e-5).to(weight_dtype)
    torch.nn.init.normal_(plain.weight)
    lean = copy.deepcopy(plain)
    use_memory_efficient_layers(lean)
    return plain, lean


def saved_bytes(module, x):
    """What `module` keeps for its backward pass beside its weights, in bytes; and its output."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(x)
    return sum(size for place, size in kept.items() if place != module.weight.untyped_storage().data_ptr()), out


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_of_halves_computes_in_single_precision(kind, weight_dtype, dtype):
    x, results = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype), []
    for norm in norms(kind, weight_dtype):
        own = x.clone().requires_grad_()
        kept, out = saved_bytes(norm, own)
        (out.float() * torch.linspace(-1, 1, 64)).sum().backward()
        results.append((kept, out, own.grad, norm.weight.grad))
    (plain_kept, *plain), (lean_kept, *lean) = results
    half = dtype != torch.float32 or weight_dtype != torch.float32
    assert torch.equal(lean[0], plain[0]) if half else torch.allclose(lean[0], plain[0], rtol=1e-5)
    for found, expected in zip(lean[1:], plain[1:], strict=True):
        assert found.dtype == expected.dtype
        assert (found - expected).float().norm() <= (2e-2 if half else 1e-5) * expected.float().norm()
    if kind is LlamaRMSNorm or not half:
        assert lean_kept == x.nbytes + 5 * 4 < plain_kept


def test_a_feed_forward_of_another_shape_is_left_alone():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Phi3ForCausalLM(Phi3Config(**sizes, vocab_size=40, pad_token_id=0))  # gate and up are one matrix
    use_memory_efficient_layers(model)
    swapped = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert swapped and all(name.endswith("norm") for name in swapped)


def test_a_norm_of_another_kind_is_left_alone():
    class OtherRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4))
            self.variance_epsilon = 1e-5

        def forward(self, x):
            return x * (1 + self.weight)

    module = OtherRMSNorm()
    use_memory_efficient_layers(module)
    assert "forward" not in vars(module)


class Drawn(TorchDispatchMode):
    """Counts the numbers that are drawn."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        if operation is torch.ops.aten.normal_.default:
            self.count += args[0].numel()
        return operation(*args, **options or {})


@pytest.mark.parametrize("layers", [1, 6])
def test_of_layers_without_memory_one_is_tried(layers):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": layers}))
    with Drawn() as drawn:
        use_memory_efficient_layers(model)
    assert sum("forward" in vars(module) for module in model.modules()) == 3 * layers + 1
    assert drawn.count == sum(p.numel() for p in (*model.model.layers[0].mlp.parameters(), model.model.norm.weight))


def test_layers_without_memory_that_differ_are_tried_one_by_one():
    class ScaledRMSNorm(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, device="meta"))
            self.variance_epsilon = 1e-5
            self.scale = scale

        def forward(self, x):
            return self.scale * self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    model = torch.nn.Sequential(ScaledRMSNorm(1.0), ScaledRMSNorm(2.0))
    use_memory_efficient_layers(model)
    assert ["forward" in vars(module) for module in model] == [True, False]
