"""Connections of this process: the seconds in which no byte has moved between this rank and the others."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist

_TCP_INFO, _BYTES_ACKED = 11, 120  # of Linux: the option, and where its two counts of bytes are


class Connections:
    """Watches the TCP connections of this process, except connections to the job's store, which heartbeats use.

    Args:
        store: The job's store.
    """

    def __init__(self, store: dist.Store) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._store = store
        self._store_port = store.port if isinstance(store, dist.TCPStore) else None
        self._bytes, self._since = -1, time.monotonic()

    def anew(self) -> Connections:
        """Return a new watch over the connections, which begins now."""
        return Connections(self._store)

    def still_s(self) -> float | None:
        """Return the seconds in which no byte has arrived or left; ``None`` if these bytes cannot be seen.

        They cannot be seen once a GPU is used, as nccl may bypass the system's TCP, and on systems other than Linux.
        """
        if torch.cuda.is_initialized() or not Path("/proc/self/fd").is_dir():
            return None
        moved = sum(self._counts(int(name)) for name in os.listdir("/proc/self/fd"))
        if moved != self._bytes:
            self._bytes, self._since = moved, time.monotonic()
        return time.monotonic() - self._since

    def _counts(self, descriptor: int) -> int:
        """Return the bytes that a connection has received, and those of its own that the other side has."""
        with contextlib.suppress(OSError, struct.error):  # no TCP connection, or closed meanwhile
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                one = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
                try:
                    counts = struct.unpack_from("=QQ", one.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256), _BYTES_ACKED)
                    ports = {one.getsockname()[1], one.getpeername()[1]}
                finally:
                    one.detach()  # not ours to close
                return 0 if self._store_port in ports else sum(counts)
        return 0
