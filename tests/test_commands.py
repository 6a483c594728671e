"""The commands of the experiments, as a user calls them, on small real data."""

import csv
import io
import json
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

import official
import pathprox
from pathprox.cli import app
from pathprox.experiments.models import MLP
from pathprox.experiments.record import read_all


def run(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


def ok(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


def test_recipes_are_listed():
    output = ok("recipes")
    assert "task3/pathprox-unbalanced" in output
    assert json.loads(ok("recipes", "--json"))["task4/pathprox"]["weight_decay"] == 0.003


def test_training_says_what_it_found_and_where_the_record_is(tmp_path):
    output = ok("train", "task1/pathprox", "--steps", 10, "--data", "mnist-embedded", "--records", tmp_path)
    assert "PathProx, MLP-3-400 factorized on mnist-embedded" in output
    assert "once shrunk" in output
    (record,) = read_all(tmp_path)
    assert f"{record.name}.json" in output.replace("\n", "")


def test_any_method_runs_on_any_task(tmp_path):
    ok("train", "task1/lasso", "--steps", 5, "--data", "mnist-embedded", "--records", tmp_path, "--weight-decay", 0)
    (record,) = read_all(tmp_path)
    assert (record.recipe.method, record.recipe.weight_decay) == ("lasso", 0)


def test_several_seeds_in_one_command(tmp_path):
    seeds = ("--seed", 0, "--seed", 3)
    ok("train", "figure2/pathprox", "--epochs", 5, *seeds, "--lr", 0.05, "--records", tmp_path)
    found = read_all(tmp_path)
    assert [r.seed for r in found] == [0, 3]
    assert {(r.recipe.steps, r.recipe.lr) for r in found} == {(5, 0.05)}


def test_a_recipe_can_be_changed(tmp_path):
    ok(
        "train",
        "figure2/pathprox",
        "--steps",
        20,
        "--decay",
        "--network",
        "shallow-20",
        "--momentum",
        0.5,
        "--look-every",
        4,
        "--records",
        tmp_path,
    )
    (record,) = read_all(tmp_path)
    recipe = record.recipe
    assert record.history["step"] == [0, 1, 4, 8, 12, 16, 20], "and at the snapshots of Figure 2"
    assert (recipe.milestones, recipe.model, recipe.momentum) == ((10, 15), "shallow-20", 0.5)
    assert record.history["lr"] == pytest.approx([recipe.lr_at(step) for step in record.history["step"]])
    assert record.history["lr"][-1] == pytest.approx(recipe.lr / 100)


def test_a_longer_run_can_keep_its_milestones(tmp_path):
    common = ("train", "figure1/pathprox", "--data", "mnist-embedded", "--records", tmp_path, "--steps", 4)
    ok(*common)
    ok(*common, "--keep-milestones")
    assert {r.recipe.milestones for r in read_all(tmp_path)} == {(2, 3), ()}, "those kept come after the end"


def test_local_lipschitz_constants_are_measured_at_every_look_when_asked_for(tmp_path):
    common = ("train", "task1/pathprox", "--data", "mnist-embedded", "--network", "MLP-2-8", "--records", tmp_path)
    ok(*common, "--steps", 2, "--lipschitz-curve")
    (record,) = read_all(tmp_path)
    assert len(record.history["lipschitz"]) == len(record.history["step"]) == 3


def test_tensorboard_events_hold_the_history(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    ok("train", "figure2/pathprox", "--steps", 10, "--records", tmp_path / "r", "--tensorboard", tmp_path / "events")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (tmp_path / "events").rglob("events.*")
    events = EventAccumulator(str(file)).Reload()
    (record,) = read_all(tmp_path / "r")
    seen = events.Scalars("balanced")
    assert [e.step for e in seen] == record.history["step"]
    assert [e.value for e in seen] == pytest.approx(record.history["balanced"], rel=1e-4)


def test_ctrl_c_keeps_the_record_and_resume_goes_on(tmp_path):
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # muted in background jobs
    start = [sys.executable, "-c", f"{heard}; from pathprox.__main__ import main; main()"]
    command = ["train", "figure2/pathprox", "--steps", "8000", "--records", str(tmp_path)]
    process = subprocess.Popen([*start, *command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (read_all(tmp_path) and len(read_all(tmp_path)[0].history["step"]) > 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    (record,) = read_all(tmp_path)
    assert record.status == "interrupted"
    assert "--resume to continue" in refused(*command)
    ok(*command, "--resume")
    assert read_all(tmp_path)[0].status == "done"


def test_a_sweep_searches_chooses_and_repeats(tmp_path):
    common = ("--steps", 10, "--data", "mnist-embedded", "--records", tmp_path)
    output = ok("sweep", "task1", "--grid", "lr=0.03,0.3 weight_decay=0.001", "--seeds", 2, *common)
    assert "[2/2]" in output
    assert "chosen by validation accuracy: lr 0.3, weight decay 0.001" in output
    assert [r.seed for r in read_all(tmp_path)] == [0, 0, 1]
    again = ok("sweep", "task1", "--grid", "lr=0.03,0.3 weight_decay=0.001", "--seeds", 2, *common)
    assert again == output, "nothing was run again: even the seconds are the same"


def test_several_jobs_at_a_time(tmp_path):
    common = ("--steps", 10, "--records", tmp_path)
    ok("sweep", "figure2", "--grid", "chosen", "--seeds", 3, "--jobs", 2, *common)
    assert [r.seed for r in read_all(tmp_path)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sweep_on_ray(tmp_path):
    pytest.importorskip("ray", reason="ray is an extra")
    common = ("--steps", 10, "--records", tmp_path)
    ok("sweep", "figure2", "--grid", "chosen", "--seeds", 2, "--jobs", 2, "--ray", "local", *common)
    assert [r.seed for r in read_all(tmp_path)] == [0, 1]


def test_tables_figures_and_the_report_are_made_from_runs_of_the_command_line(tmp_path):
    """One test, since all of it needs the same runs."""
    records = tmp_path / "records"
    embedded = ("--data", "mnist-embedded", "--records", records, "--data-dir", tmp_path / "none")
    for name in ("task1/pathprox", "figure1/pathprox"):
        ok("train", name, "--steps", 10, *embedded)
    for method in ("weight-decay", "pathprox"):
        ok("train", f"figure2/{method}", "--steps", 40, "--records", records)
    grid = ("--grid", "lr=0.1,0.3 weight_decay=1e-4", "--seeds", 1, "--steps", 5)
    ok("sweep", "figure3", "--method", "path-norm", *grid, *embedded)
    ok("train", "task5/pathprox", "--steps", 3, *embedded)

    text = ok("table", 1, "--records", records)
    assert "91.46 ± 0.11" in text, "the paper's number"
    assert "10 of 100,000 steps" in text
    assert "pathprox train task3/pathprox --seed 0" in text, "what is missing, and the command for it"
    rows = list(csv.reader(io.StringIO(ok("table", 1, "--records", records, "--format", "csv"))))
    assert len([row for row in rows if row]) == 15
    assert "| task |" in ok("table", 2, "--records", records, "--format", "markdown")
    assert "missing" in ok("table", 3, "--records", records)

    for number in (1, 2, 3, 4):
        output = ok("figure", number, "--records", records, "--out", tmp_path)
        assert (tmp_path / f"figure{number}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"figure{number}.pdf").read_bytes().startswith(b"%PDF")
        assert f"figure{number}.pdf" in output.replace("\n", "")

    ok("report", "--records", records, "--out", tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text()
    HTMLParser().feed(page)
    assert page.count("data:image/png;base64") == 4
    assert "pathprox sweep figure3 --method path-norm" in page
    assert "http" not in page


def test_a_figure_runs_what_it_lacks_and_is_drawn(tmp_path):
    lacking = ("run", "figure2", "--steps", 20, "--seeds", 2, "--records", tmp_path, "--out", tmp_path)
    assert ok(*lacking, "--dry-run").endswith("4 without a record\n")
    assert "[4/4]" in ok(*lacking)
    assert [(r.recipe.method, r.seed) for r in read_all(tmp_path)] == [
        (method, seed) for method in ("pathprox", "weight-decay") for seed in (0, 1)
    ]
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")}
    assert "figure2.png" in ok(*lacking).replace("\n", "")
    assert all(p.stat().st_mtime_ns == t for p, t in times.items()), "nothing is run twice"


def test_the_data_commands(tmp_path):
    official.write_mnist(tmp_path)
    official.write_cifar10(tmp_path)
    assert "mnist-c is not there" in ok("data", "list", "--data-dir", tmp_path)
    ok("data", "make", "mnist-c", "--data-dir", tmp_path, "--workers", 1)
    output = ok("data", "make", "cifar10-c", "--data-dir", tmp_path, "--workers", 1)
    assert "not made: frost" in output
    listed = ok("data", "list", "--data-dir", tmp_path)
    assert "mnist-c         15 corruptions, generated" in listed
    assert "cifar10-c       14 corruptions, generated, without frost" in listed
    ok("train", "task2/pathprox", "--epochs", 1, "--data-dir", tmp_path, "--records", tmp_path / "r", "--batch", 10)
    (record,) = read_all(tmp_path / "r")
    assert record.final["corrupted"]["origin"] == "generated"
    assert len(record.final["corrupted"]["each"]) == 15


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("train", "task9/pathprox"), "there is no recipe 'task9/pathprox'"),
        (("train", "task1/magic"), "there is no recipe 'task1/magic'"),
        (("train", "task1/pathprox", "--data", "imagenet"), "data 'imagenet' is none of"),
        (("train", "task1/pathprox", "--steps", 1, "--epochs", 1), "say the same thing twice"),
        (("train", "figure2/pathprox", "--precision", "int8"), "none of float32, tf32, bf16"),
        (("sweep", "task1", "--grid", "lr:3"), "is not a grid"),
        (("sweep", "figure1"), "has no grid for figure1"),
        (("sweep", "task1", "--jobs", 0), "1 or more"),
        (("table", 7), "no table 7"),
        (("run", "table7", "figure1"), "nothing to run for table7: choose from all, table1"),
        (("run", "figure2", "--seeds", 0), "1 or more"),
        (("table", 1, "--format", "word"), "none of text, markdown, csv"),
        (("figure", 9), "no figure 9"),
        (("data", "make", "imagenet-c"), "no corrupted set 'imagenet-c'"),
        (("data", "fetch", "imagenet"), "nothing to fetch for 'imagenet'"),
    ],
)
def test_mistakes_are_told_in_one_line(args, words, tmp_path):
    place = ("--records", tmp_path) if args[0] in ("table", "figure") else ("--data-dir", tmp_path / "data")
    place += ("--records", tmp_path) if args[0] in ("train", "sweep", "run") else ()
    assert words in refused(*args, *place)


def test_the_demo_makes_what_it_promises(tmp_path):
    output = ok("demo", "--out", tmp_path, "--steps", 60)
    for words in ("weight decay", "PathProx", "objective F", "corrupted test images", "once shrunk"):
        assert words in output
    for name in ("demo.png", "robustness.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "data:image/png" in (tmp_path / "report.html").read_text()
    small = pathprox.load(lambda: MLP(3, 400, factorized=True), tmp_path / "small.safetensors")
    assert sum(p.numel() for p in small.parameters()) <= 959_610
    assert len(read_all(tmp_path / "records")) == 2
