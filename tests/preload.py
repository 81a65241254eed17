"""Imported by the fork server (``tests/server.py``): what is done here, processes forked from it need not do.

No thread may exist in the server, so nothing here computes on more than one.
"""

from __future__ import annotations

import importlib

from pygdist.testing.layers import LAYERS, build
from tests import startup

_MODULES = [
    "hypothesis.strategies",
    "pygdist.commands.export",
    "pygdist.commands.generate",
    "pygdist.commands.partition",
    "pygdist.commands.train",
    "pygdist.commands.verify",
    "pytest",
    "tests.cli.commands",
    "tests.lightning.runs",
    "tests.warm",
    "torch.utils.tensorboard",
]

startup.begin()
for _module in _MODULES:
    importlib.import_module(_module)
for _name in LAYERS:
    build(_name, 5, 3)  # PyG writes and compiles code for a layer class when the first layer of it is made
startup.forget_garbage()
