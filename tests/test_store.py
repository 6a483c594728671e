"""A saved model comes back bit for bit, in its own class."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from networks import chain
from pathprox.store import load, save
from test_export import NETS, Residual, smaller

safetensors = pytest.importorskip("safetensors.torch")


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """The same tensors in the same places, kinds, dtypes, memory orders; the same sizes in the attributes."""
    assert repr(one) == repr(other)
    for method in ("named_parameters", "named_buffers"):
        for (name, a), (twin, b) in zip(getattr(one, method)(), getattr(other, method)(), strict=True):
            assert (name, a.dtype, a.requires_grad) == (twin, b.dtype, b.requires_grad)
            assert torch.empty_like(a).stride() == torch.empty_like(b).stride()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert one.state_dict().keys() == other.state_dict().keys()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "small.safetensors"


@pytest.mark.parametrize("name", NETS)
def test_a_shrunk_model_comes_back_bit_for_bit(name, path):
    small, x = smaller(*NETS[name])
    save(small, path)
    loaded = load(NETS[name][0], path)
    assert type(loaded) is type(small)
    assert_same(loaded, small)
    assert torch.equal(loaded.eval()(x), small.eval()(x))


@pytest.mark.parametrize("name", NETS)
def test_a_loaded_model_trains_as_the_saved_one_would(name, path):
    small, x = smaller(*NETS[name])
    save(small, path)
    loaded = load(NETS[name][0], path)
    for model in (small, loaded):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert_same(loaded, small)


def test_the_file_is_a_plain_state_dict(path):
    small, x = smaller(*NETS["residual"])
    save(small, path)
    one, other = load(Residual, path), load(Residual, path)
    for parameter in one.parameters():
        nn.init.zeros_(parameter)
    one.load_state_dict(safetensors.load_file(path))
    assert_same(one, small)
    nn.init.zeros_(one.head.weight)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one.eval()(x), small.eval()(x))


def test_the_same_model_gives_the_same_bytes(path):
    small, _ = smaller(*NETS["residual"])
    seen = set()
    for model in [small, copy.deepcopy(small)] * 4:
        save(model, path)
        seen.add(path.read_bytes())
    save(load(Residual, path), path)
    assert {path.read_bytes()} == seen


class Odd(nn.Module):
    """Every kind of tensor that deserves a second look, and attributes of all kinds."""

    def __init__(self, scale=1):
        super().__init__()
        self.num_heads, self.window, self.shape = 4, (2, 3), torch.Size([5])
        self.ratio = self.causal = self._hidden = self.stride = 1
        self.kernel = (3,)
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.point = nn.Conv2d(4, 6, 1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.gapped = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.left, self.right = (nn.Parameter(part) for part in torch.randn(4, 6).chunk(2, 1))
        self.frozen = nn.Parameter(torch.randn(2, dtype=torch.bfloat16), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("broken", torch.tensor([float("nan"), float("inf"), -0.0]))
        self.register_buffer("spread", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("passing", torch.randn(3), persistent=False)
        self.register_buffer("absent", None)
        self.norm = nn.LayerNorm(4 * scale)


def test_odd_tensors_come_back_as_they_are(path):
    model = Odd()
    save(model, path)
    loaded = load(Odd, path)
    assert_same(loaded, model)
    assert loaded.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert loaded._non_persistent_buffers_set == {"passing"}
    x = torch.randn(2, 4, 1, 5)
    assert loaded.point(x).stride() == model.point(x).stride()


def test_whole_numbers_come_back_where_the_factory_has_them(path):
    model = Odd(scale=2)
    model.num_heads, model.window, model.shape = 2, (1, 1), torch.Size([4])
    model.ratio, model.causal, model._hidden, model.stride, model.kernel, model.new = 0.5, True, 9, (2,), 4, 3
    save(model, path)
    loaded = load(Odd, path)
    assert (loaded.num_heads, loaded.window, loaded.shape, loaded.norm.normalized_shape) == (2, (1, 1), (4,), (8,))
    assert type(loaded.shape) is torch.Size
    assert (loaded.ratio, loaded.causal, loaded._hidden, loaded.stride, loaded.kernel) == (1, 1, 1, 1, (3,))
    assert not hasattr(loaded, "new")


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.inside, self.outside = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        if tie:
            self.outside.weight = self.inside.weight


def test_tied_parameters_stay_tied(path):
    save(Tied(), path)
    assert list(safetensors.load_file(path)) == ["inside.weight"]
    for tie in (True, False):
        loaded = load(lambda tie=tie: Tied(tie), path)
        assert loaded.outside.weight is loaded.inside.weight


def test_untied_parameters_are_not_tied_by_the_factory(path):
    model = Tied(tie=False)
    save(model, path)
    assert_same(load(Tied, path), model)


def test_another_name_for_the_same_memory_stays_one(path):
    model = Tied(tie=False)
    model.outside.weight.data = model.inside.weight.data
    model.register_buffer("seen", model.inside.weight.detach())
    save(model, path)

    def factory():
        built = Tied(tie=False)
        built.register_buffer("seen", torch.zeros(9, 4))
        return built

    loaded = load(factory, path)
    nn.init.constant_(loaded.inside.weight, 3)
    assert (loaded.outside.weight == 3).all()
    assert (loaded.seen == 3).all()
    assert not loaded.seen.requires_grad


def test_shared_modules_recurrent_layers_and_parametrizations(path):
    def factory():
        layer = nn.Linear(4, 4)
        return nn.ModuleList([layer, layer, nn.LSTM(4, 3, 2), parametrizations.weight_norm(nn.Linear(4, 2))])

    model, x = factory(), torch.randn(5, 2, 4)
    save(model, path)
    loaded = load(factory, path)
    assert loaded[0] is loaded[1]
    for one, other in zip(loaded, model, strict=True):
        out, expected = (m(x)[0] if isinstance(m, nn.LSTM) else m(x) for m in (one, other))
        assert torch.equal(out, expected)
    save(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), *model[2:]]), path)
    with pytest.raises(ValueError, match=r"1\.weight and 0\.weight belong to one shared module in the model"):
        load(factory, path)


def test_the_factory_decides_on_device_and_mode(path):
    small, x = smaller(*NETS["residual"])
    save(small.train(), path)

    def factory():
        with torch.device("meta"):
            return Residual().eval()

    loaded = load(factory, path)
    assert not any(m.training for m in loaded.modules())
    assert {t.device.type for t in [*loaded.parameters(), *loaded.buffers()]} == {"cpu"}
    assert torch.equal(loaded(x), small.eval()(x))
    assert load(Residual, path).training
    assert {p.dtype for p in load(lambda: Residual().double(), path).parameters()} == {torch.float32}


def test_a_loaded_model_does_not_live_in_the_file(path):
    model = chain(4, 8, 2)
    save(model, path)
    loaded = load(lambda: chain(4, 8, 2), path)
    path.write_bytes(b"")
    assert_same(loaded, model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_models_go_from_a_gpu_to_the_cpu_and_back(path):
    small, _ = smaller(*NETS["residual"])
    save(small.cuda(), path)
    assert_same(load(lambda: Residual().cuda(), path), small)
    assert_same(load(Residual, path), copy.deepcopy(small).cpu())
    lstm = nn.LSTM(4, 3, 2).cuda()  # its parameters are parts of one tensor
    save(lstm, path)
    loaded = load(lambda: nn.LSTM(4, 3, 2), path).cuda()
    y = torch.randn(5, 2, 4).cuda()
    assert torch.equal(loaded(y)[0], lstm(y)[0])
