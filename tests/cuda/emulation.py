"""A GPU that is none: its tensors are ``cuda:0`` for all code, compute on the CPU, and refuse what a GPU refuses.

Inside :func:`emulated_gpu` an operator that mixes devices raises, and each wait of the host for the device is noted, as
``torch.cuda.set_sync_debug_mode`` would. The backward pass runs on autograd's thread for the device.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch_geometric
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

import pygdist
from pygdist.kernels import _triton
from pygdist.memory import ring
from tests.cuda.cells import CELLS
from tests.cuda.compiling import compile_kernel

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
FREE_BYTES = 8 * 2**30

_SIZES_FROM_DEVICE = {  # the host waits for the size of the result
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive,
    aten.unique_dim, aten.bincount, aten.equal, aten.is_nonzero, aten._unique,
}  # fmt: skip
_COPIES = {aten._to_copy, aten.copy_, aten._copy_from}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # by tensors of either device
_NO_MIX = {aten.index_select, aten.mm, aten.addmm, aten.bmm, aten.gather, aten.scatter_reduce_, aten.index_add_}


class EmulatedTensor(Tensor):
    """A tensor on the emulated GPU.

    Attributes:
        held: Its values, on the CPU.
    """

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> EmulatedTensor:
        """Wrap a tensor of the CPU; its memory is shared."""
        strided = held.layout == torch.strided
        out = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride() if strided else None, dtype=held.dtype, device=DEVICE,
            storage_offset=held.storage_offset() if strided else None,
        )  # fmt: skip
        out.held = held
        return out  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse to compute outside of the emulation, for example on a thread that does not know of it."""
        raise RuntimeError(f"{func} on the emulated GPU, outside of emulated_gpu()")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.__reduce_ex__(protocol)  # files are read on the host

    def __repr__(self) -> str:
        return f"EmulatedTensor({self.held!r}, device='{DEVICE}')"


@functools.cache
def _subclass_here(cls: type[Tensor]) -> type[EmulatedTensor]:
    return type(cls.__name__, (cls, EmulatedTensor), {})


_PACKAGES = {one.__name__: Path(one.__file__ or "").parent for one in (pygdist, torch_geometric)}
_PLAIN = Tensor.__torch_dispatch__


class Waits:
    """What the host does with the device.

    Attributes:
        lines: The operators for which it waited, each with the line that called it, of pygdist or PyG.
        devices: The devices that it set.
        pinned_bytes: Bytes of page-locked memory that it allocated.
    """

    def __init__(self) -> None:
        self.lines = list[str]()
        self.devices = list[str]()
        self.pinned_bytes = 0

    def note(self, operator: str) -> None:
        """Note a wait."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            for package, folder in _PACKAGES.items():
                if frame.f_code.co_filename.startswith(f"{folder}/"):
                    place = frame.f_code.co_filename.removeprefix(f"{folder}/")
                    self.lines.append(f"{operator} in {package}/{place}:{frame.f_lineno}")
                    return
            frame = frame.f_back
        self.lines.append(f"{operator} in the caller")


def check_built() -> None:
    """Refuse a process that does not emulate a GPU."""
    if torch.accelerator.current_accelerator() != torch.device("cuda") or torch.version.cuda is not None:
        raise RuntimeError("call this in a process of tests.cuda.process, on a machine whose torch has no CUDA")


@contextlib.contextmanager
def emulated_gpu(
    *,
    triton: Literal["no", "runs", "compiles"] = "no",
    reserved: int = 0,
    allocated: int = 0,
    uuid: str = "emulated",
) -> Iterator[Waits]:
    """Emulate one GPU; yields the waits of the host for it. Use it in an emulated process.

    Args:
        triton: Runs Triton's kernels, or only compiles them; "no" is a GPU without Triton.
        reserved: Bytes that torch holds.
        allocated: Bytes of these that are in use.
        uuid: Tells GPUs apart.
    """
    check_built()
    waits = Waits()
    mode = _Emulation(waits)
    with contextlib.ExitStack() as stack:
        for name, value in {**_cuda(waits, uuid), **_memory(reserved, allocated)}.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # else a parameter keeps its class
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        for of, name, function in _before_dispatch(mode):
            stack.enter_context(mock.patch.object(of, name, function))
        for name, function in _triton_as(triton, mode).items():
            stack.enter_context(mock.patch.object(_triton, name, function))
        stack.callback(_copies.finish)
        stack.callback(ring._numbered.cache_clear)
        stack.enter_context(mode)
        yield waits


def _memory(reserved: int, allocated: int) -> dict[str, Any]:
    return {
        "mem_get_info": lambda device=None: (FREE_BYTES, 2 * FREE_BYTES),
        "memory_reserved": lambda device=None: reserved,
        "memory_allocated": lambda device=None: allocated,
    }


class _Copies:
    """Asynchronous copies, made as late as a GPU may make them.

    That is when the host waits for an event, or, of those to the GPU, when an operator runs there.
    """

    def __init__(self) -> None:
        self._up, self._down = list[Callable[[], Any]](), list[Callable[[], Any]]()
        self._lock = threading.RLock()

    def to_gpu(self, out: Tensor, host: Tensor) -> None:
        """Copy page-locked memory of the host later, as it is then."""
        with self._lock:
            self._up.append(lambda: out.copy_(host))

    def to_host(self, out: Tensor, there: Tensor) -> None:
        """Copy a tensor of the GPU, as it is now, later."""
        with self._lock:
            self.arrive()
            now = there.clone()
            out.view(-1).view(torch.uint8).fill_(255)  # NaN, of floating-point numbers
            self._down.append(lambda: out.copy_(now))

    def arrive(self) -> None:
        """Make the copies to the GPU."""
        with self._lock:
            while self._up:
                self._up.pop(0)()

    def finish(self) -> None:
        """Make all copies."""
        with self._lock:
            self.arrive()
            while self._down:
                self._down.pop(0)()


_copies = _Copies()


class _Event:
    """An event of a device that computes at once, and copies late."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        with no_dispatch():
            _copies.finish()

    def elapsed_time(self, other: _Event) -> float:
        return 1000.0  # milliseconds


