"""pathprox: weight decay that ends with a smaller network.

units = pathprox.find_units(model, example_inputs)       # which units the model has: verified, never guessed
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # any torch optimizer; its weight_decay stays 0
pathprox.PathProx(units, weight_decay=1e-3).attach(optimizer)
"""

from pathprox.balance import balance_
from pathprox.discover import find_units
from pathprox.lipschitz import local_lipschitz
from pathprox.objective import Objective, objective, stationarity
from pathprox.optim import PathProx
from pathprox.regularizer import Regularizer
from pathprox.report import Report, report
from pathprox.rivals import GroupLasso, Lasso, NormalizedWeightDecay, PathNorm, WeightDecay
from pathprox.shrink import shrink, shrink_
from pathprox.slices import Slice
from pathprox.store import load, save
from pathprox.units import LeftOut, UnitGroup, Units

__version__ = "0.1.0"

__all__ = [
    "GroupLasso",
    "Lasso",
    "LeftOut",
    "NormalizedWeightDecay",
    "Objective",
    "PathNorm",
    "PathProx",
    "Regularizer",
    "Report",
    "Slice",
    "UnitGroup",
    "Units",
    "WeightDecay",
    "balance_",
    "find_units",
    "load",
    "local_lipschitz",
    "objective",
    "report",
    "save",
    "shrink",
    "shrink_",
    "stationarity",
]
