"""Training loops of one's own: on one process (:func:`accelerate`), or on several (:func:`open_graph`)."""

from __future__ import annotations

from pygdist.loop.one_process import accelerate
from pygdist.loop.several import OpenGraph, open_graph

__all__ = ["OpenGraph", "accelerate", "open_graph"]
