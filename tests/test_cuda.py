"""On a GPU: the same steps as on the CPU, no host synchronisation, and steps that are not finite undone there."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import cross_entropy

import pathprox
import pathprox.fused
import test_fast_step
from networks import attached, batch, chain, strong, train
from pathprox import find_units
from pathprox.experiments.loop import Replay
from pathprox.experiments.models import VGG
from pathprox.held import REGAUGE

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


@contextmanager
def raising_where_it_waits():
    try:
        with warnings.catch_warnings():  # that it is a prototype
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_step_does_not_wait_for_the_gpu(name, fused, bias):
    model, (x, y) = chain(8, 32, 24, 24, 4).cuda(), batch()
    optimizer, _ = attached(model, x, lambda p: MAKERS[name](p, fused=fused), 1e-3, bias=bias)
    data = x.cuda(), y.cuda()
    train(model, optimizer, data, 3)
    cross_entropy(model(data[0]), data[1]).backward()
    with raising_where_it_waits():
        optimizer.step()


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


def wide_vgg(batch_norm: bool = False, last: bool = True):
    model = VGG((70, 70, "M", 140, 140, "M", 12, "M", "A", "A"), batch_norm=batch_norm)
    return model.to(memory_format=torch.channels_last) if last else model


NETWORKS = {
    "a chain": (lambda: chain(8, 150, 70, 300, 40, 30, 4), (64, 8)),
    "one coupling": (lambda: chain(8, 33, 4), (64, 8)),
    "VGG": (lambda: wide_vgg(last=False), (4, 3, 32, 32)),
    "VGG, channels last": (wide_vgg, (4, 3, 32, 32)),
    "VGG with batch norm": (lambda: wide_vgg(batch_norm=True), (4, 3, 32, 32)),
}


def trained(name, make, steps, fast=True, weight_decay=0.01):
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model, x, y = build(), torch.randn(shape), torch.randint(0, 4, shape[:1])
    units = find_units(model.double(), x[:1].double())
    model.cuda()
    optimizer = MAKERS[make](model.parameters(), fused=True)
    prox = pathprox.PathProx(units, weight_decay).attach(optimizer)
    prox._fast.on = fast
    train(model, optimizer, (x.double().cuda(), y.cuda()), steps)
    return model, optimizer, prox


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("make", ["SGD", "momentum", "AdamW"])
def test_the_kernels_take_the_steps_of_the_general_path(name, make):
    pytest.importorskip("triton")
    (model, _, prox), (twin, _, _) = (trained(name, make, 20, fast) for fast in (True, False))
    assert prox._fast.step.tables is not None
    assert (prox._fast.step.whole is not None) == (make != "AdamW")
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    prox.check()


@pytest.mark.parametrize("name", test_fast_step.NETWORKS)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.2}],
    ids=str,
)
def test_a_hundred_steps_that_sgd_leaves_to_the_kernels(name, options):
    pytest.importorskip("triton")
    model, (x, y) = test_fast_step.NETWORKS[name]().double(), test_fast_step.data_for(name)
    pair = []
    for fast in (True, False):
        twin = copy.deepcopy(model)
        units = find_units(twin, x)
        optimizer = torch.optim.SGD(twin.cuda().parameters(), lr=0.01, fused=True, **options)
        prox = pathprox.PathProx(units, 0.05).attach(optimizer)
        prox._fast.on = fast
        train(twin, optimizer, (x.cuda(), y.cuda()), 100)
        pair.append((twin, optimizer, prox))
    assert pair[0][2]._fast.step.whole is not None
    test_fast_step.assert_alike(*pair)


def runner(model, optimizer, captured):
    """A training step, replayed from a graph or eager."""

    def step(x, y):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return Replay(step) if captured else step


def test_a_graph_counts_sleeping_units_and_is_recorded_anew_when_they_are_removed():
    """Steps replayed, with removals between them, end where eager steps with the same removals do."""
    found = []
    for captured in (True, False):
        torch.manual_seed(0)
        model, (x, y) = chain(8, 60, 50, 4).double(), batch()
        units = find_units(model, x.double())
        optimizer = torch.optim.SGD(model.cuda().parameters(), lr=0.1, fused=True)
        prox = pathprox.PathProx(units, 0.06, shrink_every=10**6, patience=10).attach(optimizer)
        data, removed = (x.double().cuda(), y.cuda()), []
        for _ in range(3):
            run = runner(model, optimizer, captured)
            for _ in range(60):
                run(*data)
            removed.append(prox.remove_settled())
        found.append((removed, [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert found[0][0][0] > 0
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_norms_that_are_chosen_anew_between_replays_of_a_graph():
    """Replays, with `regauge` between them, end where eager steps do, which choose the norms by themselves."""
    found = []
    for captured in (True, False):
        torch.manual_seed(0)
        model, (x, y) = strong(8, 60, 50, 4), batch()
        units = find_units(model, x.double())
        optimizer = torch.optim.SGD(model.cuda().parameters(), lr=0.01, momentum=0.9, fused=True)
        prox = pathprox.PathProx(units, 0.02, gauge=4).attach(optimizer)

        run = runner(model, optimizer, captured)
        for number in range(1, 101):
            run(x.double().cuda(), y.cuda())
            if captured and number % REGAUGE == 0:
                prox.regauge()
        assert max(float(units.norm(g.into).max()) for g in units.couplings) > 1.5
        found.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", ["momentum", "AdamW"])
def test_without_triton_torch_does_the_same(make, monkeypatch):
    model, _, _ = trained("a chain", make, 20)
    monkeypatch.setattr(pathprox.fused, "load_kernels", lambda device: None)
    twin, _, prox = trained("a chain", make, 20)
    assert prox._fast.step is not None
    assert prox._fast.step.tables is None
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_run_twice_is_the_same_bit_for_bit(name):
    """So replicas stay equal. The gradients are given, for those of cuDNN may differ."""
    found = []
    for _ in range(2):
        model, optimizer, _ = trained(name, "momentum", 0)
        torch.manual_seed(1)
        for _ in range(10):
            for p in model.parameters():
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape))
            optimizer.step()
        found.append(model.state_dict())
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key])


@pytest.mark.parametrize("make", ["SGD", "momentum"])
def test_a_step_captured_in_a_cuda_graph_is_the_same(make):
    found = []
    for captured in (True, False):
        model, optimizer, prox = trained("a chain", make, 3)
        for p in model.parameters():
            p.grad = torch.ones_like(p) / 100
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            prox.load_state_dict(prox.state_dict())  # drops what was laid out; the graph must not care
            torch.cuda.empty_cache()
        for _ in range(10):
            graph.replay() if captured else optimizer.step()
        found.append(model.state_dict())
        prox.check()
    for key, value in found[0].items():
        torch.testing.assert_close(value, found[1][key], rtol=1e-9, atol=1e-12)


def test_a_graph_counts_and_undoes_steps_that_are_not_finite():
    model, optimizer, prox = trained("a chain", "momentum", 3)
    for p in model.parameters():
        p.grad = torch.ones_like(p) / 100
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    before = copy.deepcopy(model.state_dict())
    model[2].weight.grad[0, 0] = torch.nan
    graph.replay()
    graph.replay()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    with pytest.raises(FloatingPointError, match=r"2 step\(s\)"):
        prox.check()
