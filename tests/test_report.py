"""A report counts as one does by hand, measures in turns, tells differences, and leaves both models as they were."""

import copy
import importlib
import json
import math
import time

import pytest
import torch
from torch import nn

from networks import chain
from pathprox import find_units, shrink
from pathprox.report import Cost, Difference, GroupSize, Report, report

module = importlib.import_module("pathprox.report")  # the name in the package is the function


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.05)


def shrunk(model: nn.Module, inputs, **zeros: int) -> nn.Module:
    """Shrink after zeroing all that feeds the first units of some layers (``layer=count``)."""
    units = find_units(model, inputs)
    with torch.no_grad():
        for name, count in zeros.items():
            for p in model.get_submodule(name.strip("_")).parameters():
                p[:count] = 0
    return shrink(model, units)


def mlp():
    return chain(6, 16, 12, 3)


def small_mlp(model, x):
    return shrunk(model, x, _0=10, _2=4)


def test_everything_is_counted_as_by_hand():
    model, x = mlp(), torch.randn(5, 6)
    found = report(model, small_mlp(model, x), x)
    assert found.groups == (GroupSize(("0",), ("2",), 16, 6), GroupSize(("2",), ("4",), 12, 8))
    assert (found.before.parameters, found.after.parameters) == (7 * 16 + 17 * 12 + 13 * 3, 7 * 6 + 7 * 8 + 9 * 3)
    assert (found.before.macs, found.after.macs) == (5 * (6 * 16 + 16 * 12 + 12 * 3), 5 * (6 * 6 + 6 * 8 + 8 * 3))
    assert found.ratios["macs"] == found.before.macs / found.after.macs == 324 / 108
    assert found.difference.absolute <= 1e-6


def test_multiply_adds_of_depthwise_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    x = torch.randn(2, 3, 5, 5)
    found = report(model, shrunk(model, x, _2=3), x)
    assert [2 * (25 * 3 * n + 9 * 9 * n + 9 * n * 2) for n in (8, 5)] == [found.before.macs, found.after.macs]


def test_multiply_adds_of_attention_are_not_hidden_in_its_fast_path():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(3, 4, 8)
    found = report(nn.Sequential(layer, nn.Linear(8, 2)), nn.Sequential(layer, nn.Linear(8, 2)), x)
    weights = 12 * (4 * 8 * 8 + 2 * 8 * 16 + 8 * 2)
    assert found.before.macs == weights + 2 * 3 * 4 * 4 * 8
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_size_of_the_file_is_that_of_torch_save(tmp_path):
    model, x = mlp(), torch.randn(5, 6)
    small = small_mlp(model, x)
    found = report(model, small, x)
    for net, cost in ((model, found.before), (small, found.after)):
        torch.save(net.state_dict(), tmp_path / "net")
        assert abs((tmp_path / "net").stat().st_size - cost.file_bytes) < 200  # torch writes the file's name inside
    assert found.after.file_bytes < found.before.file_bytes


class Slow(nn.Module):
    """An MLP that waits, and counts its calls."""

    def __init__(self, seconds: float):
        super().__init__()
        self.net, self.seconds, self.calls = mlp(), seconds, []

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls.append(time.perf_counter())
            time.sleep(self.seconds)
        return self.net(x)


def test_latencies_are_those_of_the_models_measured_in_turns():
    slow, fast, x = Slow(0.004), Slow(0.001), torch.randn(1, 6)
    fast.net = slow.net
    found = report(slow, fast, x)
    assert 0.004 <= found.before.latency < 0.02
    assert 0.001 <= found.after.latency < found.before.latency
    assert 1 < found.ratios["latency"] < 10
    order = "".join(name for _, name in sorted([(t, "s") for t in slow.calls] + [(t, "f") for t in fast.calls]))
    assert order.count("s") == order.count("f") > 3
    assert "sss" not in order


