"""Training by recipe on a GPU: the step as a CUDA graph does what the written one does."""

from functools import partial

import pytest
import torch

from pathprox.experiments.batched import Batched
from pathprox.experiments.loop import Loop, Replay, Setting
from pathprox.experiments.methods import METHODS
from pathprox.experiments.models import MLP, VGG, build
from pathprox.experiments.recipes import RECIPES, Pruning
from pathprox.experiments.stack import Plan, Stack
from pathprox.experiments.stack_step import Mask, step_
from pathprox.experiments.sweep import Work, complete, in_turn
from pathprox.experiments.train import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SHORT = RECIPES["figure1/pathprox"].lasting(60).changed(data="mnist-embedded", look_every=20, lr=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_the_gpu_has_the_numbers_of_the_cpu(method, tmp_path):
    recipe = SHORT.changed(method=method, model="MLP-2-64 factorized", weight_decay=1e-2)
    there = run(recipe, 0, tmp_path / "gpu", setting=Setting.of("cuda", "float32"))
    here = run(recipe, 0, tmp_path / "cpu", setting=Setting.of("cpu"))
    for key in ("loss", "objective", "balanced", "path_norm"):
        assert there.history[key] == pytest.approx(here.history[key], rel=2e-3), key
    assert there.final["size"]["parameters"] == here.final["size"]["parameters"]


def test_task_5_runs_on_the_gpu(tmp_path):
    changes = {"data": "mnist-embedded", "model": "MLP-2-64 factorized", "prune": Pruning((30, 60), 1e-5, 20)}
    recipe = RECIPES["task5/pathprox"].lasting(60).changed(**changes, weight_decay=0.05, lr=0.05)
    record = run(recipe, 0, tmp_path, setting=Setting.of("cuda", "float32"))
    assert [p["checkpoint"] for p in record.final["pruned"]] == [30, 60]
    assert record.final["pruned"][1]["active"] <= 100


@pytest.mark.parametrize("method", ["pathprox", "weight-decay", "normalized"])
def test_replayed_steps_are_the_written_ones(method):
    """The same network stepped eagerly and through the graph, with the learning rate changing on the way."""
    plan, example = (8, 8, "M", 16, 16, "M", 16, 16, "A", "M", "M"), torch.randn(2, 3, 32, 32)
    recipe = RECIPES["task3/pathprox"].changed(method=method, weight_decay=1e-2)
    x, y = torch.randn(40, 16, 3, 32, 32).cuda(), torch.randint(0, 10, (40, 16)).cuda()
    found = []
    for replay in (True, False):
        torch.manual_seed(0)
        loop = Loop(recipe, VGG(plan).double(), example.double(), Setting.of("cuda", "float32"))
        if not replay:
            loop._replay = None
        for i in range(40):
            loop.step(x[i].double(), y[i], 0.01 if i < 20 else 0.001)
        found.append([p.detach().clone() for p in loop.model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_replayed_step_that_is_not_finite_is_undone_and_told():
    recipe = RECIPES["task1/pathprox"].changed(weight_decay=1e-3, lr=0.1)
    loop = Loop(recipe, build("MLP-2-16 factorized"), torch.randn(2, 1, 28, 28), Setting.of("cuda", "float32"))
    x, y = torch.randn(32, 1, 28, 28).cuda(), torch.randint(0, 10, (32,)).cuda()
    for _ in range(10):
        loop.step(x, y, 0.1)
    loop.regularizer.check()
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop.step(x * torch.nan, y, 0.1)
    loop.step(x * torch.nan, y, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    with pytest.raises(FloatingPointError, match=r"2 step\(s\)"):
        loop.regularizer.check()
    loop.step(x, y, 0.1)
    loop.regularizer.check()
    assert not torch.equal(before[0], next(loop.model.parameters()))


def test_a_run_that_diverges_on_the_gpu_ends_and_keeps_its_record(tmp_path):
    record = run(SHORT.changed(lr=1e9), 0, tmp_path, setting=Setting.of("cuda", "float32"))
    assert record.status == "diverged"
    assert record.history["step"] == [0]


@pytest.mark.parametrize("method", ["pathprox", "weight-decay"])
def test_a_grid_trained_together_has_the_records_of_single_runs(method, tmp_path):
    cells = [(SHORT.changed(method=method, lr=lr, lipschitz=False), seed) for lr in (0.01, 0.05) for seed in (0, 1)]
    many = complete(cells, Work(tmp_path / "a", precision="float32"), Batched())
    single = complete(cells, Work(tmp_path / "b", precision="float32"), in_turn)
    for one, other in zip(many, single, strict=True):
        for key in ("loss", "objective", "balanced"):
            assert one.history[key] == pytest.approx(other.history[key], rel=5e-3), key


@pytest.mark.parametrize("method", ["weight-decay", "lasso", "group-lasso", "pathprox"])
def test_task_5_trained_together_has_the_records_of_single_runs(method, tmp_path):
    prune = Pruning((30, 60), 0.3, 20)
    model = "MLP-2-64 factorized" if method == "pathprox" else "MLP-3-64"
    recipe = RECIPES[f"task5/{method}"].lasting(60).changed(data="mnist-embedded", look_every=20, model=model, lr=0.05)
    cells = [(recipe.changed(prune=prune, weight_decay=decay), seed) for decay in (1e-3, 1e-2) for seed in (0, 1)]
    many = complete(cells, Work(tmp_path / "a", precision="float32"), Batched(most=4))
    single = complete(cells, Work(tmp_path / "b", precision="float32"), in_turn)
    for one, other in zip(many, single, strict=True):
        assert one.history["balanced"] == pytest.approx(other.history["balanced"], rel=5e-3)
        for a, b in zip(one.final["pruned"], other.final["pruned"], strict=True):
            assert a["checkpoint"] == b["checkpoint"]
            assert a["active"] == pytest.approx(b["active"], abs=2)
            assert a["loss"] == pytest.approx(b["loss"], rel=2e-2)


@pytest.mark.parametrize("method", ["weight-decay", "lasso", "path-norm", "pathprox"])
def test_replayed_steps_of_a_stack_are_the_written_ones_with_units_that_stay_dead(method):
    """Eagerly on the CPU and through the graph, with dead units and a learning rate that changes on the way."""
    models = [MLP(2, width, factorized=True, inputs=20, classes=4).double() for width in (16, 9)]
    with torch.no_grad():
        for model in models:
            model.layers[1].weight[:, :3] = 0
    x, y = torch.randn(30, 2, 8, 20, dtype=torch.float64), torch.randint(0, 4, (30, 2, 8))
    found = []
    for device in (torch.device("cuda"), torch.device("cpu")):
        stack = Stack(models, Plan(((0, 1), (2, 3)), (), ((1, 2),)), device)
        mask = Mask(stack, stack.plan.pairs)
        mask.hold_(stack)
        lr, decay = (torch.tensor(v, dtype=torch.float64, device=device) for v in ([0.1, 0.05], [1e-3, 1e-2]))
        step = partial(step_, stack, method=method, lr=lr, weight_decay=decay, mask=mask)
        replay = Replay(lambda a, b, step=step: step(a, b)) if device.type == "cuda" else step
        for i in range(30):
            replay(x[i].to(device), y[i].to(device))
            if i == 20:
                lr.mul_(0.1)
        found.append([p.cpu() for p in stack.parameters])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert not found[0][1][:, :, :3].any()
