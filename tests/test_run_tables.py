"""What else the records hold: sizes, corrupted images, looks, grids, and runs that are not the paper's."""

import dataclasses

from pathprox.experiments import convergence_tables as convergence
from pathprox.experiments import run_tables
from pathprox.experiments.choice import differences, of_paper
from pathprox.experiments.record import DIVERGED
from records import record, rows


def test_a_grid_shows_what_validation_chooses_and_counts_what_diverged():
    runs = [record("task4", "pathprox", lr=lr, weight_decay=wd) for lr in (0.1, 0.3) for wd in (1e-3, 3e-3)]
    for run, val in zip(runs, (90.0, 94.0, 92.0, 99.0), strict=True):
        run.final["best"].update(val=val, test=val - 1, active=50.0)
    runs[-1].status = DIVERGED
    ours = rows(run_tables.grid_summary("task4", runs))[1]
    choices = ["lr 0.1, weight decay 0.003", "lr 0.1, weight decay 0.003"]
    assert ours == ["PathProx", "4 of 16", "3", "1", "0", *choices, "1", "93.00", "50.00"]
    grid = {row[0]: row[1:] for row in rows(run_tables.grid_table("task4", "pathprox", runs))}
    assert grid["0.003"] == ["-", "**94.0 / 93.0 / 50.0**", "diverged", "-"]
    assert grid["0.001"] == ["-", "90.0 / 89.0 / 50.0", "92.0 / 91.0 / 50.0", "-"]


def test_a_cell_whose_first_seed_failed_shows_the_next_that_ended_and_has_no_say():
    runs = [record("task4", "pathprox", seed, lr=0.3, weight_decay=3e-3) for seed in (2, 0, 1)]
    runs[1].status = DIVERGED
    other = record("task4", "pathprox", lr=0.1, weight_decay=3e-3)
    for run, val in zip((*runs, other), (98.0, 99.0, 97.0, 90.0), strict=True):
        run.final["best"].update(val=val, test=val - 1, active=50.0)
    grid = rows(run_tables.grid_table("task4", "pathprox", [*runs, other]))
    shown = next(row for row in grid if row[0] == "0.003")
    assert shown[2:4] == ["**90.0 / 89.0 / 50.0**", "97.0 / 96.0 / 50.0 (seed 1)"]
    summary = rows(run_tables.grid_summary("task4", [*runs, other]))[1]
    assert summary[2:5] == ["2", "0", "0"]
    assert summary[6] == "lr 0.1, weight decay 0.003"


def test_severities_and_sizes_are_means_over_the_seeds():
    runs = [record("task3", "weight-decay", seed) for seed in (0, 1)]
    for run, shift in zip(runs, (0, 2), strict=True):
        severities = {str(s): 80.0 - s + shift for s in range(1, 6)}
        run.final["corrupted"].update(mean=70.0 + shift, last_mean=60.0, severities=severities, origin="generated")
        run.final["size"] = {"parameters": 200, "macs": 50, "shrunk_parameters": 100 + shift, "shrunk_macs": 5}
    corrupted = next(row for row in rows(run_tables.corrupted_table(runs)) if row[0] == "Task 3")
    steps = [f"{81 - s}.00 ± 1.00" for s in range(1, 6)]
    assert corrupted[2:] == ["2", "generated", *steps, "71.00 ± 1.00", "60.00"]
    del runs[0].final["corrupted"]["severities"]
    fewer = next(row for row in rows(run_tables.corrupted_table(runs)) if row[0] == "Task 3")
    assert fewer[2:5] == ["2", "generated", "81.00 (n = 1)"], "one run does not know its severities"
    assert fewer[-2:] == corrupted[-2:]
    size = next(row for row in rows(run_tables.size_table(runs)) if row[0] == "Task 3")
    assert size[2:] == ["2", "200", "101 ± 1", "50.50 ± 0.50", "50", "5", "10.00"]
    assert rows(run_tables.size_table([]))[0] == ["Task 1", "weight decay", "0", "no record yet", *"-----"]


def test_the_best_look_of_all_and_of_those_after_the_last_milestone():
    run = record("task3", "pathprox")
    steps = [0, 28_080, 35_100, 42_120, 49_140, 56_160]
    run.history = {"step": steps, "active": [100, 95, 90, 70, 50, 40], "balanced": [1.0] * 6}
    run.history |= {"val": [10, 80, 91, 90, 90.5, 90.5], "test": [10, 79, 90.2, 89, 90.7, 90]}
    (row,) = rows(run_tables.look_table([run]))
    assert row[3:] == ["90.79 ± 0.06", "90.20", "90.70", "-", "90.70", "48.29 ± 10.68", "90.00", "50.00", "-", "35,100"]
    other = dataclasses.replace(run, seed=1, history={**run.history, "val_augmented": [10, 70, 80, 82, 81, 81.5]})
    (row,) = rows(run_tables.look_table([run, other]))
    assert (row[6], row[11]) == ("89.00 (n = 1)", "70.00 (n = 1)"), "the look that augmented images choose"
    (row,) = rows(run_tables.look_table([other]))
    assert (row[6], row[11]) == ("89.00", "70.00")