def test_timing_stops_after_the_time_it_is_given(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.2)
    start = time.perf_counter()
    latencies = module._latencies([lambda: time.sleep(0.02), lambda: time.sleep(0.01)], [])
    assert 0.2 < time.perf_counter() - start < 0.5
    assert latencies[0] > latencies[1] >= 0.01
    calls = []
    monkeypatch.setattr(module, "SECONDS", 0.0)
    module._latencies([lambda: calls.append("a"), lambda: calls.append("b")], [])
    assert "".join(calls) == "ab" + "ba" + "ab" + "ba"  # a warm-up, and three turns at the least


def test_a_hiccup_does_not_count():
    pauses = iter([0, 0.2, 0, 0])
    assert max(module._latencies([lambda: time.sleep(next(pauses, 0)), lambda: None], [])) < 0.05


def test_differences_are_told():
    model, x = mlp(), torch.randn(5, 6)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[4].bias[1] += 0.5
    found = report(model, other, x)
    assert found.difference.absolute == pytest.approx(0.5, rel=1e-5)
    assert found.difference.relative == pytest.approx(0.5 / float(model(x).detach().abs().max()), rel=1e-5)
    assert found.noisy_difference.absolute == pytest.approx(0.5, rel=1e-5)


def test_a_difference_away_from_the_inputs_is_found_with_noise():
    """On a constant input a change of the weights can hide behind a change of the bias."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.ones(8, 4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[:, 0] += 1
        other[0].bias -= 1
    found = report(model, other, x)
    assert found.difference.absolute < 1e-6
    assert found.noisy_difference.absolute > 0.01


@pytest.mark.parametrize(
    ("a", "b", "absolute", "relative"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0, 0),
        ([math.inf, 2.0], [math.inf, 3.0], 1, 0.5),
        ([1.0, 2.0], [1.0, math.nan], math.inf, math.inf),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf, math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0, 0),
        ([0.0, 0.0], [0.0, 1e-30], 1e-30, math.inf),
        ([], [], 0, 0),
        ([True, False], [True, True], 1, 1),
        ([2**53, 4], [2**53, 5], 1, 2.0**-53),
        ([3 + 4j], [3 + 3j], 1, 0.2),
    ],
)
def test_the_gap_between_two_outputs(a, b, absolute, relative):
    gap = module._difference({"x": torch.tensor(a)}, {"x": torch.tensor(b)})
    assert (gap.absolute, gap.relative) == pytest.approx((absolute, relative))


def test_outputs_that_cannot_be_compared_are_refused():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) became one of shape \(3, 2\)\. Was the second model made"):
        module._difference(x, x.t())
    with pytest.raises(ValueError, match=r"differ in structure: .*list.*tuple.*Was the second model made"):
        module._difference([x], (x,))
    with pytest.raises(ValueError, match="differ in structure"):
        module._difference([x, 1.0], [x, x])
    with pytest.raises(ValueError, match="return no tensors"):
        module._difference([1.0], [1.0])
    with pytest.raises(TypeError, match=r"two torch\.nn\.Modules"):
        report(chain(6, 16, 3), torch.randn(1, 6), None)


class Two(nn.Module):
    """Two inputs, two outputs, and noise even in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.words, self.net, self.drop = nn.Embedding(5, 6), mlp(), nn.Dropout(0.5)

    def forward(self, words, x):
        hidden = self.drop(self.net(self.words(words) + x))
        return {"out": hidden, "noise": hidden.detach() * 0 + torch.rand(())}


@pytest.mark.parametrize("as_dict", [False, True])
def test_inputs_are_given_as_to_find_units(as_dict):
    model, words, x = Two(), torch.tensor([1, 4, 2]), torch.randn(3, 6)
    state = torch.get_rng_state()
    found = report(model, copy.deepcopy(model), {"x": x, "words": words} if as_dict else (words, x))
    assert torch.equal(torch.get_rng_state(), state)
    assert found.difference == found.noisy_difference == Difference(0, 0)


