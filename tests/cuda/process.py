"""A process in which torch finds an emulated GPU. It must know of it before torch is imported: import no torch here."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class EmulatedProcess:
    """Runs functions in a process of its own with an emulated GPU, one after the other.

    Example:
        >>> with EmulatedProcess() as process:
        ...     waits = process.run(train_a_step)
    """

    def __init__(self, *, interprets: bool = True) -> None:
        """Args: ``interprets`` runs Triton's kernels in its interpreter; otherwise it compiles them."""
        self._interprets = interprets

    def __enter__(self) -> EmulatedProcess:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._interprets), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` there and return its result. It enters ``emulated_gpu()`` itself.

        Raises:
            AssertionError: With the traceback of what the function raised.
        """
        self.start(function, *args)
        return self.result()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function(*args)`` there, and do not wait for it."""
        self._pipe.send_bytes(pickle.dumps((function, args)))

    def result(self) -> Any:
        """Wait for what :meth:`start` called, and return its result; raises as :meth:`run`."""
        done, result = pickle.loads(self._pipe.recv_bytes())
        assert done, result
        return result


def _serve(pipe: Connection, interprets: bool) -> None:
    load_device(interprets=interprets)
    from tests import startup  # which imports torch

    startup.begin()
    while True:
        try:
            asked = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(asked)
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


def load_device(*, interprets: bool = True) -> None:
    """Load ``device.cpp``, compiled once; hide packages of PyG whose operators were compiled without CUDA."""
    os.environ["TRITON_INTERPRET"] = str(int(interprets))  # Triton reads it when it is imported, which torch may do
    sys.modules |= {"torch_scatter": None, "torch_sparse": None}  # type: ignore[dict-item]
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    ctypes.CDLL(str(_compiled(Path(spec.submodule_search_locations[0]))))


def _compiled(torch_folder: Path) -> Path:
    """Return the library for a torch, which takes seconds to compile; it is kept in ``build``."""
    source = Path(__file__).with_name("device.cpp")
    includes, libraries = f"-I{torch_folder / 'include'}", torch_folder / "lib"
    command = ["c++", "-std=c++20", "-shared", "-fPIC", includes, str(source)]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    compiler = subprocess.run(["c++", "--version"], check=True, capture_output=True).stdout
    torch_version = (torch_folder / "version.py").read_bytes()
    made_of = zlib.crc32(source.read_bytes() + torch_version + compiler + repr(command).encode())
    library = source.parents[2] / "build" / "emulation" / f"device-{made_of:08x}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.partial")  # other workers may compile it too
        subprocess.run([*command, "-o", str(partial)], check=True)
        partial.replace(library)
    return library