class _Stream(_Event):
    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()


def _cuda(waits: Waits, uuid: str) -> dict[str, Any]:
    """Return what stands for the functions of ``torch.cuda``."""
    properties = SimpleNamespace(
        total_memory=2 * FREE_BYTES, uuid=uuid, name="emulated", multi_processor_count=1, major=8, minor=0
    )
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: waits.devices.append(str(device)),
        "synchronize": lambda device=None: (waits.note("synchronize"), _copies.finish()),
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "emulated",
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": (torch.default_generator,),
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
    }


def _before_dispatch(mode: _Emulation) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return functions that decide before torch's dispatcher: of what, their name, and what stands for each."""
    sparse, address_of, storage_of, list_of, as_class = (
        torch.sparse_csr_tensor, Tensor.data_ptr, Tensor.untyped_storage, Tensor.tolist, Tensor.as_subclass
    )  # fmt: skip

    def made(make: Callable[..., Any], *args: Any, device: Any = None, **given: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(*args, device=device, **given)
        return make(*args, **given).to(device)

    def sparse_csr(crow: Tensor, column: Tensor, values: Tensor, size: Any, **given: Any) -> Tensor:
        if not isinstance(crow, EmulatedTensor):
            return sparse(crow, column, values, size, **given)
        mode.check("sparse_csr_tensor", [crow, column, values])
        if len(values) > size[0] * size[1]:
            raise RuntimeError(f"cuSPARSE refuses a matrix of {tuple(size)} with {len(values)} entries")
        return EmulatedTensor(sparse(*map(_held, (crow, column, values)), size, **given))

    def to_list(one: Tensor) -> Any:
        if isinstance(one, EmulatedTensor):
            mode.waits.note("tolist")
        return list_of(_held(one))

    def address(one: Tensor) -> int:
        caller = sys._getframe(1)
        if isinstance(one, EmulatedTensor) and _calls_native(caller.f_code.co_filename, caller.f_globals):
            raise RuntimeError(f"the native library was given memory of the GPU in {caller.f_code.co_filename}")
        return address_of(_held(one))

    def as_subclass(one: Tensor, cls: type[Tensor]) -> Tensor:
        return as_class(one, cls) if not isinstance(one, EmulatedTensor) else _subclass_here(cls)(one.held)

    def pinned(one: Tensor) -> Tensor:
        mode.pin(one)
        return one

    return [
        (torch, "tensor", partial(made, torch.tensor)),
        (torch, "as_tensor", partial(made, torch.as_tensor)),
        (torch, "sparse_csr_tensor", sparse_csr),
        (Tensor, "tolist", to_list),
        (Tensor, "as_subclass", as_subclass),
        (Tensor, "record_stream", lambda one, stream: None),
        (Tensor, "pin_memory", pinned),
        (Tensor, "is_pinned", mode.is_pinned),
        (Tensor, "data_ptr", address),
        (Tensor, "untyped_storage", lambda one: storage_of(_held(one))),
    ]


def _triton_as(how: str, mode: _Emulation) -> dict[str, Callable[..., Any]]:
    """Return what stands for the functions of ours that need a GPU to run what Triton compiles."""
    launch = {"runs": _triton.launch, "compiles": compile_kernel, "no": None}[how]
    if how == "runs":
        _prepare_interpreter()

    def launch_held(name: str, grid: tuple[int, int, int], *args: Any, **constants: Any) -> None:
        mode.check(name, [one for one in args if isinstance(one, Tensor)])
        assert launch is not None
        assert not any(isinstance(one, float) for one in args), "Triton rounds it to float32"
        launch(name, grid, *map(_held, args), **constants)

    return {"works": lambda number: how != "no", "launch": launch_held}


@functools.cache
def _prepare_interpreter() -> None:
    """Let a function that a kernel calls replace Triton's language once for the function's module, not in each call.

    Each call would go through the whole language, for most of a kernel's time. Once is enough: what a launch replaces
    it puts back, but each launch replaces it again; what a call replaces beyond that, in ``triton.language.core``, the
    interpreter never puts back.
    """
    from triton.runtime import interpreter

    replaced = set[str]()

    def called(self: Any, *args: Any, **given: Any) -> Any:
        if self.fn.__module__ not in replaced:
            replaced.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **given)

    interpreter.InterpretedFunction.__call__ = called


