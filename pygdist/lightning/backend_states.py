"""The state of a backend in a checkpoint: rows of all nodes, and what only the same parts can take up.

Rows of nodes are in the order of the graph, whatever ranks there were.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pygdist.backends import Backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.lightning.optimizer_states import pack, unpack
from pygdist.lightning.to_rank_zero import to_rank_zero

_PART = "part"  # in the state of a part: a checksum of the part


def gathered(backend: Backend, shard: Shard, communicator: Communicator) -> dict[str, Any] | None:
    """Return the backend's state for a checkpoint, on rank 0; ``None`` on other ranks. All ranks make the call.

    Raises:
        InputError: On all ranks, if a rank's state has other than one row per owned node, or ranks differ in the names,
            dtypes or widths of the rows.
    """
    rows = {name: value.detach().contiguous() for name, value in sorted(backend.state_dict().items())}
    wrong = [name for name, value in rows.items() if value.size(0) != shard.num_owned]
    communicator.agree(
        f"{_name(backend)}.state_dict(): {', '.join(wrong)} must have a row for each of the {shard.num_owned} nodes "
        f"that rank {communicator.rank} owns"
        if wrong
        else None
    )
    layout = repr([(name, value.dtype, value.shape[1:]) for name, value in rows.items()])
    if communicator.gather([float(zlib.crc32(layout.encode()))]).unique().numel() > 1:
        raise InputError(f"{_name(backend)}.state_dict(): names, dtypes or widths of rows differ between ranks")
    ids = shard.owned_id.contiguous()
    of_all, num_rows = {}, shard.num_nodes if communicator.rank == 0 else 0
    for name, value in rows.items():
        of_all[name] = torch.empty(num_rows, *value.shape[1:], dtype=value.dtype)
        for owned_id, arrived in to_rank_zero([ids, value], communicator, label="backend state")[1]:
            of_all[name][owned_id.cpu()] = arrived.cpu()
    of_parts = _of_parts(backend, shard, communicator)
    return {"backend": _name(backend), "rows": of_all, "parts": of_parts} if communicator.rank == 0 else None


def _of_parts(backend: Backend, shard: Shard, communicator: Communicator) -> dict[str, dict[str, Tensor]]:
    """Return on rank 0 the states of all parts, by the number of the part as text; all ranks make the call."""
    state = dict(backend.part_state())
    if not bool(communicator.gather([float(len(state))]).any()):
        return {}
    payload = pack({str(communicator.rank): [{0: {**state, _PART: _checksum(shard)}}]})
    arriving = to_rank_zero([payload], communicator, label="backend state of parts")[1]
    return {part: one[0] for (arrived,) in arriving for part, (one,) in unpack(arrived.cpu()).items()}


def _checksum(shard: Shard) -> Tensor:
    """Return a number for the nodes of a part and for what other parts get of them."""
    tensors = (shard.n_id, shard.plan.send_index, shard.adjacency.csr().index)
    number = 0
    for one in tensors:
        number = zlib.crc32(one.cpu().contiguous().numpy().data, number)
    return torch.tensor(number)


def scatter(saved: Mapping[str, Any] | None, backend: Backend, shard: Shard, communicator: Communicator) -> bool:
    """Give a backend that is bound to ``shard`` its state out of a checkpoint; all ranks make the call.

    ``saved`` is what :func:`gathered` returned, if the checkpoint has it.

    Returns:
        ``False`` if there is nothing to load: no state was saved, or that of another backend, other parts or other
        arguments.

    Raises:
        InputError: If the checkpoint is of a graph with another number of nodes, or the backend keeps other rows.
    """
    if saved is None or saved["backend"] != _name(backend):
        return False
    rows: dict[str, Tensor] = saved["rows"]
    for name, own in backend.state_dict().items():
        if name not in rows or (rows[name].dtype, rows[name].shape[1:]) != (own.dtype, own.shape[1:]):
            raise InputError(
                f"the checkpoint's backend_state must have rows of {name}, {own.dtype} of shape "
                f"{('N', *own.shape[1:])}, for {_name(backend)}"
            )
    for name, value in rows.items():
        if value.size(0) != shard.num_nodes:
            raise InputError(
                f"the checkpoint has {value.size(0)} rows of {name}, but the graph has {shard.num_nodes} nodes; resume "
                "on the graph that it was saved on"
            )
    owned_id = shard.owned_id.cpu()
    backend.load_state_dict({name: value[owned_id].to(shard.x.device) for name, value in rows.items()})
    return _taken_up(saved.get("parts", {}), backend, shard, communicator)


def _taken_up(parts: Mapping[str, Any], backend: Backend, shard: Shard, communicator: Communicator) -> bool:
    """Give the backend the state of its part, if all ranks have the parts that were saved, or nothing was."""
    mine = dict(parts.get(str(communicator.rank), {}))
    same = len(parts) == communicator.world_size and bool(mine.pop(_PART) == _checksum(shard))
    if not bool(communicator.gather([float(same)]).all()):
        return not parts
    return backend.load_part_state(mine)


def _name(backend: Backend) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"
