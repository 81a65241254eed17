"""What makes processes that run tests fast; called in pytest's workers, the fork server and emulated processes."""

from __future__ import annotations

import gc
import os
from functools import cache
from typing import Any

import torch
from torch_geometric import template
from torch_geometric.inspector import Inspector

from pygdist.backends.planning import hop_costs

__all__ = ["begin", "forget_garbage"]


def begin() -> None:
    """Prepare this process."""
    torch.set_num_threads(1)  # tests share cores, where threads of OpenMP wait for each other by spinning
    os.fsync = lambda descriptor: None  # a third of what tests on files would wait for; no test outlives a power cut
    # hybrid measures hops for a tenth of the seconds: any choice is exact
    hop_costs._FIRST_ROUND_S, hop_costs._FEW_ROUND_S, hop_costs._ROUND_S = 0.003, 0.002, 0.005
    gc.set_threshold(20_000)  # a fortieth of the time of models that are made, tried and dropped
    share_templates()
    share_signatures()
    forget_garbage()


def share_templates() -> None:
    """Compile each of PyG's templates once in a process. PyG does it for each layer class, which takes 30 ms."""
    environment, files = template.Environment, template.FileSystemLoader
    template.FileSystemLoader = str
    template.Environment = cache(lambda loader: environment(loader=files(loader)))


def share_signatures() -> None:
    """Let copies of a layer share what PyG read of its methods, which takes most of the time of a copy."""

    def copied(self: Inspector, memo: dict[int, Any]) -> Inspector:
        other = Inspector(self._cls)
        other._signature_dict, other._source_dict = dict(self._signature_dict), dict(self._source_dict)
        return other

    Inspector.__deepcopy__ = copied


def forget_garbage() -> None:
    """Exempt all modules and what else there is now from searches for garbage, which take half a second with them."""
    gc.collect()
    gc.freeze()
