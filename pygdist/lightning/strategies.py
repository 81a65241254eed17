"""Ranks keep one model: Lightning's DDP averages gradients, with the additions that a partitioned graph needs.

A loss scale turns DDP's mean over ranks into the mean over nodes, exchanges of backends have a process group of their
own, and a watchdog names a late or lost rank.
"""

from __future__ import annotations

import datetime
import logging
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from pygdist import signals
from pygdist.comm import Communicator, Watchdog
from pygdist.comm.alike import require_alike
from pygdist.comm.ddp import (
    DDP_OPTIONS,
    ONE_BUCKET_MB,
    ddp_loss_scale,
    settle_buckets,
    sum_behind_exchanges,
    sum_in_one_round,
)
from pygdist.comm.groups import break_groups
from pygdist.comm.places import FINISHED, LOST_A_NEIGHBOUR, failure, is_of_connection
from pygdist.comm.process import leave, watch
from pygdist.comm.transport import NCCL_GRACE_S
from pygdist.errors import InputError, LostRankError, SignalError
from pygdist.lightning import ending, meeting, optimizer_states
from pygdist.lightning.checkpoint_io import WholeCheckpointIO, check_alike, mistake_in
from pygdist.lightning.checks import check_closures, overflow_in, read_only_folder, unusable_name
from pygdist.lightning.launcher import GraphLauncher, ProcessLauncher
from pygdist.lightning.meeting import Launched, check_address, connect, hosts_store, warn_of_joining
from pygdist.lightning.one_lightning import OfLightning
from pygdist.lightning.one_model import compare_trained, compare_values, trained, values_of
from pygdist.lightning.same_options import options_of_optimizers, options_of_run
from pygdist.lightning.stopping import Stopping
from pygdist.lightning.table import write_epoch
from pygdist.lightning.to_rank_zero import broadcast_plain
from pygdist.memory.limits import refusal_of, require_for_ranks
from pygdist.memory.machine import keep_freed_memory
from pygdist.routing.agreement import options_of_model

log = logging.getLogger(__name__)

# from DDP's message about parameters without gradient, and from Lightning's version of it
_UNUSED_PARAMETERS = ("finished reduction in the prior iteration", "not used in producing the loss")
_OVERFLOW = "without overflow"  # from torch's message on a number that a tensor's type cannot hold
_LONGEST_S = 1e9  # torch and the system count time in whole numbers, some of nanoseconds, which would overflow
_SHORTEST_S = 0.1


