"""On a GPU: the same steps as on the CPU, no host synchronisation, and steps that are not finite undone there."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import pathprox
from networks import attached, batch, chain, train
from pathprox import find_units
from pathprox.experiments.models import VGG

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MAKERS = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.05, **k),
    "momentum": lambda p, **k: torch.optim.SGD(p, lr=0.01, momentum=0.9, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=0.01, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.01, weight_decay=0, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("fused", [False, True])
def test_the_same_steps_as_on_the_cpu(name, fused):
    torch.manual_seed(0)
    model, (x, y) = chain(8, 32, 24, 24, 4).double(), batch()
    x = x.double()
    twin = copy.deepcopy(model).cuda()
    for net, data in ((model, (x, y)), (twin, (x.cuda(), y.cuda()))):
        optimizer, _ = attached(net, data[0], lambda p: MAKERS[name](p, fused=fused), 0.02)
        train(net, optimizer, data, 50)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-5, atol=1e-8)


def test_units_of_a_model_on_the_gpu():
    units = find_units(VGG().cuda(), torch.randn(1, 3, 32, 32))
    assert len(units.couplings) == 8


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_step_does_not_wait_for_the_gpu(name, fused, bias):
    model, (x, y) = chain(8, 32, 24, 24, 4).cuda(), batch()
    optimizer, _ = attached(model, x, lambda p: MAKERS[name](p, fused=fused), 1e-3, bias=bias)
    data = x.cuda(), y.cuda()
    train(model, optimizer, data, 3)
    cross_entropy(model(data[0]), data[1]).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "AdamW"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", [pathprox.PathProx, pathprox.WeightDecay, pathprox.NormalizedWeightDecay])
def test_a_gradient_that_is_not_finite_keeps_the_weights_and_is_told_by_check(name, fused, method):
    model, (x, y) = chain(8, 32, 24, 24, 4).cuda(), batch()
    optimizer = MAKERS[name](model.parameters(), fused=fused)
    regularizer = method(find_units(model, x[:1]), 1e-3).attach(optimizer)
    data = x.cuda(), y.cuda()
    train(model, optimizer, data, 3)
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    cross_entropy(model(data[0]), data[1]).backward()
    model[2].weight.grad[1, 1] = torch.nan
    optimizer.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=1e-6, atol=1e-8)
    with pytest.raises(FloatingPointError, match=r"1 step\(s\)"):
        regularizer.check()
    regularizer.check()
    losses = train(model, optimizer, data, 20)
    assert losses[-1] < losses[0]
    regularizer.check()


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_skips_is_no_error(fused):
    model, (x, y) = chain(8, 32, 4).cuda(), batch()
    optimizer, prox = attached(model, x, lambda p: torch.optim.Adam(p, lr=0.01, fused=fused), 1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    skipped = 0
    for _ in range(40):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            torch.testing.assert_close(model[0].weight.detach(), before, rtol=1e-6, atol=1e-8)
    assert 0 < skipped < 40
    prox.check()


@pytest.mark.parametrize("fused", [False, True])
def test_units_leave_in_training_as_on_the_cpu(fused):
    sizes = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, (x, y) = chain(8, 64, 4).double(), batch()
        model, data = model.to(device), (x.double().to(device), y.to(device))
        options = {"shrink_every": 20, "patience": 10}
        optimizer, prox = attached(model, data[0], lambda p: torch.optim.Adam(p, lr=0.01, fused=fused), 0.03, **options)
        losses = train(model, optimizer, data, 300)
        sizes[device] = model[0].out_features, round(losses[-1], 6)
        assert len(prox.units[0]) == model[0].out_features < 64
    assert sizes["cpu"] == sizes["cuda"]


def test_a_model_on_the_gpu_shrinks_there_and_no_random_state_is_touched():
    model = VGG((8, 8, "M", 12, 12, "M", 16, 16, "M", 16, 16, "M", 16, 16, "A"), batch_norm=True).cuda().eval()
    x = torch.randn(2, 3, 32, 32, device="cuda")
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    units = find_units(model, x)
    with torch.no_grad():
        for group in units:
            for s in group.out:
                s.scale_(units.tensor(s.name), (torch.arange(len(group), device="cuda") % 3 > 0).float())
    small = pathprox.shrink(model, units)
    find_units(chain(8, 16, 4), torch.randn(1, 8))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert sum(p.numel() for p in small.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(small(x), model(x), rtol=1e-3, atol=1e-4)
