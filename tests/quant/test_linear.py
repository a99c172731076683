import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofold.ops.int4 import dequantize
from twofold.quant.linear import FakeQuantLinear, PackedLinear, pack_linears, replace_linears
from twofold.quant.packing import pack_state
from twofold.quant.rounding import fake_quantize, quantize, search_scale
from twofold.quant.scheme import QuantScheme

SCHEME = QuantScheme(group_size=8)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _fake(dtype: torch.dtype = torch.float32, clip_gradient: bool = False) -> FakeQuantLinear:
    weight = _random(12, 32, dtype=dtype)
    scale = search_scale(0.5 * weight, SCHEME)  # half the range, so that many weights are clipped
    return FakeQuantLinear(weight, scale, SCHEME, _random(12, seed=2, dtype=dtype), clip_gradient)


@pytest.mark.parametrize("clip_gradient", [False, True])
def test_gradients_are_those_of_dense_autograd(clip_gradient: bool) -> None:
    fake = _fake(torch.float64, clip_gradient)
    assert fake.bias is not None
    x = _random(3, 5, 32, seed=1, dtype=torch.float64).requires_grad_()
    grad_y = _random(3, 5, 12, seed=4, dtype=torch.float64)
    y = fake(x)
    grads = torch.autograd.grad(y, [x, fake.weight, fake.bias], grad_y)

    q = fake_quantize(fake.weight, fake.scale, SCHEME).requires_grad_()
    dense = F.linear(x, q, fake.bias)
    grad_x, grad_q, grad_b = torch.autograd.grad(dense, [x, q, fake.bias], grad_y)
    steps = (fake.weight.detach().unflatten(1, (-1, 8)) / fake.scale.double().unsqueeze(-1)).flatten(1)
    inside = (steps >= -8.5) & (steps <= 7.5)
    assert 0 < int((~inside).sum()) < inside.numel()
    assert torch.equal(y, dense)
    assert torch.equal(grads[0], grad_x)
    assert torch.equal(grads[1], grad_q * inside if clip_gradient else grad_q)
    assert torch.equal(grads[2], grad_b)


def test_clipped_gradient_is_that_of_torch() -> None:
    """torch's own fake quantization, one scale a channel, masks the gradient of clipped weights."""
    weight = _random(6, 16)
    scale = search_scale(0.4 * weight, QuantScheme(group_size=-1))
    fake = FakeQuantLinear(weight, scale, QuantScheme(group_size=-1), clip_gradient=True)
    grad = _random(6, 16, seed=5)
    (ours,) = torch.autograd.grad(fake.dense_weight(torch.float32), fake.weight, grad)
    theirs_weight = weight.clone().requires_grad_()
    zero_point = torch.zeros(6, dtype=torch.int32)
    out = torch.fake_quantize_per_channel_affine(theirs_weight, scale.float()[:, 0], zero_point, 0, -8, 7)
    (theirs,) = torch.autograd.grad(out, theirs_weight, grad)
    assert 0 < int((theirs == 0).sum()) < theirs.numel()
    assert torch.equal(ours, theirs)


