"""Puts a model on a backend and takes it off again."""

from pygdist.routing.distribute import distribute, undistribute

__all__ = ["distribute", "undistribute"]
