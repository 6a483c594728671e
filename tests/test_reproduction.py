"""The page on what was reproduced: its verdicts keep their rule, its numbers are the records', gaps are said."""

import dataclasses
import math
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from pathprox.cli import app
from pathprox.experiments import convergence_tables as convergence
from pathprox.experiments import run_tables, verdicts
from pathprox.experiments.choice import differences, of_paper
from pathprox.experiments.paper import ALL, CLEAN, CORRUPTED, TABLES, Cell, Value
from pathprox.experiments.recipes import SEEDS
from pathprox.experiments.record import DIVERGED, Record
from pathprox.experiments.reproduction import page, read_notes, write
from records import all_records, record

EVERYTHING = all_records()
PATHPROX = Cell("task3", CLEAN, "pathprox", Value(90.0, 0.1), Value(50.0, 5.0))
DENSE = Cell("task3", CLEAN, "weight-decay", Value(90.0, 0.1), ALL)


def one(mean: float) -> Value:
    """A single seed's number."""
    return Value(mean, math.nan)


def rows(table: str) -> list[list[str]]:
    """The cells of a table below its head."""
    return [[c.strip() for c in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def section(text: str, title: str) -> str:
    (found,) = [part for part in text.split("\n## ") if part.startswith(title)]
    return found


def racers(task: str, theirs: list[float], ours: list[float], seed: int = 0, **changes) -> list[Record]:
    """A run of weight decay and one of PathProx in the same cell, with these balanced objectives from look to look."""
    same = {"lr": 0.1, "weight_decay": 1e-3, **changes}
    runs = [record(task, method, seed, **same) for method in ("weight-decay", "pathprox")]
    for run, balanced in zip(runs, (theirs, ours), strict=True):
        steps = [run.recipe.steps * i / (len(balanced) - 1) for i in range(len(balanced))]
        run.history = {"step": steps, "balanced": balanced, "objective": [2 * b for b in balanced]}
        run.history |= {name: [50.0] * len(balanced) for name in ("active", "val", "test")}
    return runs


# The rule.


@pytest.mark.parametrize(
    ("accuracy", "active", "verdict"),
    [
        (one(90.5), one(60.0), "reproduced"),
        (one(89.5), one(0.0), "reproduced"),
        (one(90.51), one(60.0), "partly: accuracy above"),
        (one(89.49), one(60.0), "partly: accuracy below"),
        (one(90.0), one(60.01), "partly: more active units"),
        (one(89.49), one(60.01), "not: accuracy below, more active units"),
        (Value(88.0, math.sqrt(0.99)), one(50.0), "reproduced"),  # 2 standard errors of hypot(0.1, 0.995) = 1 each
        (Value(87.99, math.sqrt(0.99)), one(50.0), "partly: accuracy below"),
        (one(90.0), Value(60.0 + 16.0, 12.0), "reproduced"),  # hypot(5, 12) = 13: up to 76
        (one(90.0), Value(76.01, 12.0), "partly: more active units"),
    ],
)
def test_the_verdict_at_the_edges_of_its_rule(accuracy, active, verdict):
    assert verdicts.judge(PATHPROX, accuracy, active) == verdict


def test_where_all_units_are_active_in_the_paper_accuracy_alone_decides():
    assert verdicts.judge(DENSE, one(90.5), one(100.0)) == "reproduced"
    assert verdicts.judge(DENSE, one(91.0), one(100.0)) == "not: accuracy above"


def test_the_difference_is_in_standard_errors_of_both_combined():
    runs = [record("task3", "pathprox", seed) for seed in (0, 1)]
    for run, accuracy, active in zip(runs, (90.0, 91.0), (40.0, 60.0), strict=True):
        run.final["best"].update(test=accuracy, active=active)
        run.final["last"].update(test=accuracy - 1, active=active + 5)
    found = rows(verdicts.verdict_table(3, runs))[1]
    errors = (90.5 - 90.79) / math.hypot(0.5, 0.06), (50 - 48.29) / math.hypot(10, 10.68)
    assert found[3:9] == ["2", "90.79 ± 0.06", "90.50 ± 0.50", "89.50 ± 0.50", "-0.29", f"{errors[0]:+.1f}"]
    assert found[9:] == ["48.29 ± 10.68", "50.00 ± 10.00", "55.00 ± 10.00", f"{errors[1]:+.1f}", "reproduced"]
    assert rows(verdicts.verdict_table(3, runs[:1]))[1][8] == "n/a"


def test_there_is_no_verdict_from_nothing_nor_from_another_recipe():
    assert {verdicts.ours(cell, []).verdict for cell in verdicts.cells()} == {"no record yet"}
    short = verdicts.ours(PATHPROX, [record("task3", "pathprox", steps=2000)])
    assert short.verdict == "no verdict: not the paper's recipe"
    fast = verdicts.ours(PATHPROX, [record("task3", "pathprox", momentum=0.9)])
    assert fast.verdict == "no verdict: not the paper's recipe"
    assert "0 reproduced, 0 partly, 0 not, 16 without a verdict" in verdicts.tally([])[0]


def test_corrupted_cells_are_judged_by_corrupted_images_and_have_no_verdict_without():
    cell = next(c for c in TABLES[1] if (c.task, c.modification, c.method) == ("task3", CORRUPTED, "weight-decay"))
    runs = [record("task3", "weight-decay", seed) for seed in (0, 1)]
    for run in runs:
        run.final["corrupted"].update(severities={"4": 70.0, "5": 60.5}, last_severities={"4": 60.0, "5": 50.0})
    found = verdicts.ours(cell, runs)
    assert (found.accuracies, found.late_accuracies, found.verdict) == ((60.5, 60.5), (50.0, 50.0), "reproduced")
    for run in runs:
        run.final["corrupted"] = {"absent": "not there", "last_mean": None}
    assert verdicts.ours(cell, runs).verdict == "no record yet"


def test_the_summary_names_what_was_missed():
    runs = [record("task4", "weight-decay", seed) for seed in SEEDS]
    for run in runs:
        run.final["best"]["test"] = 90.0
    assert verdicts.tally(runs)[1:] == ["Task 4, true labels, weight decay: not: accuracy below."]


# The objective.


def test_the_share_of_the_run_is_that_of_the_first_look_at_or_below_where_weight_decay_ends():
    (race,) = convergence.races("task3", racers("task3", [9, 5, 4, 3, 2], [9, 2, 3, 1, 1]))
    assert race.share == 0.25
    assert race.outcome == convergence.SOON
    assert race.steps == race.ours[0].recipe.steps / 4


@pytest.mark.parametrize(
    ("ours", "outcome", "shown"),
    [
        ([9, 9, 2, 1], convergence.LATE, ["2/3", "0.67", "no"]),
        ([9, 2, 9, 4], convergence.SOON, ["1/3", "0.33", "yes"]),
        ([9, 3, 2.5, 2.1], convergence.NEVER, ["never", "-", "no"]),
    ],
)
def test_a_third_of_the_run_is_soon_and_more_is_not(ours, outcome, shown):
    (race,) = convergence.races("task1", racers("task1", [9, 5, 3, 2], ours, steps=30_000))
    assert race.outcome == outcome
    counts = {"2/3": "20,000", "1/3": "10,000", "never": "never"}
    (found,) = rows(convergence.race_table([race]))
    assert found[4:] == ["4.0000", f"{2 * ours[-1]:.4f}", "2.0000", f"{ours[-1]:.4f}", counts[shown[0]], *shown[1:]]


def test_a_run_that_blows_up_is_neither_soon_nor_a_mark():
    (race,) = convergence.races("task1", racers("task1", [9, 5, 3, 2], [9, 2, 1, 2.1]))
    assert race.outcome == convergence.DIVERGED
    assert convergence.races("task1", racers("task1", [9, 5, 2, 4.1], [9, 2, 1, 1])) == []


def test_only_equal_cells_and_equal_seeds_are_compared():
    theirs, ours = racers("task3", [9, 2], [9, 1])
    for other in ({"lr": 0.3}, {"weight_decay": 1e-4}, {"seed": 1}, {"momentum": 0.9}, {"steps": 2000}):
        assert convergence.races("task3", [theirs, racers("task3", [9, 2], [9, 1], **other)[1]]) == []
    assert len(convergence.races("task3", [theirs, ours])) == 1


def test_the_slowest_seed_counts():
    runs = racers("task3", [9, 5, 4, 2], [9, 2, 2, 2]) + racers("task3", [9, 5, 4, 2], [9, 3, 3, 2], seed=1)
    (race,) = convergence.races("task3", runs)
    assert (len(race.ours), race.share) == (2, 1.0)
    worst = runs + racers("task3", [9, 5, 4, 2], [9, 3, 3, 3], seed=2)
    assert convergence.races("task3", worst)[0].outcome == convergence.NEVER


def test_the_claim_is_counted_over_the_cells_of_a_task():
    runs = racers("task3", [9, 4, 3, 2], [9, 1, 1, 1]) + racers("task3", [9, 4, 3, 2], [9, 3, 3, 3], lr=0.3)
    runs += racers("task3", [9, 4, 3, 2], [9, 3, 2, 1], lr=0.01)
    failed = racers("task3", [9, 2], [9, 1], lr=0.03)
    failed[1].status, failed[1].history = DIVERGED, {}
    short = racers("task3", [9, 4, 3, 2], [9, 1, 1, 1], steps=2000)
    (found,) = [row for row in convergence.summary_rows([*runs, *failed, *short]) if row[0] == "Task 3"]
    assert found == ("Task 3", "4", "1", "1", "1", "1", "in 1 of 4 cells")
    assert convergence.summary_rows([])[0][-1] == "no record yet"
    slow = rows(convergence.slow_table([*runs, *failed]))
    assert [row[2:] for row in slow] == [["0.01", "later"], ["0.3", "never"], ["0.03", "diverged"]]
    assert "in 1 of 4 cells, and never in 1" in page([*runs, *failed])


def test_figure_3_is_also_compared_at_the_best_learning_rate_of_each():
    slow = racers("figure3", [9, 4, 3, 2], [9, 3, 2.5, 2.2], weight_decay=1e-4)
    fast = racers("figure3", [9, 9, 9, 9], [9, 9, 2, 1], weight_decay=1e-4, lr=0.3)
    (race,) = convergence.best_races([*slow, *fast])
    assert (race.lr, race.outcome) == ("0.1 and 0.3", convergence.LATE)


def test_swings_are_the_extremes_of_the_last_tenth():
    run = record("task3", "pathprox")
    run.history["active"][-5:] = [70.0, 50.0, 42.0, 61.0, 55.0]
    (found,) = rows(convergence.swing_table([run]))
    assert found[6:] == ["42.0 to 61.0", "19.0", f"{max(20.0, abs(run.history['active'][-6] - 70)):.1f}"]
    assert convergence.swing_table([record("task3", "weight-decay")]) == ""


# Everything else in the records.


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


def test_severities_and_sizes_are_means_over_the_seeds():
    runs = [record("task3", "weight-decay", seed) for seed in (0, 1)]
    for run, shift in zip(runs, (0, 2), strict=True):
        severities = {str(s): 80.0 - s + shift for s in range(1, 6)}
        run.final["corrupted"].update(mean=70.0 + shift, last_mean=60.0, severities=severities, origin="generated")
        run.final["size"] = {"parameters": 200, "macs": 50, "shrunk_parameters": 100 + shift, "shrunk_macs": 5}
    corrupted = next(row for row in rows(run_tables.corrupted_table(runs)) if row[0] == "Task 3")
    steps = [f"{81 - s}.00 ± 1.00" for s in range(1, 6)]
    assert corrupted[2:] == ["2", "generated", *steps, "71.00 ± 1.00", "60.00"]
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


# The page.


def test_without_records_every_section_says_so_and_has_its_command():
    text = page([])
    assert text.count("| no record yet |") >= 2 * sum(map(len, TABLES.values()))
    assert "reproduced |" not in text
    for title in (
        "Table 1",
        "Size",
        "Corrupted",
        "Hyper",
        "The objective",
        "Momentum",
        "Tried",
        "Precision",
        "Figure 4",
    ):
        found = section(text, title)
        assert "no record yet" in found
        assert "\npathprox " in found
        assert "](" not in found, "there is nothing to link to"


def test_a_missing_cell_has_its_command_beside_it():
    others = [r for r in EVERYTHING if r.recipe.name != "task2/pathprox"]
    found = section(page(others), "Table 1")
    assert found.count("no record yet") == 4
    assert "Task 2, PathProx: missing; run `pathprox train task2/pathprox --seed 0" in found
    assert "[`task2`](../results/task2)" in found


def test_the_page_is_the_same_for_the_same_records_in_any_order():
    assert page(EVERYTHING) == page(EVERYTHING) == page(EVERYTHING[::-1])


def test_every_table_has_as_many_cells_in_each_row_as_in_its_head():
    lines = page(EVERYTHING).splitlines()
    tables = 0
    for before, line in pairwise(lines):
        if line.startswith("|") and before.startswith("|"):
            assert line.replace("\\|", "").count("|") == before.replace("\\|", "").count("|")
        tables += line.startswith("| ---")
    assert tables >= 15


def test_notes_stand_beside_the_cell_or_the_section_they_are_about():
    notes = read_notes(
        "For writers.\n\n## swings\n\nThey flicker.\n\n## task3/pathprox, true labels\nSeed 2.\n\n## size\n"
    )
    assert notes == {"swings": "They flicker.", "task3/pathprox, true labels": "Seed 2."}
    text = page(EVERYTHING, notes=notes)
    assert "They flicker." in section(text, "What the algorithm does not do: settle")
    assert all("- *task3/pathprox, true labels*: Seed 2." in section(text, f"Table {n}") for n in TABLES)
    with pytest.raises(ValueError, match=r"no part of the page is called tabel 1\. There are: table 1;"):
        page([], notes={"tabel 1": "lost"})


def test_the_page_is_written_with_its_figures_its_notes_and_other_precisions(tmp_path):
    folder, out = tmp_path / "runs", tmp_path / "docs" / "page.md"
    for run in [record("figure3", m) for m in of_paper("figure3")] + [record("task3", "pathprox", precision="bf16")]:
        run.write(folder)
    record("task3", "pathprox", precision="tf32").write(folder / "precision" / "tf32")
    out.parent.mkdir()
    (out.parent / "reproduction_notes.md").write_text("## precision\n\nNo difference.\n")
    assert write(folder, out) == out
    text = out.read_text()
    assert "](figures/figure3.png)" in section(text, "Figure 3")
    assert [p.name for p in (out.parent / "figures").iterdir()] == ["figure3.png"]
    assert "| tf32 | 1 |" in section(text, "Precision")
    assert "No difference." in section(text, "Precision")
    command = "pathprox train task3/pathprox --seed 0 --precision tf32 --records results/precision/tf32"
    assert command in section(text, "Precision")
    assert "[`precision`](../runs/precision)" in section(text, "Precision")
    assert "| 3 | true labels | PathProx | 1 |" in section(text, "Table 3"), "the other precision is no second seed"


def test_the_command_takes_runs_with_momentum_and_tells_mistakes_in_one_line(tmp_path):
    folder, out = tmp_path / "runs", tmp_path / "docs" / "reproduction.md"
    run = ("train", "figure2/pathprox", "--steps", "5", "--momentum", "0.5", "--records", str(folder))
    assert CliRunner().invoke(app, run).exit_code == 0
    make = ("reproduction", "--records", str(folder), "--out", str(out))
    made = CliRunner().invoke(app, make)
    assert made.exit_code == 0, made.output
    found = section(out.read_text(), "Momentum")
    assert "| Figure 2 | PathProx | 5 of 100,000 steps, momentum 0.5 in place of 0.0 | 1 |" in found
    assert "pathprox train figure2/pathprox --momentum 0.5 --steps 5 --seed 0" in found
    out.with_name("reproduction_notes.md").write_text("## figure 9\n\nNot there.\n")
    refused = CliRunner().invoke(app, make)
    assert refused.exit_code == 2
    assert "no part of the page is called figure 9" in refused.output
