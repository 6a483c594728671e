"""The claims in short: each cell of the table says what the records say, and nothing where they say nothing."""

import pytest

from pathprox.experiments.claims import TASKS, claims
from records import record
from test_reproduction import racers

NEAR_WD, NEAR, LEVEL, SPARSE, SOON, SETTLING = range(6)


def claim(number, task, records):
    return claims(records)[number][1 + TASKS.index(task)]


def runs(task, method, accuracies, active=100.0):
    made = [record(task, method, seed) for seed in range(len(accuracies))]
    for run, accuracy in zip(made, accuracies, strict=True):
        run.final["best"].update(test=accuracy, active=active)
        run.final["last"].update(active=active - 30)
    return made


def test_nothing_is_claimed_without_records():
    assert {cell for row in claims([]) for cell in row[1:]} == {"-"}


def test_accuracies_are_near_within_half_a_point():
    assert claim(NEAR_WD, "task3", runs("task3", "weight-decay", [90.9])) == "yes: +0.49"
    assert claim(NEAR, "task3", runs("task3", "pathprox", [90.0, 90.4])) == "no: -0.59"


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([90.5, 91.5], "yes: +0.50 ± 0.71"),
        ([88.5, 89.5], "no: -1.50 ± 0.71"),
        ([88.6, 89.6], "yes: -1.40 ± 0.71"),
    ],
)
def test_level_is_within_two_standard_errors_of_both(ours, said):
    both = [*runs("task3", "weight-decay", [90.0, 91.0]), *runs("task3", "pathprox", ours)]
    assert claim(LEVEL, "task3", both) == said


def test_level_with_a_single_run_each_has_no_standard_error():
    weight_decay = runs("task4", "weight-decay", [95.0])
    assert claim(LEVEL, "task4", [*weight_decay, *runs("task4", "pathprox", [95.0])]) == "yes: +0.00"
    assert claim(LEVEL, "task4", [*weight_decay, *runs("task4", "pathprox", [94.9])]) == "no: -0.10"


def test_the_share_of_active_units_is_that_of_the_best_look():
    said = claim(SPARSE, "task4", runs("task4", "pathprox", [95.0], active=45.0))
    assert said == "no: 45.0, late 15.0; paper 44.0"
    assert claim(SPARSE, "task4", runs("task4", "pathprox", [95.0], active=44.0)).startswith("yes")


def test_races_are_counted_and_those_with_decay_apart():
    soon = [1.0, 0.8, 0.6, 0.5, 0.4], [1.0, 0.3, 0.2, 0.2, 0.2]
    late = [1.0, 0.8, 0.6, 0.5, 0.2], [1.0, 0.3, 0.2, 0.2, 0.2]
    constant = [*racers("task2", *soon), *racers("task2", *late, lr=0.3)]
    decayed = racers("task2-decay", *soon, lr=0.1, weight_decay=3e-4)
    assert claim(SOON, "task2", [*constant, *decayed]) == "1 of 2"
    assert claim(SETTLING, "task2", [*constant, *decayed]) == "1 of 1"


def test_runs_that_are_not_the_papers_say_nothing():
    assert claim(NEAR, "task3", [record("task3", "pathprox", steps=2000)]) == "-"