def test_modes_random_state_and_values_stay_as_they_were():
    model, x = (
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)),
        torch.randn(4, 6),
    )
    model.train()
    model[1].eval()
    small = shrunk(model, x, _1=3)
    small.eval()
    small[3].train()
    state, modes = torch.get_rng_state(), [[m.training for m in net.modules()] for net in (model, small)]
    before = copy.deepcopy((model.state_dict(), small.state_dict(), x))
    assert report(model, small, x).difference.absolute < 1e-5  # without dropout, that is
    assert torch.equal(torch.get_rng_state(), state)
    assert [[m.training for m in net.modules()] for net in (model, small)] == modes
    for old, new in zip(before, (model.state_dict(), small.state_dict(), {"x": x}), strict=True):
        for a, b in zip(old.values() if isinstance(old, dict) else [old], new.values(), strict=True):
            assert torch.equal(a, b)
    assert all(p.grad is None for p in [*model.parameters(), *small.parameters()])


def test_modes_come_back_after_an_error():
    model, other = chain(6, 16, 3).train(), chain(6, 16, 2).train()
    with pytest.raises(ValueError, match=r"shape \(1, 3\) became one of shape \(1, 2\)"):
        report(model, other, torch.randn(1, 6))
    assert all(m.training for net in (model, other) for m in net.modules())


def test_models_of_other_dtypes_get_their_own_inputs():
    model, x = mlp(), torch.randn(5, 6)
    found = report(model, copy.deepcopy(model).double(), x)
    assert 0 < found.difference.absolute < 1e-6
    assert found.ratios["file_bytes"] < 1


def example() -> Report:
    groups = GroupSize(("a",), ("b",), 64, 20), GroupSize(("b",), ("c",), 8, None), GroupSize(("d",), ("e",), None, 3)
    before, after = Cost(12000, 960000, 50000, 1.5e-3), Cost(3000, 0, 12500, 0.5e-3)
    return Report(groups, before, after, Difference(1.25e-7, 3e-8), Difference(math.inf, math.inf))


def test_the_table_shows_missing_groups_with_a_dash():
    assert str(example()) == "\n".join(
        [
            "23 of 72 units left, in 3 groups",
            "  before  after  fed by (w)  feeding (v)",
            "  ------  -----  ----------  -----------",
            "      64     20  a           b",
            "       8  -      b           c",
            "  -           3  d           e",
            "",
            "  cost                 before  after  ratio",
            "  -------------------  ------  -----  -----",
            "  parameters            12000   3000  4.00",
            "  multiply-adds        960000      0   inf",
            "  bytes in a file       50000  12500  4.00",
            "  microseconds a call    1500    500  3.00",
            "",
            "the outputs differ by 1.2e-07 at most (relative: 3e-08), with noise on the inputs by inf (inf)",
        ]
    )


def test_machines_get_valid_json():
    found = json.loads(example().to_json())
    assert found["groups"][1] == {"into": ["b"], "out": ["c"], "before": 8, "after": None}
    assert found["noisy_difference"] == {"absolute": None, "relative": None}
    assert found["before"] == {"parameters": 12000, "macs": 960000, "file_bytes": 50000, "latency": 0.0015}
    assert found["ratios"]["parameters"] == 4
    assert found["ratios"]["macs"] is None


def test_groups_of_the_same_name_are_matched_in_their_order():
    class Group:
        """As much of a UnitGroup as the matching needs."""

        def __init__(self, into, count):
            self.layers_in, self.layers_out, self.count = (into,), ("z",), count

        def __len__(self):
            return self.count

    before = [Group("a", 5), Group("a", 7), Group("b", 3)]
    after = [Group("a", 4), Group("c", 2)]
    sizes = [(g.into[0], g.before, g.after) for g in module._sizes(before, after)]
    assert sizes == [("a", 5, 4), ("a", 7, None), ("b", 3, None), ("c", None, 2)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_the_time_is_that_of_the_work_and_not_of_its_launch():
    model, x = mlp().cuda(), torch.randn(5, 6)
    small = small_mlp(model, x)
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    assert report(model, small, x).difference.absolute < 1e-5
    assert torch.equal(torch.cuda.get_rng_state(), state)
    a, start, end = torch.randn(8192, 8192).cuda(), torch.cuda.Event(True), torch.cuda.Event(True)
    latency, _ = module._latencies([lambda: a @ a, lambda: None], [a.device])
    start.record()
    a @ a
    end.record()
    torch.cuda.synchronize()
    assert latency > 0.5e-3 * start.elapsed_time(end)
