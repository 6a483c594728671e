"""Training by recipe: the record, going on after an interruption, numbers that are not finite, Task 5."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from statistics import median

import pytest
import torch
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector

import official
from pathprox.experiments.batches import Batches, Fixed, crop, flip
from pathprox.experiments.data import load, normalized
from pathprox.experiments.loop import Loop, Setting
from pathprox.experiments.methods import METHODS
from pathprox.experiments.recipes import RECIPES, Pruning, Recipe
from pathprox.experiments.record import DIVERGED, DONE, INTERRUPTED, STUCK, Record, find
from pathprox.experiments.train import UnfinishedError, run, start_of

TWO_CUTS = Pruning((30, 60), 1e-5, 30)
CPU = torch.device("cpu")


def small(name: str = "task1/pathprox", steps: int = 60, **changes) -> Recipe:
    """A recipe of the paper on the data in the package, short, and with few neurons."""
    model = "MLP-2-24 factorized" if "factorized" in RECIPES[name].model else "MLP-3-24"
    return (
        RECIPES[name].lasting(steps).changed(**{"data": "mnist-embedded", "look_every": 20, "model": model, **changes})
    )


def numbers(record: Record) -> dict:
    """All of a record that must not depend on when and where it was run."""
    history = {key: values for key, values in record.history.items() if key != "seconds"}
    return {"history": history, "final": record.final, "status": record.status}


def stop_at(step: int):
    def watch(record, now, total):
        if now >= step:
            raise KeyboardInterrupt

    return watch


def test_a_run_leaves_one_record_with_everything_in_it(tmp_path):
    recipe = small()
    record = run(recipe, 0, tmp_path)
    assert record.status == DONE
    assert record.history["step"] == [0, 20, 40, 60]
    assert all(len(v) == 4 for v in record.history.values())
    assert record.history["val"][-1] > 70
    assert record.history["balanced"][-1] <= record.history["objective"][-1]
    assert record.final["best"]["val"] == max(record.history["val"])
    assert len(record.final["lipschitz"]["end"]) == 1000
    assert record.final["size"]["shrunk_parameters"] <= record.final["size"]["parameters"] == 20290
    assert record.data == {"origin": "embedded subset", "train": 1000, "val": 1000, "test": 2000}
    assert {"pathprox", "torch", "python"} <= set(record.versions)
    assert [p.suffix for p in tmp_path.rglob("*") if p.is_file()] == [".json"], "the checkpoint is gone"
    assert next(tmp_path.rglob("*.json")).stat().st_size < 40_000


def test_the_median_of_the_lipschitz_constants_is_in_the_history_where_it_is_asked_for(tmp_path):
    record = run(small(steps=20, look_every=10, lipschitz_curve=True), 0, tmp_path)
    ends = [median(record.final["lipschitz"][when]) for when in ("start", "end")]
    assert [record.history["lipschitz"][i] for i in (0, -1)] == pytest.approx(ends, rel=1e-4)
    assert len(record.history["lipschitz"]) == 3


def test_a_run_that_learns_nothing_is_stopped_and_says_so(tmp_path):
    recipe = small(steps=1200, look_every=100, lr=1e-9, lipschitz=False)
    record = run(recipe, 0, tmp_path)
    assert record.status == STUCK
    assert record.history["step"][-1] == 1000, "ten looks after the first"
    assert "nothing is learned. Try another seed or a lower learning rate" in record.message
    assert run(recipe, 0, tmp_path).seconds == pytest.approx(record.seconds, rel=1e-5), "it is not run again"
    assert not list(tmp_path.rglob("*.pt"))


def test_a_short_run_has_not_had_time_to_learn(tmp_path):
    assert run(small(steps=20, look_every=1, lr=1e-9, lipschitz=False), 0, tmp_path).status == DONE


@pytest.mark.parametrize("method", METHODS)
def test_methods_start_as_the_same_function_and_learn(method, tmp_path):
    record = run(small(method=method, lipschitz=False), 0, tmp_path)
    rival = run(small(method="weight-decay", lipschitz=False, steps=60), 0, tmp_path)
    same = record.history["loss"][0] == pytest.approx(rival.history["loss"][0], rel=1e-5)
    assert same == (method not in ("pathprox-divided", "pathprox-biases", "pathprox-authors"))  # the authors' start
    assert record.history["loss"][-1] < 0.7 * record.history["loss"][0]


def test_a_gradient_that_is_too_large_is_scaled_down_where_a_recipe_asks_for_it():
    images, labels = torch.randn(50, 1, 28, 28), torch.arange(50) % 10

    def moved(clip: float | None) -> torch.Tensor:
        recipe = small("task1/weight-decay", weight_decay=0.0, lr=0.5, clip=clip)
        model = start_of(recipe, 0)
        before = parameters_to_vector(model.parameters()).detach().clone()
        Loop(recipe, model, images[:2], Setting(CPU)).step(images, labels, recipe.lr)
        return parameters_to_vector(model.parameters()).detach() - before

    free = moved(None)
    assert free.norm() > 0.5 * 0.01
    assert torch.allclose(moved(0.01), free * (0.5 * 0.01 / free.norm()), rtol=1e-3, atol=1e-7)
    assert torch.equal(moved(100.0), free)


def test_a_finished_run_is_not_repeated_unless_asked(tmp_path):
    recipe = small(steps=20)
    first = run(recipe, 0, tmp_path)
    path = next(tmp_path.rglob("*.json"))
    before = path.stat().st_mtime_ns
    again = run(recipe, 0, tmp_path, watch=stop_at(0))
    assert path.stat().st_mtime_ns == before
    assert again.final["best"]["step"] == first.final["best"]["step"]
    with pytest.raises(KeyboardInterrupt):
        run(recipe, 0, tmp_path, again=True, watch=stop_at(0))


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("task1/pathprox", 40),
        ("task3/normalized", 20),
        ("task5/pathprox", 30),
        ("task5/pathprox", 75),
        ("task5/group-lasso", 75),
    ],
)
def test_a_run_that_was_interrupted_goes_on_to_the_same_numbers(name, stop, tmp_path):
    changes = {"prune": TWO_CUTS} if name.startswith("task5") else {}
    recipe = small(name, batch=200, lipschitz=False, corrupted=None, weight_decay=0.01, **changes)
    whole = run(recipe, 1, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(recipe, 1, tmp_path / "cut", watch=stop_at(stop))
    seen = find(tmp_path / "cut", recipe, 1)
    assert seen.status == INTERRUPTED
    assert "--resume" in seen.message
    assert seen.history["step"][-1] >= min(stop, 60) - recipe.look_every
    with pytest.raises(UnfinishedError, match="--resume to continue it, or --again"):
        run(recipe, 1, tmp_path / "cut")
    assert numbers(run(recipe, 1, tmp_path / "cut", resume=True)) == numbers(whole)


def test_a_killed_process_loses_at_most_one_interval(tmp_path):
    recipe = small(steps=400, look_every=10, lipschitz=False, corrupted=None)
    code = (
        "import test_train, pathlib, torch; torch.set_num_threads(1)\n"
        "recipe = test_train.small(steps=400, look_every=10, lipschitz=False, corrupted=None)\n"
        f"test_train.run(recipe, 0, pathlib.Path({str(tmp_path / 'cut')!r}))"
    )
    here = os.path.dirname(__file__)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=here)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        record = find(tmp_path / "cut", recipe, 0)
        if record is not None and len(record.history["step"]) > 3:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    seen = find(tmp_path / "cut", recipe, 0).history["step"]
    assert 3 < len(seen) < 41, "it was killed on the way"
    continued = run(recipe, 0, tmp_path / "cut", resume=True)
    assert numbers(continued) == numbers(run(recipe, 0, tmp_path / "whole"))


@pytest.mark.parametrize("method", ["pathprox", "weight-decay"])
def test_a_number_that_is_not_finite_ends_the_run_and_keeps_the_record(method, tmp_path):
    record = run(small(method=method, lr=1e9), 0, tmp_path)
    assert record.status == DIVERGED
    assert "finite" in record.message or "loss is" in record.message
    assert record.history["step"] == [0]
    assert find(tmp_path, record.recipe, 0).finished


def test_training_depends_on_the_seed_alone(tmp_path):
    recipe = small(steps=20)
    first, second, other = (
        run(recipe, 0, tmp_path / "a"),
        run(recipe, 0, tmp_path / "b"),
        run(recipe, 1, tmp_path / "a"),
    )
    assert numbers(first) == numbers(second)
    assert first.history["loss"] != other.history["loss"]


def test_task_5_cuts_shrinks_and_trains_on(tmp_path):
    prune = Pruning((100, 200, 300), 1e-5, 50)
    record = run(small("task5/pathprox", 300, weight_decay=0.03, lr=0.1, prune=prune), 0, tmp_path)
    cuts = record.final["pruned"]
    assert [c["checkpoint"] for c in cuts] == [100, 200, 300]
    active = [c["active"] for c in cuts]
    assert active == sorted(active, reverse=True), "a unit that is pruned stays away"
    assert active[-1] < 80
    parameters = [c["parameters"] for c in cuts]
    assert parameters == sorted(parameters, reverse=True)
    assert parameters[-1] < 0.9 * 20290, "physically smaller"
    assert cuts[-1]["test"] > 70


def test_a_network_that_has_lost_a_whole_layer_is_seen_but_not_trained_on(tmp_path):
    record = run(small("task5/pathprox", weight_decay=3.0, prune=TWO_CUTS), 0, tmp_path)
    assert record.status == DONE
    assert [cut["active"] for cut in record.final["pruned"]] == [0, 0]
    assert record.final["pruned"][1]["test"] < 20


def test_units_that_were_zero_once_stay_zero_in_task_5(tmp_path):
    recipe = small("task5/pathprox", 200, look_every=5, weight_decay=0.03, lr=0.1, prune=Pruning((200,), 1e-5, 1))
    record = run(recipe, 0, tmp_path)
    active = record.history["active"]
    assert all(a >= b for a, b in pairwise(active))
    free = run(recipe.changed(prune=None), 0, tmp_path)
    assert any(a < b for a, b in pairwise(free.history["active"]))


def test_figure_2_keeps_weights_and_points(tmp_path):
    recipe = RECIPES["figure2/pathprox"].lasting(200)
    record = run(recipe, 0, tmp_path)
    assert list(record.final["weights"]) == [str(s) for s in recipe.snapshots]
    assert len(record.final["points"]["x"]) == len(record.final["points"]["y"]) == 200
    assert record.history["val"][-1] > 80


@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_a_convolutional_network_trains_on_the_official_formats_and_is_seen_on_corrupted_images(name, tmp_path):
    official.write_cifar10(tmp_path / "data")
    official.write_svhn(tmp_path / "data")
    official.write_cifar10_c(tmp_path / "data", 10)
    recipe = RECIPES["task3/pathprox" if name == "cifar10" else "task4/pathprox"]
    recipe = recipe.lasting(4).changed(model="VGG-tiny", batch=8, lr=0.01)
    record = run(recipe, 0, tmp_path / "records", data_dir=tmp_path / "data")
    assert record.status == DONE, record.message
    augmented = record.history.get("val_augmented", [])
    assert len(augmented) == (len(record.history["val"]) if name == "cifar10" else 0), "SVHN is not augmented"
    if name == "cifar10":
        assert record.final["corrupted"]["origin"] == "official"
        assert len(record.final["corrupted"]["each"]) == 15
        assert list(record.final["corrupted"]["severities"]) == ["1", "2", "3", "4", "5"]
        assert record.final["corrupted"]["mean"] == pytest.approx(sum(record.final["corrupted"]["each"].values()) / 15)


def test_the_corrupted_set_may_be_absent_and_the_record_says_so(tmp_path):
    record = run(small(steps=10, lipschitz=False), 0, tmp_path, data_dir=tmp_path)
    assert "pathprox data make mnist-c" in record.final["corrupted"]["absent"]
    assert str(tmp_path) not in str(record.final)


def test_bf16_changes_little(tmp_path):
    recipe = small(lipschitz=False, corrupted=None, lr=0.03)
    plain = run(recipe, 0, tmp_path / "a")
    fast = run(recipe, 0, tmp_path / "b", setting=Setting(CPU, "bf16"))
    assert fast.precision == "bf16"
    assert fast.history["loss"] != plain.history["loss"]
    assert fast.history["loss"][-1] == pytest.approx(plain.history["loss"][-1], rel=0.1)


def test_a_wrong_setting_is_refused():
    with pytest.raises(ValueError, match="none of float32, tf32, bf16"):
        Setting.of("cpu", "int8")


def test_batches_depend_on_seed_and_step_alone():
    data = load("mnist-embedded")
    batches, later = Batches(data, 200, 0, CPU), Batches(data, 200, 0, CPU)
    seen = [batches.at(step) for step in range(203)]
    assert torch.equal(later.at(202)[0], seen[202][0])
    assert not torch.equal(Batches(data, 200, 1, CPU).at(0)[1], seen[0][1])
    for first in (0, 5, 200):
        epoch = torch.cat([x for x, _ in seen[first : first + 5]]) if first < 200 else None
        if epoch is not None:
            every = normalized(data.train.images, data.mean, data.std)
            assert torch.equal(epoch.flatten(1).sum(1).sort().values, every.flatten(1).sum(1).sort().values)


def test_crops_and_flips_are_those_of_single_images():
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8)
    cut, again = (crop(images, 4, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(cut, again)
    random = torch.Generator().manual_seed(3)
    top, left = (torch.randint(0, 9, (50,), generator=random).tolist() for _ in range(2))
    for image, result, i, j in zip(images, cut, top, left, strict=True):
        assert torch.equal(result, pad(image, (4, 4, 4, 4))[:, i : i + 8, j : j + 8])
    turned = flip(images, torch.Generator().manual_seed(3))
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(turned, images, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(turned, images, strict=True)]
    assert all(a or b for a, b in zip(mirrored, same, strict=True))
    assert 10 < sum(mirrored) < 40


def test_images_to_evaluate_on_are_augmented_only_on_demand_and_as_in_training(tmp_path):
    official.write_cifar10(tmp_path)
    data = load("cifar10", tmp_path)
    images = Fixed(data, data.val, CPU)
    (plain, labels), (seen, same) = (next(images.parts(random=r)) for r in (None, torch.Generator().manual_seed(3)))
    random = torch.Generator().manual_seed(3)
    by_hand = flip(crop(data.val.images, data.crop, random), random)
    assert torch.equal(plain, normalized(data.val.images, data.mean, data.std))
    assert torch.equal(seen, normalized(by_hand, data.mean, data.std))
    assert torch.equal(labels, same)


def test_a_set_smaller_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="1000 training images, fewer than a batch of 2000"):
        Batches(load("mnist-embedded"), 2000, 0, CPU)
