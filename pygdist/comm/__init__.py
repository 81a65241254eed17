"""Communication between ranks: differentiable exchanges, the traffic meter and the watchdog."""

from pygdist.comm.buffers import Buffers
from pygdist.comm.communicator import Communicator, describe_rows
from pygdist.comm.directory import NodeDirectory
from pygdist.comm.meter import Traffic, TrafficMeter
from pygdist.comm.places import Place
from pygdist.comm.plan import ExchangePlan
from pygdist.comm.recorder import Recorder, Span
from pygdist.comm.replay import PartCommunicator, run_parts
from pygdist.comm.transfer import Message, Transfer, message_rows
from pygdist.comm.watchdog import Watchdog

__all__ = [
    "Buffers", "Communicator", "ExchangePlan", "Message", "NodeDirectory", "PartCommunicator", "Place", "Recorder",
    "Span", "Traffic", "TrafficMeter", "Transfer", "Watchdog", "describe_rows", "message_rows", "run_parts",
]  # fmt: skip
