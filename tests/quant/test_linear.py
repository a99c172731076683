import copy

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor, nn

from twofold.ops.integers import dequantize
from twofold.quant.linear import FakeQuantLinear, PackedLinear, pack_linears, replace_linears
from twofold.quant.rounding import Grid, fake_quantize, quantize, search_grid
from twofold.quant.scheme import QuantScheme

SCHEME = QuantScheme(group_size=8)
SCHEMES = [QuantScheme(bits=bits, group_size=8, symmetric=symmetric) for bits in (4, 8) for symmetric in (True, False)]
each_scheme = pytest.mark.parametrize(
    "scheme", SCHEMES, ids=[f"int{s.bits}{'' if s.symmetric else '-zero'}" for s in SCHEMES]
)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _fake(
    dtype: torch.dtype = torch.float32,
    clip_gradient: bool = False,
    scheme: QuantScheme = SCHEME,
    learn_scale: bool = False,
) -> FakeQuantLinear:
    weight = _random(12, 32, dtype=dtype) + (0.0 if scheme.symmetric else 0.5)
    grid = search_grid(0.5 * weight, scheme)  # half the range, so that many weights are clipped
    bias = _random(12, seed=2, dtype=dtype)
    return FakeQuantLinear(weight, grid, scheme, bias, clip_gradient=clip_gradient, learn_scale=learn_scale)


def _by_group(tensor_NG: Tensor) -> Tensor:
    return tensor_NG.repeat_interleave(8, dim=1)


@each_scheme
@pytest.mark.parametrize("clip_gradient", [False, True])
def test_gradients_are_those_of_dense_autograd(clip_gradient: bool, scheme: QuantScheme) -> None:
    fake = _fake(torch.float64, clip_gradient, scheme)
    assert fake.bias is not None
    x = _random(3, 5, 32, seed=1, dtype=torch.float64).requires_grad_()
    grad_y = _random(3, 5, 12, seed=4, dtype=torch.float64)
    y = fake(x)
    grads = torch.autograd.grad(y, [x, fake.weight, fake.bias], grad_y)

    q = fake_quantize(fake.weight, fake.grid, scheme).requires_grad_()
    dense = F.linear(x, q, fake.bias)
    grad_x, grad_q, grad_b = torch.autograd.grad(dense, [x, q, fake.bias], grad_y)
    steps = fake.weight.detach() / _by_group(fake.scale.double())
    if fake.zero is not None:
        steps += _by_group(fake.zero)
    inside = (steps >= scheme.qmin - 0.5) & (steps <= scheme.qmax + 0.5)
    assert 0 < int((~inside).sum()) < inside.numel()
    assert torch.equal(y, dense)
    assert torch.equal(grads[0], grad_x)
    assert torch.equal(grads[1], grad_q * inside if clip_gradient else grad_q)
    assert torch.equal(grads[2], grad_b)


@each_scheme
@pytest.mark.parametrize("clip_gradient", [False, True])
def test_the_gradient_of_a_scale_is_that_of_its_definition(clip_gradient: bool, scheme: QuantScheme) -> None:
    """Dense float64 autograd through (clamp(round(w / s + zero)) - zero) s, the derivative of round put at 1."""
    fake = _fake(torch.float64, clip_gradient, scheme, learn_scale=True)
    with torch.no_grad():
        fake.scale.mul_(1.001)  # no bfloat16 value any more
    stored = fake.grid.scale_NG
    assert not torch.equal(stored.float(), fake.scale)
    w, s = fake.weight.detach().clone().requires_grad_(), stored.double().requires_grad_()
    zero = torch.zeros_like(w) if fake.zero is None else _by_group(fake.zero.double())
    level = w / _by_group(s) + zero
    rounded = level + (level.round() - level).detach()
    dense = (rounded.clamp(scheme.qmin, scheme.qmax) - zero) * _by_group(s)
    grad = _random(12, 32, seed=5, dtype=torch.float64)
    expected_w, expected_s = torch.autograd.grad(dense, [w, s], grad)

    q = fake.dense_weight(torch.float64)
    assert torch.allclose(q, dense, rtol=1e-12, atol=0)
    found_w, found_s = torch.autograd.grad(q, [fake.weight, fake.scale], grad)
    assert (fake.scale.dtype, found_s.dtype) == (torch.float32, torch.float32)
    assert torch.allclose(found_s.double(), expected_s, rtol=1e-6, atol=1e-6)
    if clip_gradient:
        assert 0 < int((expected_w == 0).sum()) < expected_w.numel()
        assert torch.allclose(found_w, expected_w, rtol=1e-12, atol=0)
    else:
        assert torch.equal(found_w, grad)