def test_training_moves_the_weight_and_never_the_scale() -> None:
    fake = _fake()
    before, scale = fake.weight.detach().clone(), fake.scale.clone()
    assert {name for name, _ in fake.named_parameters()} == {"weight", "bias"}
    optimizer = torch.optim.AdamW(fake.parameters(), lr=1e-2)
    x, target = _random(64, 32, seed=1), _random(64, 12, seed=7)
    losses = []
    for _ in range(30):
        loss = (fake(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(fake.weight, before)
    assert torch.equal(fake.scale.view(torch.int16), scale.view(torch.int16))


def test_the_master_is_float32_and_apart_from_the_source() -> None:
    linear = nn.Linear(32, 4, bias=False, dtype=torch.bfloat16)
    fake = FakeQuantLinear.from_linear(linear, search_scale(linear.weight, SCHEME), SCHEME)
    assert fake.weight.dtype == torch.float32
    assert fake(torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with torch.no_grad():
        fake.weight.zero_()
    assert bool(linear.weight.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cached", [False, True])
def test_packed_is_bit_equal_to_dense_and_to_fake(dtype: torch.dtype, cached: bool) -> None:
    fake = _fake()
    assert fake.bias is not None
    packed = PackedLinear.from_fake(fake, dtype if cached else None)
    x = _random(5, 32, seed=1).to(dtype)
    q = quantize(fake.weight, fake.scale, SCHEME)
    dense = dequantize(q, fake.scale, 8, dtype)
    packed.bias = fake.bias = nn.Parameter(fake.bias.detach().to(dtype), requires_grad=False)
    assert torch.equal(packed(x), F.linear(x, dense, fake.bias))
    assert torch.equal(packed(x), fake(x))


def test_packed_state_dict_is_the_checkpoint_format() -> None:
    fake = _fake()
    q = quantize(fake.weight, fake.scale, SCHEME)
    packed = PackedLinear.from_integers(q, fake.scale, SCHEME, cache_dtype=torch.float32)
    expected = pack_state("layer", q, fake.scale, (12, 32))
    state = nn.ModuleDict({"layer": packed}).state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_renews_the_dense_copy(assign: bool) -> None:
    fake = _fake()
    source = PackedLinear.from_fake(fake, torch.float32)
    layer = PackedLinear(32, 12, SCHEME, bias=True, cache_dtype=torch.float32)
    model = nn.Sequential(layer)
    x = _random(5, 32, seed=1)
    for factor in (1, -1):
        source = PackedLinear.from_integers(
            quantize(factor * fake.weight, fake.scale, SCHEME), fake.scale, SCHEME, fake.bias, torch.float32
        )
        model.load_state_dict(nn.Sequential(source).state_dict(), assign=assign)
        assert torch.equal(model(x), source(x))
    assert torch.equal(copy.deepcopy(model)(x), source(x))


def test_an_input_of_another_dtype_than_the_dense_copy_is_refused() -> None:
    packed = PackedLinear.from_fake(_fake(), torch.float32)
    with pytest.raises(ValueError, match="cache_dtype"):
        packed(torch.zeros(1, 32, dtype=torch.bfloat16))


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        FakeQuantLinear(torch.zeros(4, 32), torch.ones(4, 2), SCHEME)
    with pytest.raises(ValueError, match="do not fit"):
        PackedLinear.from_integers(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 2), SCHEME)
    with pytest.raises(ValueError, match="bfloat16"):
        PackedLinear.from_integers(torch.zeros(4, 32, dtype=torch.int8), torch.full((4, 4), 0.1), SCHEME)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.ModuleDict({"inner": nn.Linear(32, 8)}), nn.ReLU())


def _make(name: str, linear: nn.Linear) -> nn.Module:
    return FakeQuantLinear.from_linear(linear, search_scale(linear.weight, SCHEME), SCHEME)


def test_replace_takes_exactly_the_named_layers() -> None:
    model = _model()
    seen: list[str] = []

    def make(name: str, linear: nn.Linear) -> nn.Module:
        seen.append(name)
        return _make(name, linear)

    replace_linears(model, ["1.inner"], make)
    assert seen == ["1.inner"]
    kinds = {name: type(layer) for name, layer in model.named_modules()}
    assert (kinds["0"], kinds["1.inner"]) == (nn.Linear, FakeQuantLinear)
    assert pack_linears(model, torch.float32) == ["1.inner"]
    assert isinstance(model.get_submodule("1.inner"), PackedLinear)


@pytest.mark.parametrize("wrong", ["1.outer", "2", "1", ""])
def test_replace_refuses_a_wrong_name_and_touches_nothing(wrong: str) -> None:
    model = _model()
    with pytest.raises(ValueError, match=repr(wrong) if wrong in ("1.outer", "") else wrong):
        replace_linears(model, ["0", wrong], _make)
    assert isinstance(model[0], nn.Linear)
