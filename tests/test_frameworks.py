"""What is around a training loop: no packages but torch, or frameworks, whose wrappers are looked into or refused."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from networks import assert_on_the_sphere, batch, chain
from pathprox import PathProx, balance_, find_units, shrink_

SGD = torch.optim.SGD


ALONE = """
import sys
sys.modules["numpy"] = None  # importing it fails
import torch, pathprox
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
units = pathprox.find_units(model, torch.randn(2, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pathprox.PathProx(units, weight_decay=0.5).attach(optimizer)
for _ in range(50):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
small = pathprox.shrink(model, units)
print(pathprox.report(model, small, torch.randn(2, 4)))
"""


def test_torch_is_all_that_the_package_needs():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "units" in done.stdout


def accelerated(model, data, attach_first: bool):
    """The model after 30 steps of Accelerate, each with the gradients of two batches; its units and optimizer."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is for the tests alone")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    units, optimizer = find_units(model, data[0][:1]), SGD(model.parameters(), lr=0.1, momentum=0.9)
    prox = PathProx(units, 0.01)
    if attach_first:
        prox.attach(optimizer)
    model, wrapped = accelerator.prepare(model, optimizer)
    if not attach_first:
        prox.attach(wrapped)
    assert prox.optimizer is optimizer
    for _ in range(60):
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(data[0]), data[1]))
            wrapped.step()
            wrapped.zero_grad()
    return units, wrapped


@pytest.mark.parametrize("attach_first", [True, False])
def test_accelerate_trains_as_the_plain_loop_does(attach_first):
    model, data = chain(8, 32, 12, 10, 4), batch()
    twin = copy.deepcopy(model)
    units, _ = accelerated(model, data, attach_first)
    optimizer = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    PathProx(find_units(twin, data[0][:1]), 0.01).attach(optimizer)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(twin(data[0]), data[1]).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert_on_the_sphere(units)


def test_what_accelerate_has_wrapped_can_be_shrunk_and_balanced():
    model, data = chain(8, 32, 12, 10, 4), batch()
    units, wrapped = accelerated(model, data, attach_first=False)
    with torch.no_grad():
        model[2].weight[:, :20] = 0
    before = model(data[0])
    assert shrink_(model, units, wrapped) >= 20
    torch.testing.assert_close(model(data[0]), before)
    assert wrapped.state[model[2].weight]["momentum_buffer"].shape == model[2].weight.shape
    balance_(units, "network", wrapped)
    torch.testing.assert_close(model(data[0]), before, rtol=1e-4, atol=1e-5)


def test_a_wrapper_that_changes_steps_is_not_looked_into():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer):
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    model, (x, _) = chain(8, 16, 4), batch()
    with pytest.raises(TypeError, match="does not know the step size of Lookahead"):
        PathProx(find_units(model, x[:1]), 0.1).attach(Lookahead(SGD(model.parameters(), lr=0.1)))


def test_parameters_that_are_split_over_processes_are_refused():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model, (x, _) = chain(8, 16, 4), batch()
    units = find_units(model, x[:1])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fsdp.fully_shard(nn.Sequential(model), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"0\.weight is split over processes.*DistributedDataParallel"):
            PathProx(units, 0.1).attach(SGD(model.parameters(), lr=0.1))
    finally:
        torch.distributed.destroy_process_group()