def test_the_highest_look_on_test_images_is_a_bound_and_without_a_falling_learning_rate_there_are_no_late_looks():
    run = record("task1", "pathprox")
    run.history = {"step": [0, 1, 2], "active": [100, 90, 80], "balanced": [1.0] * 3}
    run.history |= {"val": [1, 9, 8], "test": [2, 7, 9]}
    (row,) = rows(run_tables.look_table([run]))
    assert row[3:8] == ["91.46 ± 0.11", "7.00", "-", "-", "9.00"]


def test_lipschitz_constants_on_the_way_are_means_over_the_seeds():
    runs = [record("figure1", method, seed) for method in ("weight-decay", "pathprox") for seed in (0, 1)]
    assert convergence.lipschitz_table(runs) == "", "they were not measured on the way"
    for run, level in zip(runs, (4.0, 5.0, 3.0, 3.0), strict=True):
        run.history["lipschitz"] = [level] * len(run.history["step"])
    longer = record("figure1", "pathprox", steps=200_000)
    longer.history["lipschitz"] = [9.0] * len(longer.history["step"])
    found = rows(convergence.lipschitz_table([*runs, longer]))
    assert [row[0] for row in found] == [f"{step:,}" for step in range(0, 100_001, 10_000)]
    assert found[3][1:3] == ["4.50 ± 0.50", "3.00"]
    assert float(found[-1][3].split()[0]) > float(found[0][3].split()[0]), "accuracy rises"


def test_momentum_and_other_methods_stand_below_the_papers_recipe():
    own, fast = record("task3", "pathprox"), record("task3", "pathprox", momentum=0.9, lr=0.01)
    variant = dataclasses.replace(record("task3", "pathprox", 1), recipe=own.recipe.changed(method="path-norm"))
    short = record("task3", "pathprox", steps=2000, status=DIVERGED)
    runs = [own, fast, variant, short]
    assert differences(fast) == ("momentum 0.9 in place of 0.0",)
    table = rows(run_tables.beside(runs, run_tables.with_momentum(runs)))
    assert [row[2] for row in table] == ["the paper's recipe", "lr 0.01 in place of 0.1, momentum 0.9 in place of 0.0"]
    assert table[1][-1] == f"{fast.history['balanced'][-1]:.4f}"
    other = rows(run_tables.beside(runs, run_tables.in_other_ways(runs)))
    assert [row[1:4] for row in other] == [
        ["PathProx", "the paper's recipe", "1"],
        ["PathProx", "2,000 of 56,160 steps, 1 of 1 diverged", "0"],
        ["SGD on the path norm", "the method alone", "1"],
    ]
    often = record("task1", "pathprox", steps=6000, look_every=20)
    assert run_tables.reruns([often]) == ["pathprox train task1/pathprox --look-every 20 --steps 6000 --seed 0"]
    curve = record("figure1", "pathprox", lipschitz_curve=True)
    assert run_tables.reruns([curve]) == ["pathprox train figure1/pathprox --lipschitz-curve --seed 0"]
    assert run_tables.reruns([variant, fast]) == [
        "pathprox train task3/path-norm --seed 1",
        "pathprox train task3/pathprox --lr 0.01 --momentum 0.9 --seed 0",
    ]


def test_a_longer_run_says_so_and_how_its_milestones_stand():
    moved = record("task3", "pathprox", steps=112_320)
    kept = dataclasses.replace(moved, recipe=record("task3", "pathprox").recipe.changed(steps=112_320))
    assert differences(moved) == ("112,320 steps in place of 56,160",)
    assert differences(kept) == ("112,320 steps in place of 56,160", "milestones kept")
    assert run_tables.reruns([moved, kept]) == [
        "pathprox train task3/pathprox --steps 112320 --seed 0",
        "pathprox train task3/pathprox --steps 112320 --keep-milestones --seed 0",
    ]


def test_what_the_paper_does_not_show_is_not_its_method():
    assert of_paper("task3") == ("weight-decay", "pathprox", "normalized", "pathprox-unbalanced")
    assert of_paper("figure3") == ("weight-decay", "pathprox", "path-norm")


def test_precisions_of_one_cell_stand_below_each_other():
    runs = [record("task3", "pathprox", precision=p) for p in ("bf16", "tf32")]
    alone = record("task3", "weight-decay", precision="bf16")
    table = rows(run_tables.precision_table([*runs, alone]))
    assert [row[1:5] for row in table] == [
        ["PathProx", "lr 0.1, weight decay 0.001", "bf16", "1"],
        ["PathProx", "lr 0.1, weight decay 0.001", "tf32", "1"],
    ]
    assert run_tables.precision_table([alone]) == ""


def test_cut_networks_are_the_best_by_validation_up_to_each_share_of_units():
    run = record("task5", "pathprox")
    cuts = [(2.0, 95.0, 94.5), (20.0, 97.0, 96.5), (50.0, 96.0, 99.0), (90.0, 98.0, 97.5)]
    run.final["pruned"] = [{"active": a, "val": v, "test": t} for a, v, t in cuts]
    (found,) = rows(run_tables.cut_table([run]))
    assert found == ["PathProx", "1", "2.0", "-", "94.50", "94.50", "96.50", "96.50", "97.50"]