_NATIVE: dict[str, bool] = {}


def _calls_native(path: str, names: Mapping[str, Any]) -> bool:
    """Tell if a file uses the native library: it imports something of ``pygdist.native``."""
    if path not in _NATIVE:
        modules = (getattr(one, "__module__", None) or getattr(one, "__name__", "") for one in names.values())
        _NATIVE[path] = any(str(one).startswith("pygdist.native") for one in modules)
    return _NATIVE[path]


class _Emulation(TorchDispatchMode):
    """Runs each operator on the CPU, after it has checked the devices of its tensors."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits
        self._pinned = WeakTensorKeyDictionary()

    def pin(self, one: Tensor) -> None:
        """Note that a tensor is in page-locked memory."""
        self._pinned[one] = True
        self.waits.pinned_bytes += one.nbytes

    def is_pinned(self, one: Tensor) -> bool:
        """Tell if a tensor, or what it is a view of, is in page-locked memory."""
        return one in self._pinned or (one._base is not None and one._base in self._pinned)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(not issubclass(one, EmulatedTensor) and one.__torch_dispatch__ is not _PLAIN for one in types):
            return NotImplemented  # an adjacency, which calls operators on its tensors
        given = dict(kwargs or {})
        tensors = [*_tensors((args, given))]
        here = [one for one in tensors if isinstance(one, EmulatedTensor)]
        if here and func.namespace == "pygdist":
            with self:  # as on a GPU, by torch's operators
                return OPDEFS[func.name()]._init_fn(*args, **given)
        if here and func.namespace == "c10d" and func.overloadpacket._qualified_op_name.endswith(("send", "recv_")):
            raise RuntimeError(f"gloo was given memory of the GPU in {func}")
        operator = func.overloadpacket
        device = given.pop("device", None)
        there = bool(here) if device is None else torch.device(device).type == "cuda"
        if operator in _COPIES:
            there = self._check_copy(operator, args, given, there)
        else:
            self._check_call(func, tensors, args, given)
        if device is not None:
            given["device"] = torch.device("cpu")
        pins = given.pop("pin_memory", False)
        if here and not (operator is aten.copy_ and not isinstance(args[1], EmulatedTensor)):
            with no_dispatch():
                _copies.arrive()
        plain, named = _mapped(_held, tuple(args)), _mapped(_held, given)
        if operator is aten.copy_ and self._copies_later(args, given, plain):
            return args[0]
        out = CELLS.get(operator, func)(*plain, **named)
        if operator is aten._to_copy:
            out = out.clone() if out is plain[0] else out
        if pins:
            self.pin(out)
        return _like_arguments(func, args, given, out, wraps=there)

    def _check_copy(self, operator: Any, args: Sequence[Any], given: Mapping[str, Any], there: bool) -> bool:
        """Note a copy that the host waits for; return true if its result is on the device."""
        to, of = (there, args[0]) if operator is aten._to_copy else (isinstance(args[0], EmulatedTensor), args[1])
        from_device = isinstance(of, EmulatedTensor)
        if to != from_device:
            asynchronous = given.get("non_blocking", len(args) > 2 and bool(args[2]))
            host = of if to else args[0] if operator is not aten._to_copy else None
            if not (asynchronous and (to or (host is not None and self.is_pinned(host)))):
                self.waits.note("copy from the host" if to else "copy to the host")
        return to

    def _copies_later(self, args: Sequence[Any], given: Mapping[str, Any], plain: Sequence[Any]) -> bool:
        """Begin a copy between the GPU and page-locked memory for which the host does not wait; else return False."""
        asynchronous = given.get("non_blocking", len(args) > 2 and bool(args[2]))
        up = isinstance(args[0], EmulatedTensor)
        if not asynchronous or up == isinstance(args[1], EmulatedTensor) or not self.is_pinned(args[1 if up else 0]):
            return False
        with no_dispatch():
            (_copies.to_gpu if up else _copies.to_host)(plain[0], plain[1])
        return True

    def check(self, operator: object, tensors: Sequence[Tensor], *, numbers: bool = False) -> None:
        """Refuse tensors of two devices; ``numbers`` of the host go with any."""
        others = [one for one in tensors if not isinstance(one, EmulatedTensor)]
        if len(others) < len(tensors) and any(one.dim() or not numbers for one in others):
            shapes = ", ".join(f"{one.device}{list(one.shape)}" for one in tensors)
            raise RuntimeError(f"Expected all tensors to be on the same device, but {operator} got {shapes}")

    def _check_call(self, func: Any, tensors: list[Tensor], args: Sequence[Any], given: Mapping[str, Any]) -> None:
        """Refuse tensors of two devices, and note an operator whose result the host waits for."""
        operator = func.overloadpacket
        if not any(isinstance(one, EmulatedTensor) for one in tensors):
            return
        if operator in _INDEXED and isinstance(args[0], EmulatedTensor):
            indices = [one for one in args[1] if one is not None]
            tensors = [one for one in tensors if not any(one is index for index in indices)]
            if any(one.dtype in (torch.bool, torch.uint8) or not isinstance(one, EmulatedTensor) for one in indices):
                self.waits.note(f"{operator} by a mask, or by indices on the host")
        self.check(operator, tensors, numbers=operator not in _NO_MIX)
        if operator in _SIZES_FROM_DEVICE or (
            func is aten.repeat_interleave.Tensor and given.get("output_size") is None
        ):
            self.waits.note(str(operator))


def _held(value: Any) -> Any:
    return value.held if isinstance(value, EmulatedTensor) else value


# torch's pytree knows more containers than operators have, and took half of an operator's time
def _tensors(tree: Any) -> Iterator[Tensor]:
    """Go through the tensors in an operator's arguments or results."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors([*tree.values()])
    elif isinstance(tree, (tuple, list)):
        for one in tree:
            yield from _tensors(one)


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the same tree of arguments or results, with each tensor replaced by ``function(tensor)``."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _mapped(function, one) for name, one in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(function, one) for one in tree])
    return tree


