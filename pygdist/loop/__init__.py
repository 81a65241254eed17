"""Training loops of your own, on one process (:func:`accelerate`) or on several (:func:`open_graph`).

In a notebook, :class:`Workers` starts the processes.
"""

from __future__ import annotations

from pygdist.loop.one_process import accelerate
from pygdist.loop.several import OpenGraph, open_graph
from pygdist.loop.workers import Worker, WorkerError, Workers

__all__ = ["OpenGraph", "Worker", "WorkerError", "Workers", "accelerate", "open_graph"]