def test_the_gradient_of_a_scale_is_that_of_torch() -> None:
    """torch's own learnable fake quantization, one scale a channel, follows the same paper."""
    weight, scheme = _random(6, 16), QuantScheme(group_size=-1)
    fake = FakeQuantLinear(weight, search_grid(0.4 * weight, scheme), scheme, clip_gradient=True, learn_scale=True)
    grad = _random(6, 16, seed=5)
    found = torch.autograd.grad(fake.dense_weight(torch.float32), [fake.weight, fake.scale], grad)
    theirs_weight = weight.clone().requires_grad_()
    theirs_scale = fake.scale.detach()[:, 0].clone().requires_grad_()
    out = torch._fake_quantize_learnable_per_channel_affine(theirs_weight, theirs_scale, torch.zeros(6), 0, -8, 7, 1.0)
    expected = torch.autograd.grad(out, [theirs_weight, theirs_scale], grad)
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1][:, 0], expected[1], rtol=1e-4, atol=1e-5)


def test_clipped_gradient_is_that_of_torch() -> None:
    """torch's own fake quantization, one scale a channel, masks the gradient of clipped weights."""
    weight, scheme = _random(6, 16), QuantScheme(group_size=-1)
    grid = search_grid(0.4 * weight, scheme)
    fake = FakeQuantLinear(weight, grid, scheme, clip_gradient=True)
    grad = _random(6, 16, seed=5)
    (ours,) = torch.autograd.grad(fake.dense_weight(torch.float32), fake.weight, grad)
    theirs_weight = weight.clone().requires_grad_()
    zero_point = torch.zeros(6, dtype=torch.int32)
    scale = grid.scale_NG.float()[:, 0]
    out = torch.fake_quantize_per_channel_affine(theirs_weight, scale, zero_point, 0, -8, 7)
    (theirs,) = torch.autograd.grad(out, theirs_weight, grad)
    assert 0 < int((theirs == 0).sum()) < theirs.numel()
    assert torch.equal(ours, theirs)


def _train(fake: FakeQuantLinear, rate: float = 1e-2) -> list[float]:
    optimizer = torch.optim.AdamW(fake.parameters(), lr=rate, weight_decay=0.0)
    x, target = _random(64, 32, seed=1), _random(64, 12, seed=7)
    losses = []
    for _ in range(30):
        loss = (fake(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _bytes(fake: FakeQuantLinear) -> list[Tensor]:
    scale, zero = fake.grid
    return [scale.view(torch.int16).clone(), *([] if zero is None else [zero.clone()])]


@each_scheme
def test_training_moves_the_weight_and_never_the_scale(scheme: QuantScheme) -> None:
    fake = _fake(scheme=scheme)
    before, grid = fake.weight.detach().clone(), _bytes(fake)
    assert {name for name, _ in fake.named_parameters()} == {"weight", "bias"}
    losses = _train(fake)
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(fake.weight, before)
    assert fake.scale.dtype == torch.bfloat16
    assert all(torch.equal(*pair) for pair in zip(_bytes(fake), grid, strict=True))


@each_scheme
def test_learned_scales_move_and_the_packed_layer_has_them(scheme: QuantScheme) -> None:
    fake = _fake(scheme=scheme, learn_scale=True)
    start, zero = fake.grid
    assert {name for name, _ in fake.named_parameters()} == {"weight", "bias", "scale"}
    fake.weight.requires_grad_(False)
    losses = _train(fake, 2e-4)
    assert losses[-1] < losses[0]
    assert (fake.grid.scale_NG != start).float().mean() > 0.9
    assert zero is None or torch.equal(zero, fake.zero)
    packed = PackedLinear.from_fake(fake)
    x = _random(5, 32, seed=1)
    with torch.no_grad():
        assert torch.equal(packed(x), fake(x))
        fake.requires_grad_(False)  # frozen for good, it still computes what was trained
        assert torch.equal(packed(x), fake(x))
    assert torch.equal(packed.weight_scale, fake.grid.scale_NG)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-42])
def test_a_learned_scale_stays_a_positive_normal_number(value: float) -> None:
    fake = _fake(learn_scale=True)
    with torch.no_grad():
        fake.scale[0, 0] = value
    q = fake.dense_weight(torch.float32)
    q.square().mean().backward()
    assert fake.scale.grad is not None
    assert bool(torch.isfinite(fake.scale.grad).all())  # where w / s has overflowed as well
    assert float(fake.grid.scale_NG[0, 0]) == torch.finfo(torch.bfloat16).tiny
    assert bool(torch.isfinite(q).all())
    assert torch.equal(PackedLinear.from_fake(fake).dense_weight(torch.float32), q)


