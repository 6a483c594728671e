"""The command line, as a user calls it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pathprox.cli import app

VGG = "pathprox.experiments.models:VGG"


def run(*args: str):
    return CliRunner().invoke(app, list(args))


def test_inspect_prints_the_table():
    result = run("inspect", VGG, "--input", "1,3,32,32")
    assert result.exit_code == 0
    assert "5504 units in 16 groups, 2752 of them in 8 couplings" in result.output
    assert "ordinary weight decay: classifier.weight" in result.output


def test_inspect_prints_json_for_machines():
    result = run("inspect", VGG, "--input", "1,3,32,32", "--exclude", "features.0", "--json")
    table = json.loads(result.output)
    assert table["groups"][0] == {
        "into": ["features.2"],
        "out": ["features.5"],
        "units": 64,
        "active": 64,
        "coupled": True,
        "homogeneous": True,
    }
    assert {"layer": "classifier", "reason": "it is the model's output", "where": ""} in table["left_out"]


def test_inspect_shows_removable_units_if_asked():
    assert "0 units" in run("inspect", "networks:gelu", "--input", "1,4").output
    shown = run("inspect", "networks:gelu", "--input", "1,4", "--removable").output
    assert "8 units in 1 groups" in shown
    assert "group lasso on v" in shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nonsense", "--input", "1,3"], "write package.module:factory"),
        (["no.such.module:f", "--input", "1,3"], "cannot import 'no.such.module:f'"),
        (["pathprox.experiments.models:nothing", "--input", "1,3"], "has no attribute 'nothing'"),
        (["builtins:dict", "--input", "1,3"], "gave dict, not a torch.nn.Module"),
        ([VGG, "--input", "1,3,x"], "is not a shape"),
        ([VGG, "--input", "1,3,32,32", "--dtype", "float33"], "is not a torch dtype"),
        ([VGG, "--input", "1,3,32,32", "--exclude", "feature"], "Did you mean features"),
        ([VGG, "--input", "1,5,32,32"], "does not run on these example inputs"),
    ],
)
def test_mistakes_are_told_in_one_line_and_exit_with_2(args, words):
    result = run("inspect", *args)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_model_in_the_current_folder_can_be_named(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nnet = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))\n"
    )
    command = [sys.executable, "-m", "pathprox", "inspect", "mine:net", "--input", "1,3"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "5 units in 1 groups" in result.stdout


def test_the_version_is_printed():
    assert run("--version").output.startswith("pathprox 0.")
