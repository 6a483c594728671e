"""Figures and the page are made from whatever records there are; they compute what they say and say what is missing."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from pathprox.experiments import figures
from pathprox.experiments.figures_parts import average, best_lr, complete, mean_staircase, solutions, staircase
from pathprox.experiments.figures_plane import probability
from pathprox.experiments.page import Section, document, html_table, image, page
from pathprox.experiments.recipes import CHOSEN
from pathprox.experiments.record import DIVERGED, Record, read_all
from records import all_records, record

EVERYTHING = all_records()
TASKS = {1: "figure1", 2: "figure2", 3: "figure3", 4: "task5"}
PNG = b"\x89PNG\r\n\x1a\n"


def title(number: int, records: list[Record]) -> str:
    return figures._title(figures.FIGURES[number], figures.runs_of(number, records))


# What the figures compute.


def test_a_staircase_is_the_best_by_validation_among_all_that_are_as_sparse():
    cuts = [(50.0, 97.0, 96.0), (10.0, 90.0, 91.0), (20.0, 89.0, 99.0), (80.0, 98.0, 95.0), (90.0, 98.0, 99.0)]
    assert staircase(cuts) == [(10.0, 91.0), (50.0, 96.0), (80.0, 95.0)]
    assert staircase(cuts) == staircase(cuts[::-1])
    assert staircase([]) == []


def test_two_solutions_of_one_sparsity_make_one_stair():
    assert staircase([(10.0, 90.0, 1.0), (10.0, 91.0, 2.0)]) == [(10.0, 2.0)]


def test_the_mean_staircase_starts_where_every_seed_has_a_solution():
    first, second = [(1.0, 90.0), (10.0, 94.0)], [(5.0, 92.0), (20.0, 96.0)]
    assert mean_staircase([first, second]) == [(5.0, 91.0), (10.0, 93.0), (20.0, 95.0)]
    assert mean_staircase([first]) == first
    assert mean_staircase([first, []]) == mean_staircase([]) == []


def test_cut_networks_without_units_are_no_solutions():
    run = record("task5", "pathprox")
    run.final["pruned"] = [{"active": 0.0, "val": 11.0, "test": 11.0}, {"active": 2.0, "val": 95.0, "test": 96.0}]
    assert solutions([run]) == [(2.0, 95.0, 96.0)]


def test_seeds_with_fewer_cells_of_the_grid_do_not_enter_the_staircase():
    runs = [record("task5", "lasso", seed, weight_decay=wd) for seed, wd in ((0, 1e-3), (0, 1e-2), (1, 1e-3))]
    assert complete(runs) == runs[:2]


def test_a_mean_curve_has_the_steps_that_all_runs_share():
    one, two = record("figure1", "pathprox", 0), record("figure1", "pathprox", 1)
    one.history, two.history = {"step": [0, 10, 20], "loss": [4, 2, 1]}, {"step": [0, 20, 30], "loss": [2, 3, 9]}
    assert average([one, two], "loss") == ([0, 20], [3, 2])


def test_a_number_that_was_not_finite_is_a_gap():
    run = record("figure1", "pathprox")
    run.history = {"step": [0, 10], "loss": [None, 2.0]}
    assert np.isnan(average([run], "loss")[1][0])


def test_the_learning_rate_shown_is_the_one_whose_balanced_objective_ends_lowest():
    runs = [record("figure3", "pathprox", seed, lr=lr) for lr in (0.01, 0.1, 0.3) for seed in (0, 1)]
    ends = {(0.01, 0): 0.5, (0.01, 1): 0.5, (0.1, 0): 0.1, (0.1, 1): 0.7, (0.3, 0): 0.3, (0.3, 1): 0.4}
    for run in runs:
        run.history["balanced"][-1] = ends[run.recipe.lr, run.seed]
    assert best_lr(runs) == runs[4:]


def test_the_probability_of_a_point_is_that_of_the_networks_first_class():
    run = record("figure2", "pathprox")
    sizes = {"layers.0.weight": (200, 2), "layers.0.bias": 200, "layers.1.weight": (2, 200), "layers.1.bias": 2}
    weights = {name: np.zeros(size) for name, size in sizes.items()}
    weights["layers.0.weight"][0], weights["layers.1.weight"][:, 0] = (1, 0), (1, -1)  # v = [relu(x), -relu(x)]
    run.final["weights"]["7"] = {name: numbers.astype(np.float32).tolist() for name, numbers in weights.items()}
    found = probability(run, 7, np.array([[[-1.0, 3.0], [0.5, -2.0]]]))
    assert found == pytest.approx(np.array([[0.5, 1 / (1 + np.exp(-1.0))]]))


# The figures themselves.


@pytest.mark.parametrize("number", TASKS)
def test_a_figure_is_written_as_a_picture_and_as_a_document(number, tmp_path):
    png, pdf = figures.draw(number, EVERYTHING, tmp_path / "new")
    assert (png.name, pdf.name) == (f"figure{number}.png", f"figure{number}.pdf")
    assert png.read_bytes().startswith(PNG)
    assert pdf.read_bytes().startswith(b"%PDF")
    assert ink(png) > 0.02


def ink(path) -> float:
    """The share of pixels that are not white."""
    from matplotlib.image import imread

    return float((imread(path)[..., :3] < 0.9).any(-1).mean())


def test_the_same_records_give_the_same_files(tmp_path):
    runs = [r for r in EVERYTHING if r.recipe.task == "figure3"]
    once, again = (figures.draw(3, runs, tmp_path / name) for name in ("a", "b"))
    assert [p.read_bytes() for p in once] == [p.read_bytes() for p in again]


@pytest.mark.parametrize("number", TASKS)
def test_one_method_alone_is_drawn_and_the_others_are_said_to_be_missing(number, tmp_path):
    first, *others = CHOSEN[TASKS[number]]
    runs = [r for r in EVERYTHING if r.recipe.name == f"{TASKS[number]}/{first}" and r.seed == 0]
    assert figures.draw(number, runs, tmp_path, ["png"])
    notes = figures.notes(number, runs)
    assert len(notes) == len(others)
    assert all("missing; run `pathprox " in note for note in notes)


@pytest.mark.parametrize("number", TASKS)
def test_without_records_the_error_has_the_commands(number, tmp_path):
    failed = [record(TASKS[number], method, status=DIVERGED) for method in CHOSEN[TASKS[number]]]
    with pytest.raises(ValueError, match=f"no records for figure {number}") as error:
        figures.draw(number, failed, tmp_path)
    for method in CHOSEN[TASKS[number]]:
        train, sweep = f"pathprox train {TASKS[number]}/{method} --seed 0", f"sweep {TASKS[number]} --method {method}"
        assert (sweep if number > 2 else train) in str(error.value)
    assert not list(tmp_path.iterdir())


def test_there_is_no_figure_5(tmp_path):
    with pytest.raises(ValueError, match="no figure 5: choose one of 1, 2, 3, 4"):
        figures.draw(5, [], tmp_path)


def test_titles_tell_the_number_of_seeds_and_shortened_recipes():
    assert "n = 4 seeds" in title(1, EVERYTHING)
    short = [record("figure1", method, steps=2000) for method in CHOSEN["figure1"]]
    assert "n = 1 seed, 2,000 of 100,000 steps" in title(1, short)
    mixed = title(1, [short[0], record("figure1", "pathprox")])
    assert "weight decay: n = 1 seed, 2,000 of 100,000 steps" in mixed
    assert "PathProx: n = 1 seed" in mixed.splitlines()
    assert "n = 1 seed, 2 of 8 cells of the grid" in title(4, [record("task5", "lasso", lr=lr) for lr in (0.01, 0.03)])


def test_figures_prefer_full_runs_with_the_papers_numbers():
    own = [record("figure1", "pathprox", seed) for seed in (0, 1)]
    others = [record("figure1", "pathprox", lr=0.1), record("figure1", "pathprox", steps=2000)]
    assert figures.runs_of(1, [*others, *own]) == {"pathprox": own}
    assert "lr 0.1 in place of 0.3" in figures.notes(1, others)[1]


def test_runs_without_lipschitz_constants_are_drawn_without_histograms(tmp_path):
    run = record("figure1", "pathprox")
    del run.final["lipschitz"]
    assert figures.draw(1, [run], tmp_path)


def test_the_median_of_lipschitz_constants_is_drawn_where_it_was_measured():
    measured, other = record("figure1", "pathprox"), record("figure1", "weight-decay")
    measured.history["lipschitz"] = [2.0] * len(measured.history["step"])

    def drawn(**shown):
        figure = Figure(layout="constrained")
        figures.kind_of(1).paint(figure, {method.replace("_", "-"): runs for method, runs in shown.items()})
        return {axes.get_title(): axes for axes in figure.axes}

    (line,) = drawn(weight_decay=[other], pathprox=[measured])["their median in between"].lines
    assert set(line.get_ydata()) == {2.0}
    assert "their median in between" not in drawn(weight_decay=[other])


def test_a_boundary_that_is_nowhere_reached_is_not_drawn(tmp_path):
    run = record("figure2", "pathprox")
    for weights in run.final["weights"].values():
        weights.update({name: np.zeros_like(np.asarray(numbers)).tolist() for name, numbers in weights.items()})
    assert figures.draw(2, [run], tmp_path)


def test_records_that_were_written_and_read_again_draw_the_same(tmp_path):
    runs = [r for r in EVERYTHING if r.recipe.task == "figure2" and r.seed == 0]
    for run in runs:
        run.write(tmp_path / "records")
    read = read_all(tmp_path / "records")
    assert len(read) == len(runs)
    before, after = (ink(figures.draw(2, some, tmp_path, ["png"])[0]) for some in (runs, read))
    assert after == pytest.approx(before, abs=1e-3)


# The page.


class Reader(HTMLParser):
    """Checks that what is opened is closed, and collects text and addresses."""

    VOID = ("meta", "img", "br", "hr", "link")

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_the_page_has_all_parts_and_fetches_nothing():
    content = page(EVERYTHING)
    found = Reader(content)
    assert found.tags.count("img") == 4
    assert found.tags.count("table") == 5
    assert "script" not in found.tags
    assert all(a.startswith(("#", "data:image/png;base64,")) for a in found.addresses)
    assert not re.search(r"https?://|url\(|@import", content)
    for part in (
        "In short",
        "Table 1",
        "Table 2",
        "Table 3",
        "Figure 1",
        "Figure 2",
        "Figure 3",
        "Figure 4",
        "All runs",
    ):
        assert part in found.words
    assert "pathprox table 1 --records DIR --chosen paper" in found.words
    assert "missing" not in found.words
    assert 'name="viewport"' in content
    assert "prefers-color-scheme: dark" in content


def test_a_page_without_records_says_what_to_run():
    found = Reader(page([], "validation"))
    assert "img" not in found.tags
    assert found.words.count("There are no records for it yet.") == 4
    assert "pathprox sweep task3 --method pathprox" in found.words
    assert "pathprox train figure1/pathprox --seed 0" in found.words


def test_the_page_lists_every_run_with_what_became_of_it():
    runs = [record("task3", "pathprox", 0, device="H <b>200"), record("task3", "pathprox", 1, steps=100)]
    runs.append(record("task3", "pathprox", 2, status=DIVERGED, message="the loss is nan & void", final={}))
    found = Reader(page(runs))
    assert "H <b>200" in found.words
    assert "1 diverged, 1 done" in found.words
    assert "the loss is nan & void" in found.words
    assert "task3/pathprox †" in found.words
    assert "0, 2" in found.words


def test_a_document_escapes_what_it_is_given():
    body = html_table(["<a>"], [["1 < 2", "&amp;"]]) + image(PNG, 'a "b" <c>')
    content = document("<title>", [Section("<one>", body, "run <x> && y"), Section("two", "")])
    found = Reader(content)
    assert all(words in found.words for words in ("<a>", "1 < 2", "&amp;", "<one>", "run <x> && y"))
    assert 'alt="a &quot;b&quot; &lt;c&gt;"' in content


def test_a_picture_comes_from_bytes_or_a_file_and_has_to_be_one(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    assert image(tmp_path / "a.png", "x") == image(PNG, "x")
    with pytest.raises(ValueError, match="no PNG, JPEG or GIF"):
        image(b"<svg onload=alert(1)>", "x")
