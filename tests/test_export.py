"""What shrink returns is a plain module: it can be saved, exported, compiled, run elsewhere."""

import os
import shutil

import pytest
import torch
from torch import nn

from networks import chain
from pathprox import find_units, shrink


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 1))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.relu(x + self.block(x)).mean((2, 3)))


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.PReLU(8), nn.Flatten(), nn.Linear(8 * 16, 4)
    )


def transposed():
    return nn.Sequential(nn.ConvTranspose2d(3, 8, 2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2))


def grouped():
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 4, 1))


NETS = {"mlp": (lambda: chain(6, 16, 12, 3), (6,)), "residual": (Residual, (3, 6, 6)), "grouped": (grouped, (3, 6, 6))}
NETS |= {"depthwise": (depthwise, (3, 6, 6)), "transposed": (transposed, (3, 6, 6))}


def smaller(factory, shape):
    """A model without every other pair of units, and inputs for it. It has been in training and has statistics."""
    model, x = factory(), torch.randn(4, *shape)
    model(x)
    units = find_units(model, x)
    with torch.no_grad():
        for group in units:
            for s in group.out:
                s.scale_(units.tensor(s.name).detach(), (torch.arange(len(group)) // 2 % 2).float())
    small = shrink(model, units)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    return small, x


SHRUNK = ["mlp", "residual", "depthwise"]


@pytest.fixture(params=SHRUNK)
def case(request):
    small, x = smaller(*NETS[request.param])
    return small.eval(), x


def test_a_state_dict_makes_the_round_trip_without_pickled_code(case, tmp_path):
    small, x = case
    expected = small(x)
    torch.save(small.state_dict(), tmp_path / "small.pt")
    for p in small.parameters():
        nn.init.zeros_(p)
    small.load_state_dict(torch.load(tmp_path / "small.pt", weights_only=True))
    assert torch.equal(small(x), expected)


def test_torch_export_gives_the_same_outputs(case):
    small, x = case
    program = torch.export.export(small, (x,))
    torch.testing.assert_close(program.module()(x), small(x), rtol=1e-6, atol=1e-6)
    assert {tuple(p.shape) for p in program.parameters()} == {tuple(p.shape) for p in small.parameters()}


def test_an_exported_program_takes_other_batches(case):
    small, x = case
    program = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    other = torch.randn(7, *x.shape[1:])
    torch.testing.assert_close(program.module()(other), small(other), rtol=1e-6, atol=1e-6)


def test_onnx_runs_elsewhere_with_the_same_outputs(case):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    small, x = case
    exported = torch.onnx.export(small, (x,), dynamo=True, verbose=False)
    session = runtime.InferenceSession(exported.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    other = torch.randn_like(x)
    (found,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), small(other).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(200)  # the compiler is slow where nothing is cached
def test_torch_compile_gives_the_same_outputs():
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("torch.compile needs a C++ compiler, and there is none")
    small, x = smaller(*NETS["mlp"])
    compiled = torch.compile(small.eval())
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), small(x), rtol=1e-5, atol=1e-5)


def test_a_compiled_model_goes_on_training():
    """Without generating code: the graph with its backward pass is what shrinking could have spoilt."""
    small, x = smaller(*NETS["residual"])
    compiled = torch.compile(small.train(), backend="aot_eager")
    compiled(x).square().sum().backward()
    found = [p.grad.clone() for p in small.parameters()]
    small.zero_grad()
    small(x).square().sum().backward()
    for a, p in zip(found, small.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-5)
