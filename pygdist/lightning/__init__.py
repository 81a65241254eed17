"""Training with Lightning: data module, tasks, strategies and callbacks. An import registers the strategies."""

from pygdist.lightning.averaging import ModelAveragingStrategy
from pygdist.lightning.callbacks import ExchangeMonitor, PredictionWriter
from pygdist.lightning.classifier import NodeClassifier
from pygdist.lightning.datamodule import GraphDataModule
from pygdist.lightning.link_predictor import HitsAtK, LinkPredictor
from pygdist.lightning.module import GraphModule
from pygdist.lightning.regressor import NodeRegressor
from pygdist.lightning.resume import Resume, newest_checkpoint
from pygdist.lightning.strategies import GraphDDPStrategy
from pygdist.lightning.timeline import Timeline

__all__ = [
    "ExchangeMonitor",
    "GraphDDPStrategy",
    "GraphDataModule",
    "GraphModule",
    "HitsAtK",
    "LinkPredictor",
    "ModelAveragingStrategy",
    "NodeClassifier",
    "NodeRegressor",
    "PredictionWriter",
    "Resume",
    "Timeline",
    "newest_checkpoint",
]
