"""Training on Lightning: data module, node classifier, strategies and callbacks. Importing it registers strategies."""

from pygdist.lightning.callbacks import ExchangeMonitor, PredictionWriter
from pygdist.lightning.classifier import NodeClassifier
from pygdist.lightning.datamodule import GraphDataModule
from pygdist.lightning.strategies import GraphDDPStrategy
from pygdist.lightning.timeline import Timeline

__all__ = ["ExchangeMonitor", "GraphDDPStrategy", "GraphDataModule", "NodeClassifier", "PredictionWriter", "Timeline"]