class GraphDDPStrategy(OfLightning, DDPStrategy):
    """Averages gradients over the parts of one graph; gloo on CPU, nccl on CUDA.

    The name is ``graph_ddp``, or ``graph_ddp_notebook`` where processes must be forked
    (``--trainer.strategy=graph_ddp``). Everything else (``devices``, ``num_nodes``, torchrun, SLURM, checkpoints) is as
    in Lightning's ``ddp``.

    Args:
        timeout_s: Seconds after which an exchange, or any other collective, gives up.
        warn_after_s: Seconds in one exchange after which the log names the ranks that are late.
        lost_after_s: Seconds without a heartbeat after which a rank counts as lost, and seconds after which ranks that
            wait for each other in different calls count as stuck. All ranks then fail with an error that tells where
            each rank is. A rank in a call that no error can reach exits.
        checkpoint_on_signal: After SIGTERM, which Kubernetes and others send before they kill, save ``on_signal.ckpt``
            at the next step, beside the other checkpoints, and then end. If no step begins within 12 s, as in a long
            validation, ranks end without saving. By default ranks end at once.
        check_order: For debugging: before every exchange, check that all ranks are about to make the same call.
        keep_memory: On CPU, from the second epoch of training on, processes keep the memory of freed tensors for the
            next epoch.
        start_method: The way in which Lightning starts the processes.
        find_unused_parameters: Let DDP look for parameters on which the loss of a step does not depend; needed if there
            are such parameters.
        kwargs: Passed on to :class:`lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        InputError: If a number of seconds is not between 0.1 and 1e9.
    """

    strategy_name = "graph_ddp"
    #: Options of the command line, by name, which ranks compare; in a script they compare those of the trainer.
    options: Mapping[str, object] = MappingProxyType({})
    #: Gradients go to all ranks at once, not round a ring.
    sums_in_one_round: bool = False

    def __init__(
        self,
        *,
        timeout_s: float = 600.0,
        warn_after_s: float = 60.0,
        lost_after_s: float = 20.0,
        checkpoint_on_signal: bool = False,
        check_order: bool = False,
        keep_memory: bool = True,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        seconds = {"timeout_s": timeout_s, "warn_after_s": warn_after_s, "lost_after_s": lost_after_s}
        for name, value in seconds.items():
            if not _SHORTEST_S <= value <= _LONGEST_S:
                raise InputError(f"{name} is {value}, expected seconds from {_SHORTEST_S:g} to {_LONGEST_S:g}")
        super().__init__(
            timeout=datetime.timedelta(seconds=timeout_s),
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            **{**DDP_OPTIONS, **kwargs},
        )
        self._timeout_s, self._warn_after_s, self._check_order = timeout_s, warn_after_s, check_order
        self._lost_after_s, self._keep_memory = lost_after_s, keep_memory
        self._stopping = Stopping(checkpoint_on_signal)
        self._epochs_begun = self._steps_begun = 0  # in this process
        self._averaged: list[nn.Parameter] = []  # those whose gradients DDP averages
        self._communicator: Communicator | None = None
        self._watchdog: Watchdog | None = None

    @property
    def communicator(self) -> Communicator:
        """The communicator for the exchanges of backends, on a process group of its own."""
        if self._communicator is None:
            raise RuntimeError("the communicator exists from setup_environment() on, inside fit, validate, test, ...")
        return self._communicator

    @property
    def is_open(self) -> bool:
        """True while ranks can communicate, from the beginning of a run until the run ends or fails."""
        return self._communicator is not None

    def loss_scale(self, num_labelled: float, num_here: float) -> float:
        """Return the factor on a rank's summed loss with which DDP's mean over ranks is the mean over all nodes.

        ``num_labelled`` training nodes are on all ranks, ``num_here`` of them on this one.
        """
        return ddp_loss_scale(num_labelled, self.world_size)

    @property
    def sends_gradients(self) -> bool:
        """True if every step sends gradients, so that all ranks must make every step."""
        return True

    @property
    def leave_s(self) -> float:
        """Seconds that ranks have to end by themselves after a signal."""
        return self._stopping.leave_s

    @property
    def lost_after_s(self) -> float:
        """Seconds without a sign of life after which a rank counts as lost."""
        return self._lost_after_s

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        require_for_ranks(self.num_processes * self.num_nodes)
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            self._launcher = GraphLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = ProcessLauncher(self, self._start_method)

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        if self.global_rank == 0:
            warn_of_joining()
        with ending.joining():
            if self.world_size > 1 and self._watchdog is None:
                self._meet()
            if self.world_size == 1 and not dist.is_initialized() and self.cluster_environment is not None:
                check_address(self.cluster_environment.main_address)
            grace_s = NCCL_GRACE_S if self._get_process_group_backend() == "nccl" else 0.0
            self._timeout = datetime.timedelta(seconds=self._timeout_s + grace_s)
            try:
                super().setup_distributed()
            except (RuntimeError, ValueError, OSError) as error:  # of the store, or of what others wrote into it
                raise meeting.why_not_joined(error, self.global_rank, self._watchdog) from error

    def _meet(self) -> None:
        """Begin a run: start heartbeats, and wait until all ranks have begun the same run."""
        assert self.cluster_environment is not None
        store, limit_s = None, self._lost_after_s
        signals.follow_parent(limit_s)
        if not dist.is_initialized():
            store = connect(self.cluster_environment, self.global_rank, timeout_s=self._timeout_s, warn_after_s=limit_s)
        self._watchdog = watchdog = watch(store, self.global_rank, self.world_size)
        watchdog.warn_after_s, watchdog.lost_after_s, watchdog.on_lost = self._warn_after_s, limit_s, self._leave
        watchdog.limit_s = self._timeout_s
        trainer = self._current_trainer
        state = None if trainer is None else trainer.state.fn
        watchdog.begin("a run" if state is None else str(state.value))
        self._stopping.begin(self._current_trainer, self._watchdog)
        launched = self._launched()
        ending.look_after(launched)
        watchdog.know(launched.pids)
        try:
            watchdog.meet(self._timeout_s, launched.fate)
        except LostRankError as error:
            signum = watchdog.signum or launched.signal()
            launched.end(within_s=0.0)  # one that hangs would stay behind
            if signum:
                raise SignalError(watchdog.signalled_by or str(error), signum) from error
            raise

    @property
    def _current_trainer(self) -> pl.Trainer | None:
        return None if self.lightning_module is None else self.lightning_module._trainer

    def _launched(self) -> Launched:
        processes = getattr(self._launcher, "procs", ()) if isinstance(self._launcher, GraphLauncher) else ()
        return Launched(processes, self.global_rank + 1, self._lost_after_s)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._communicator is not None:
            return
        group = None
        if self.world_size > 1:
            group = dist.new_group(timeout=self._timeout)
        self._communicator = Communicator(
            group,
            timeout_s=self._timeout_s,
            check_order=self._check_order,
            watchdog=self._watchdog,
            local_rank=self.local_rank,
            device=self.root_device,
        )
        self._communicator.meet(self.root_device)
        self._stopping.begin(self._current_trainer, self._watchdog)
        require_alike(self.options or options_of_run(self._current_trainer, self.lightning_module), self._communicator)
        if self._current_trainer is not None:
            self._communicator.agree(read_only_folder(self._current_trainer) or unusable_name(self._current_trainer))

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Return the value of rank ``src``, sent as JSON; Lightning would send a pickle."""
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        value: TBroadcast = broadcast_plain(obj, src, self.root_device)
        return value

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None:
            rank_zero_info(
                "sync_batchnorm has no effect: norms over nodes take their statistics over all ranks, or over one part "
                "if the backend trains each part by itself"
            )
            self._layer_sync = None
        if self.lightning_module is not None:
            require_alike(options_of_model(self.lightning_module), self.communicator)
        super().setup(trainer)
        require_alike(
            options_of_optimizers(self.optimizers, (one.scheduler for one in self.lr_scheduler_configs)),
            self.communicator,
        )

    @override
    def configure_ddp(self) -> None:
        if nccl := self.communicator.is_nccl:
            self._ddp_kwargs.setdefault("bucket_cap_mb", ONE_BUCKET_MB)
        super().configure_ddp()
        self._averaged = [*trained(self.model).values()] if isinstance(self.model, DistributedDataParallel) else []
        if isinstance(self.model, DistributedDataParallel) and self._ddp_comm_hook is None:
            settle_buckets(self.model)
            backend = getattr(self.lightning_module, "backend", None)
            overlaps = backend is not None and backend.abilities.lag and not backend.runs_idle
            self.sums_in_one_round = overlaps and not nccl and sum_in_one_round(self.model, self.communicator)
            if nccl:
                sum_behind_exchanges(self.model, self.communicator)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._epochs_begun = self._steps_begun = 0
        if self.sends_gradients and self.world_size > 1:
            check_closures(self.optimizers)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self._current_trainer is not None
        self._stopping.at_step(self._current_trainer, self.communicator)
        self._epochs_begun += batch_idx == 0
        if isinstance(self.model, DistributedDataParallel) and self.world_size > 1:
            self._compare(self.model, begins=batch_idx == 0 or self._steps_begun == 0)
        self._steps_begun += 1
        if self._epochs_begun == 2 and batch_idx == 0 and self._keep_memory and self.root_device.type == "cpu":
            keep_freed_memory()  # not earlier: the first epoch frees memory of planning that no later one asks for

    def _compare(self, model: DistributedDataParallel, *, begins: bool) -> None:
        """Compare what the ranks train, if an epoch begins; DDP then averages the gradients of what is trained now.

        DDP knows the parameters that needed a gradient when it wrapped the module. Others, which a callback has
        unfrozen since, would get the gradients of their rank alone.

        Raises:
            InputError: If the ranks train different models, or layers were unfrozen within an epoch.
        """
        now = trained(model)
        averaged = set(map(id, self._averaged))
        if not begins:
            if not averaged.issuperset(map(id, now.values())):
                raise InputError(
                    "layers were unfrozen within an epoch, but DDP averages the gradients of those alone that were "
                    "trained when the epoch began; unfreeze them between epochs, as in on_train_epoch_start"
                )
            return
        if self._steps_begun:
            model.reducer._check_reducer_finalized()  # as DDP does in the pass that follows
        if compare_trained(now, averaged, self.communicator):
            model._remove_autograd_hooks()
            self.model = model.module
            self.configure_ddp()
        done = self._epochs_begun - 1
        if done > 0 and done & (done - 1) == 0 and self._model_averager is None:
            compare_values(values_of(model), self.communicator, done, self._steps_begun)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        assert self._current_trainer is not None
        self._stopping.end(self._current_trainer, self.communicator)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The object that writes and reads checkpoints; by default a file is written whole or not at all."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO) and self._checkpoint_io.checkpoint_io is None:
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank 0; all ranks make the call, and all raise if the file cannot be written."""
        error = None
        if self._communicator is not None and self._current_trainer is not None:
            write_epoch(self._current_trainer)
        if self._communicator is not None:
            self._communicator.settle()
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        except InputError as mistake:
            error = str(mistake)
        if self._communicator is not None:
            self._communicator.agree(error)
        elif error is not None:
            raise InputError(error)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint; all ranks raise if the file is damaged, incomplete, or not the same on all ranks."""
        content: Any
        try:
            content = super().load_checkpoint(checkpoint_path, *args, **options)
        except (InputError, OSError) as error:
            content = error
        assert self.lightning_module is not None
        check_alike(checkpoint_path, self.lightning_module.trainer, content, self.communicator)
        checkpoint: dict[str, Any] = content
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        optimizer_states.check(self.optimizers, [state["state"] for state in states])
        optimizer_states.check_options(self.optimizers, [state["param_groups"] for state in states])
        super().load_optimizer_state_dict(checkpoint)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Leave the run. If another error explains the exception, raise the other error."""
        super().on_exception(exception)
        told = self._explained(exception)
        if not _of_all_ranks(told) or (self._watchdog is not None and self._watchdog.verdict):
            ending.lost_ranks()
        if isinstance(told, SignalError):
            self._end_by_signal(told)
        elif isinstance(told, LostRankError):
            self._close(LOST_A_NEIGHBOUR)
        elif told is not exception or self._watchdog is not None:
            self._close_for(told)  # Lightning does not tear down after an error from here
        if told is not exception:
            raise told from exception

    def _explained(self, exception: BaseException) -> BaseException:
        """Return the error that the user is told of: the exception, or the reason for which a library raised it."""
        if damaged := mistake_in(exception, self._checkpoint_path):
            return damaged
        text = str(exception) if isinstance(exception, RuntimeError) else ""
        if any(words in text for words in _UNUSED_PARAMETERS):
            return InputError(
                "the loss does not depend on some parameters of the model; freeze or remove them, or use strategy "
                f"'{self._unused_name}'"
            )
        if _OVERFLOW in text and any(
            "/optim/" in one.filename for one in traceback.extract_tb(exception.__traceback__)
        ):
            return InputError(overflow_in(self.optimizers))
        if isinstance(exception, SignalError) or _of_all_ranks(exception):
            return exception
        if signum := signals.received():  # which a library took for a failure of its own
            told = signals.ended_before() or f"{signals.name_of(signum)} reached rank {self.global_rank}"
            return SignalError(told, signum)
        if (watchdog := self._watchdog) is None:
            return exception
        names_rank = isinstance(exception, LostRankError)
        of_torch = bool(text) and is_of_connection(exception)  # an OSError may be of the user's own code
        broken = not names_rank and (of_torch or bool(watchdog.verdict))
        place, diagnosis = self._place, watchdog.diagnose() if broken and not watchdog.signum else ""
        if watchdog.signum:  # of another rank, which broke the groups
            return SignalError(watchdog.signalled_by, watchdog.signum)
        if broken:
            return failure(diagnosis, f"{place}: a collective call failed; {diagnosis}")
        return exception

    def _close_for(self, error: BaseException) -> None:
        """Leave the run for an error of this rank, or of all."""
        told, watchdog = refusal_of(error) or error, self._watchdog
        if self._communicator is not None and self._communicator.is_nccl:
            log.error("rank %d: %s: %s", self.global_rank, type(told).__name__, told)  # ending nccl may take long
        self._close(f"{type(told).__name__}: {told}", failed=not _of_all_ranks(told))
        if watchdog is not None and isinstance(told, InputError) and told.of_one_rank:
            break_groups()  # the others find out now, and ask the store for the reason
            if hosts_store() and self.cluster_environment.creates_processes_externally:  # type: ignore[union-attr]
                watchdog.see_others_leave(self._lost_after_s)

    def _end_by_signal(self, error: SignalError) -> None:
        ending.lost_ranks()
        if self._watchdog is not None:
            watchdog = self._watchdog
            watchdog.signum, watchdog.signalled_by, watchdog.verdict = error.signum, error.message, error.message
        self._close(error.message)
        self._launched().end(within_s=self.leave_s)
        if self.global_rank == 0 and not signals.in_command() and not getattr(self._launcher, "in_rank", False):
            log.error("%s", error.message)

    @property
    def _checkpoint_path(self) -> Any:
        module = self.lightning_module
        return None if module is None or module._trainer is None else module._trainer.ckpt_path

    @property
    def _unused_name(self) -> str:
        method = "" if self._start_method == "popen" else f"_{self._start_method}"
        return f"graph_ddp{method}_find_unused_parameters_true"

    def _leave(self, diagnosis: str) -> None:
        """End this process and those that it launched, as its main thread waits for a rank that will not answer."""
        signum = 0 if self._watchdog is None else self._watchdog.signum
        if not signum:
            log.error("%s: %s; leaving", self._place, diagnosis)
        self._launched().end(within_s=self.leave_s if signum else 0.0)
        if signum:
            signals.end(signum, diagnosis if self.global_rank == 0 else "")
        signals.exit_now(1)

    @property
    def _place(self) -> str:
        epoch = 0 if self._communicator is None else self._communicator.epoch  # a rank may be lost earlier
        return f"rank {self.global_rank}, epoch {epoch}"

    def _close(self, farewell: str, *, failed: bool = True) -> None:
        """Tell the other ranks that this one leaves, and why; ``failed`` unless all leave alike."""
        signals.listen(None)
        if not (signals.received() or signals.in_command()):
            signals.uninstall()
        signals.outlive_parent()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.depart(farewell)
            watchdog.on_lost = leave
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close(failed=failed)

    @override
    def teardown(self) -> None:
        self._close(FINISHED, failed=False)
        signals.forget_siblings()
        super().teardown()
        if not signals.in_command():
            signals.uninstall()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        methods = {"graph_ddp": "popen", "graph_ddp_spawn": "spawn", "graph_ddp_fork": "fork"}
        for name, method in {**methods, "graph_ddp_notebook": "fork"}.items():
            for unused in (False, True):
                strategy_registry.register(
                    f"{name}_find_unused_parameters_true" if unused else name,
                    cls,
                    description=f"Gradient averaging over the parts of one graph, processes by {method}",
                    start_method=method,
                    find_unused_parameters=unused,
                )


def _of_all_ranks(error: BaseException) -> bool:
    """True for an error that all ranks raise alike."""
    return isinstance(error, InputError) and not error.of_one_rank


if "graph_ddp" not in StrategyRegistry:  # Lightning has no entry point for strategies
    GraphDDPStrategy.register_strategies(StrategyRegistry)
