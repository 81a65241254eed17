"""Training loops of one's own: on one process (:func:`accelerate`), or on several (:func:`open_graph`).

:class:`Workers` are the several processes of a notebook.
"""

from __future__ import annotations

from pygdist.loop.one_process import accelerate
from pygdist.loop.several import OpenGraph, open_graph
from pygdist.loop.workers import Worker, WorkerError, Workers

__all__ = ["OpenGraph", "Worker", "WorkerError", "Workers", "accelerate", "open_graph"]
