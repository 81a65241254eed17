"""How tensors travel between ranks: differentiable exchanges, the traffic meter and the watchdog."""

from pygdist.comm.buffers import Buffers
from pygdist.comm.communicator import Communicator, describe_rows
from pygdist.comm.directory import NodeDirectory
from pygdist.comm.meter import Traffic, TrafficMeter
from pygdist.comm.plan import ExchangePlan
from pygdist.comm.recorder import Recorder, Span
from pygdist.comm.replay import PartCommunicator, run_parts
from pygdist.comm.transfer import Leg, Transfer, part_of
from pygdist.comm.watchdog import Place, Watchdog

__all__ = [
    "Buffers",
    "Communicator",
    "ExchangePlan",
    "Leg",
    "NodeDirectory",
    "PartCommunicator",
    "Place",
    "Recorder",
    "Span",
    "Traffic",
    "TrafficMeter",
    "Transfer",
    "Watchdog",
    "describe_rows",
    "part_of",
    "run_parts",
]
