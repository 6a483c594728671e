"""What can be asked of units: the table, and which are active."""

import torch
from torch import nn

from networks import Net, chain
from pathprox import find_units
from pathprox.experiments.models import VGG


def test_the_table_shows_groups_layers_and_reasons():
    text = str(find_units(VGG((4, "M", 6, "M", 6, "M", 6, "M", 6, "M")), torch.randn(1, 3, 32, 32)))
    lines = [line.split() for line in text.splitlines()]
    assert ["4", "4", "features.0", "features.3", "path", "norm"] in lines
    assert ["6", "6", "features.3", "features.6", "-"] in lines
    assert ["classifier", "it", "is", "the", "model's", "output"] in lines
    assert "28 units in 5 groups, 16 of them in 3 couplings" in text


def test_a_stream_with_many_writers_has_a_short_line():
    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    blocks = nn.ModuleList(chain(6, 5, 6) for _ in range(5))
    text = str(find_units(Net(forward, stem=nn.Linear(4, 6), blocks=blocks, head=nn.Linear(6, 2)), torch.randn(1, 4)))
    assert "stem, blocks.0.2 and 4 more  blocks.0.0, blocks.1.0 and 4 more" in text


def test_active_counts_exact_zeros_and_thresholds():
    model = chain(4, 6, 2)
    units = find_units(model, torch.randn(1, 4))
    with torch.no_grad():
        model[2].weight[:, :2] = 0
        model[2].weight[:, 2] = 1e-7
    assert units.active()[0].tolist() == [False, False, True, True, True, True]
    assert units.count_active(1e-5) == (3, 6)
    assert units.to_dict()["groups"][0]["active"] == 4
