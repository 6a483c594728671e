"""The user's own loop stays as it is: closures, clipping, schedulers, mixed precision, compiling, two processes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pathprox
from networks import assert_balanced, assert_on_the_sphere, attached, batch, chain, train
from pathprox import PathProx, find_units, shrink_

SGD = torch.optim.SGD


def test_a_closure_gives_the_same_steps():
    model, data = chain(8, 16, 12, 10, 4), batch()
    twin = copy.deepcopy(model)
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=0.1, momentum=0.9))
    losses = train(model, optimizer, data, 10)
    optimizer, _ = attached(twin, data[0], lambda p: SGD(p, lr=0.1, momentum=0.9))

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(twin(data[0]), data[1])
        loss.backward()
        return loss

    assert [float(optimizer.step(closure).detach()) for _ in range(5)] == losses[:5]
    assert [float(optimizer.step(closure=closure).detach()) for _ in range(5)] == losses[5:]
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_clipping_and_schedulers_work_as_always():
    model, data = chain(8, 16, 12, 10, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=1.0), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=40)
    for _ in range(40):
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        assert_on_the_sphere(prox.units)
    assert_balanced(prox.units)


def test_the_threshold_follows_the_schedule():
    model, data = chain(8, 16, 4), batch()
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=0.1), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for lr in (0.1, 0.05, 0.025):
        before = model[2].weight.detach().clone()
        train(model, optimizer, data, 1)
        moved = before - lr * model[2].weight.grad
        expected = pathprox.prox.soft_threshold(moved, lr * 0.1, dim=0)
        torch.testing.assert_close(model[2].weight.detach(), expected)
        schedule.step()


def test_a_warm_up_from_zero_moves_nothing():
    for make in (lambda p: SGD(p, lr=0.0), lambda p: torch.optim.Adam(p, lr=0.0)):
        model, data = chain(8, 16, 4), batch()
        optimizer, _ = attached(model, data[0], make, 10.0)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, data, 2)
        for a, b in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_grad_scaler_moves_nothing(fused):
    model, data = chain(8, 16, 12, 10, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1, momentum=0.9, fused=fused), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(spoil: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(data[0]), data[1])).backward()
        if spoil:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()

    step(False)
    before = [p.detach().clone() for p in model.parameters()]
    step(True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(False)
    assert not torch.equal(before[0], model[0].weight)
    assert_on_the_sphere(prox.units)
    prox.check()


def test_the_grad_scaler_changes_nothing_else():
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model, data = chain(8, 16, 4), batch()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        pathprox.WeightDecay(find_units(model, data[0][:1]), 0.1).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model(data[0]), data[1])).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(model[0].weight.detach())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_an_error_and_nothing_is_lost(value, closure):
    model, data = chain(8, 16, 4), batch()
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=0.1, momentum=0.9))
    train(model, optimizer, data, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def spoiled():
        optimizer.zero_grad()
        loss = cross_entropy(model(data[0]), data[1])
        loss.backward()
        model[2].weight.grad[1, 1] = value
        return loss

    if not closure:
        spoiled()
    with pytest.raises(FloatingPointError, match=r"2\.weight"):
        optimizer.step(spoiled if closure else None)
    after = (model.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    train(model, optimizer, data, 2)


def test_large_finite_gradients_are_no_error():
    model, data = chain(8, 16, 4), batch()
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=1e-30))
    optimizer.zero_grad()
    cross_entropy(model(data[0]), data[1]).backward()
    model[0].weight.grad.fill_(1e30)  # its norm overflows
    optimizer.step()


def test_weights_that_are_not_finite_are_an_error():
    model, data = chain(8, 16, 4), batch()
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=torch.inf))
    with pytest.raises(FloatingPointError, match="0 -> 2"):
        train(model, optimizer, data, 3)


def test_autocast_trains_float32_weights():
    model, data = chain(8, 16, 12, 10, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: SGD(p, lr=0.1), 1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(data[0]), data[1])
        loss.backward()
        optimizer.step()
    assert_on_the_sphere(prox.units)
    assert_balanced(prox.units)


def test_a_compiled_model_trains_alike():
    model, data = chain(8, 16, 12, 10, 4), batch()
    twin = copy.deepcopy(model)
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=0.1))
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, optimizer, data, 5)
    optimizer, _ = attached(twin, data[0], lambda p: SGD(p, lr=0.1))
    train(twin, optimizer, data, 5)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def _replica(rank: int, port: int, queue) -> None:
    import os

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = chain(8, 16, 12, 10, 4)
    units = find_units(model, torch.randn(1, 8))
    parallel = DistributedDataParallel(model)
    optimizer = SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    PathProx(units, 0.005).attach(optimizer)
    torch.manual_seed(rank)  # every replica sees other data
    data = batch()
    train(parallel, optimizer, data, 30)
    active = units.count_active()
    shrink_(model, units, optimizer)  # and wrap it again
    train(DistributedDataParallel(model), optimizer, data, 30)
    queue.put((rank, [p.detach().numpy().copy() for p in model.parameters()], active))
    dist.destroy_process_group()


def test_two_replicas_stay_bit_equal_also_when_they_shrink():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_replica, args=(rank, port, queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    results = sorted((queue.get(timeout=120) for _ in workers), key=lambda r: r[0])
    for worker in workers:
        worker.join(timeout=60)
    (_, first, active), (_, second, _) = results
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert 0 < active[0] < active[1]
    assert sum(a.size for a in first) < sum(p.numel() for p in chain(8, 16, 12, 10, 4).parameters())


def test_errors_say_what_to_do():
    model, (x, _) = chain(8, 16, 4), batch()
    units = find_units(model, x[:1])
    with pytest.raises(ValueError, match=r"weight_decay=0\.01.*weight_decay=0"):
        PathProx(units, 0.1).attach(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="holds no parameter of the model"):
        PathProx(units, 0.1).attach(SGD(chain(8, 16, 4).parameters(), lr=0.1))
    with pytest.raises(ValueError, match="must not be negative"):
        PathProx(units, -0.1)
    with pytest.raises(RuntimeError, match="not attached"):
        _ = PathProx(units, 0.1).optimizer
    prox = PathProx(units, 0.1).attach(SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="already attached"):
        prox.attach(SGD(model.parameters(), lr=0.1))
    sigmoid = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4))
    with pytest.raises(ValueError, match="sigmoid is not homogeneous"):
        PathProx(find_units(sigmoid, x[:1]), 0.1)
    half = chain(8, 16, 4).bfloat16()
    with pytest.raises(TypeError, match=r"bfloat16.*autocast"):
        PathProx(find_units(half, x[:1].bfloat16()), 0.1).attach(SGD(half.parameters(), lr=0.1))


def test_a_failed_attach_changes_nothing():
    model, (x, _) = chain(8, 16, 4), batch()
    before = copy.deepcopy(model.state_dict())
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    prox = PathProx(find_units(model, x[:1]), 0.1)
    with pytest.raises(ValueError):
        prox.attach(optimizer)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    optimizer.param_groups[0]["weight_decay"] = 0
    prox.attach(optimizer)


def test_replaced_parameters_are_an_error_not_silence():
    model, data = chain(8, 16, 4), batch()
    optimizer, _ = attached(model, data[0], lambda p: SGD(p, lr=0.1))
    model.load_state_dict(chain(8, 16, 4).state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"0\.weight is another parameter.*assign=True"):
        train(model, optimizer, data, 1)


def test_a_parameter_outside_the_model_is_guarded_too():
    model, data = chain(8, 16, 4), batch()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = SGD([*model.parameters(), temperature], lr=0.1)
    PathProx(find_units(model, data[0][:1]), 0.01).attach(optimizer)
    cross_entropy(model(data[0]) * temperature, data[1]).backward()
    temperature.grad.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="a parameter outside the model"):
        optimizer.step()
    assert float(temperature.detach()) == 1