def _like_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, wraps: bool) -> Any:
    """Return what an operator put out: arguments that it wrote into as they were given, others wrapped."""
    written, returns = _aliases(func)
    if not returns:
        return out
    values = {name: args[number] if number < len(args) else kwargs.get(key) for name, number, key in written}

    def result(alias: str | None, one: Any) -> Any:
        if alias is None:
            return _mapped(EmulatedTensor, one) if wraps else one
        for wrapper in _tensors(values[alias]):
            if isinstance(wrapper, EmulatedTensor) and wrapper.shape != wrapper.held.shape:
                raise NotImplementedError(f"{func} changes the shape of a tensor, which is not emulated")
        return values[alias]

    if len(returns) == 1:
        return result(returns[0], out)
    return tuple(result(alias, one) for alias, one in zip(returns, out, strict=True))


@functools.cache
def _aliases(func: Any) -> tuple[tuple[tuple[str, int, str], ...], tuple[str | None, ...]]:
    """Return the arguments that an operator writes into (alias, number, name).

    Also return, for each result, the alias of the argument that it is, or ``None``.
    """

    def aliases(one: Any) -> list[str]:
        return [*one.alias_info.before_set] if one.alias_info is not None and one.alias_info.is_write else []

    numbered = enumerate(func._schema.arguments)
    written = tuple((alias, number, one.name) for number, one in numbered for alias in aliases(one))
    returns = func._schema.returns
    assert all(aliases(one) for one in returns if one.alias_info is not None and one.alias_info.is_write)
    return written, tuple(next(iter(aliases(one)), None) for one in returns)
