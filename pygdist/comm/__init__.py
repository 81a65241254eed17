"""How tensors travel between ranks: differentiable exchanges, the traffic meter and the watchdog."""

from pygdist.comm.communicator import Communicator
from pygdist.comm.meter import Traffic, TrafficMeter
from pygdist.comm.plan import ExchangePlan
from pygdist.comm.recorder import Recorder, Span
from pygdist.comm.watchdog import Place, Watchdog

__all__ = ["Communicator", "ExchangePlan", "Place", "Recorder", "Span", "Traffic", "TrafficMeter", "Watchdog"]
