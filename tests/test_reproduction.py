"""The page on what was reproduced: its verdicts keep their rule, its numbers are the records', gaps are said."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pathprox.cli import app
from pathprox.experiments import convergence_tables as convergence
from pathprox.experiments import verdicts
from pathprox.experiments.choice import of_paper
from pathprox.experiments.paper import ALL, CLEAN, CORRUPTED, TABLES, Cell, Value
from pathprox.experiments.recipes import SEEDS
from pathprox.experiments.record import DIVERGED, Record
from pathprox.experiments.reproduction import page, read_notes, write
from records import all_records, record, rows

ROOT = Path(__file__).parent.parent
EVERYTHING = all_records()
PATHPROX = Cell("task3", CLEAN, "pathprox", Value(90.0, 0.1), Value(50.0, 5.0))
DENSE = Cell("task3", CLEAN, "weight-decay", Value(90.0, 0.1), ALL)


def one(mean: float) -> Value:
    """A single seed's number."""
    return Value(mean, math.nan)


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


def test_a_method_beyond_the_paper_is_shown_and_not_counted():
    runs = racers("task3", [9, 5, 4, 2], [9, 5, 5, 5])
    _, other = racers("task3", [9, 5, 4, 2], [9, 1, 1, 1])
    other.recipe = other.recipe.changed(method="pathprox-gauge")
    runs.append(other)
    assert [race.method for race in convergence.races("task3", runs)] == ["pathprox", "pathprox-gauge"]
    assert [race.method for race in convergence.counted("task3", runs)] == ["pathprox"]


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


def test_the_readme_says_what_the_page_says():
    readme, text = (ROOT / "README.md").read_text(), (ROOT / "docs/reproduction.md").read_text()
    accuracies, sizes = rows(section(text, "Table 1")), rows(section(text, "Size"))
    for network, task in (("MLP-6-400, MNIST", "2"), ("VGG19, CIFAR-10", "3"), ("VGG19, SVHN", "4")):
        (line,) = (line for line in readme.splitlines() if line.startswith(f"| {network} |"))
        both = [row[5] for row in accuracies if row[:2] == [task, "true labels"]]
        (left,) = (row[5] for row in sizes if row[:2] == [f"Task {task}", "PathProx"])
        share = " ± ".join(f"{float(number):.0f}" for number in left.split(" ± "))
        assert re.findall(r"[\d.]+ ± [\d.]+(?=%)", line) == [*both, share]
    counts = re.search(r"cells of Tables 1 to 3: (\d+) reproduced, (\d+) partly, (\d+) not, 0 without", text)
    assert counts
    said = "16 cells of its tables {} are reproduced, {} partly, {} not".format(*counts.groups())
    assert said in " ".join(readme.split())