def test_the_master_is_float32_and_apart_from_the_source() -> None:
    linear = nn.Linear(32, 4, bias=False, dtype=torch.bfloat16)
    fake = FakeQuantLinear.from_linear(linear, search_grid(linear.weight, SCHEME), SCHEME)
    assert fake.weight.dtype == torch.float32
    assert fake(torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with torch.no_grad():
        fake.weight.zero_()
    assert bool(linear.weight.any())


@each_scheme
@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cached", [False, True])
def test_packed_is_bit_equal_to_dense_and_to_fake(
    dtype: torch.dtype, cached: bool, scheme: QuantScheme, learn_scale: bool
) -> None:
    fake = _fake(scheme=scheme, learn_scale=learn_scale)
    if learn_scale:
        with torch.no_grad():
            fake.scale.mul_(1.001)
    assert fake.bias is not None
    packed = PackedLinear.from_fake(fake, dtype if cached else None)
    x = _random(5, 32, seed=1).to(dtype)
    q = quantize(fake.weight, fake.grid, scheme)
    dense = dequantize(q, *fake.grid, 8, dtype)
    packed.bias = fake.bias = nn.Parameter(fake.bias.detach().to(dtype), requires_grad=False)
    assert torch.equal(packed(x), F.linear(x, dense, fake.bias))
    assert torch.equal(packed(x), fake(x))
    assert all(torch.equal(*pair) for pair in zip(packed.grid, fake.grid, strict=True) if pair[0] is not None)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("rows", "num_inputs", "group_size"), [(6, 64, 32), (8, 64, 8), (13, 64, -1), (6, 37, -1), (1, 37, 37)]
)
def test_the_state_is_that_of_compressed_tensors(
    rows: int, num_inputs: int, group_size: int, symmetric: bool, bits: int
) -> None:
    """They decompress our tensors to our weights, and compress the weights to our tensors."""
    scheme = QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric)
    weight = _random(rows, num_inputs) + 0.3
    grid = search_grid(weight, scheme)
    packed = PackedLinear.from_integers(quantize(weight, grid, scheme), grid, scheme)
    state = packed.state_dict()
    theirs = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=symmetric, group_size=group_size)
    )
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    dense = compressor.decompress(dict(state), theirs)["weight"]
    assert dense.dtype == torch.bfloat16
    assert torch.equal(dense, packed.dense_weight(torch.bfloat16))
    given = {"weight": weight, "weight_scale": grid.scale_NG}
    if grid.zero_NG is not None:
        given["weight_zero_point"] = grid.zero_NG
    compressed = compressor.compress(given, theirs)
    assert set(compressed) == set(state)
    assert all(torch.equal(compressed[key], state[key]) for key in state)
    assert all(compressed[key].dtype == state[key].dtype for key in state)
    assert {key: list(tensor.shape) for key, tensor in PackedLinear(num_inputs, rows, scheme).state_dict().items()} == {
        key: list(tensor.shape) for key, tensor in state.items()
    }


@each_scheme
@pytest.mark.parametrize("assign", [False, True])
def test_loading_renews_the_dense_copy(assign: bool, scheme: QuantScheme) -> None:
    fake = _fake(scheme=scheme)
    source = PackedLinear.from_fake(fake, torch.float32)
    layer = PackedLinear(32, 12, scheme, bias=True, cache_dtype=torch.float32)
    model = nn.Sequential(layer)
    x = _random(5, 32, seed=1)
    for factor in (1, -1):
        source = PackedLinear.from_integers(
            quantize(factor * fake.weight, fake.grid, scheme), fake.grid, scheme, fake.bias, torch.float32
        )
        model.load_state_dict(nn.Sequential(source).state_dict(), assign=assign)
        assert torch.equal(model(x), source(x))
    assert torch.equal(copy.deepcopy(model)(x), source(x))


def test_an_input_of_another_dtype_than_the_dense_copy_is_refused() -> None:
    packed = PackedLinear.from_fake(_fake(), torch.float32)
    with pytest.raises(ValueError, match="cache_dtype"):
        packed(torch.zeros(1, 32, dtype=torch.bfloat16))


def test_grids_that_do_not_fit_are_refused() -> None:
    q = torch.zeros(4, 32, dtype=torch.int8)
    with pytest.raises(ValueError, match="do not fit"):
        FakeQuantLinear(torch.zeros(4, 32), Grid(torch.ones(4, 2)), SCHEME)
    with pytest.raises(ValueError, match="do not fit"):
        PackedLinear.from_integers(q, Grid(torch.ones(4, 2)), SCHEME)
    with pytest.raises(ValueError, match="bfloat16"):
        PackedLinear.from_integers(q, Grid(torch.full((4, 4), 0.1)), SCHEME)
    with pytest.raises(ValueError, match="no zero points"):
        PackedLinear.from_integers(q, Grid(torch.ones(4, 4)), QuantScheme(group_size=8, symmetric=False))
    with pytest.raises(ValueError, match="4 bits hold values"):
        PackedLinear.from_integers(q + 8, Grid(torch.ones(4, 4)), SCHEME)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.ModuleDict({"inner": nn.Linear(32, 8)}), nn.ReLU())


def _make(name: str, linear: nn.Linear) -> nn.Module:
    return FakeQuantLinear.from_linear(linear, search_grid(linear.weight, SCHEME), SCHEME)


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
