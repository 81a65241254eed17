"""Ranks meet: a rank that cannot come is named, ranks that begin other runs are told so, and what nobody can start."""

from __future__ import annotations

import copy
import datetime
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment

from pygdist.comm import Watchdog
from pygdist.comm.places import busy_ticks
from pygdist.comm.watchdog import NO_STORE
from pygdist.errors import InputError, LostRankError, SignalError
from pygdist.lightning import GraphDDPStrategy, launcher, meeting
from pygdist.testing import RankPool
from tests.lightning import runs


def test_a_rank_that_cannot_come_is_named() -> None:
    watchdog = Watchdog(dist.HashStore(), 0, 2, beat_s=0.05)
    watchdog.begin("fit")
    with pytest.raises(LostRankError, match="rank 0 waits in the start of fit: rank 1 has broken down"):
        watchdog.meet(60, lambda rank: "has broken down")
    with pytest.raises(LostRankError, match="rank 1 has not reported yet"):
        watchdog.meet(0.2)
    watchdog.close()


def test_ranks_that_begin_other_runs_are_told_so() -> None:
    store, said = dist.HashStore(), {}
    ranks = [Watchdog(store, rank, 2, beat_s=0.05) for rank in range(2)]

    def meet(rank: int, stage: str) -> None:
        ranks[rank].begin(stage)
        with pytest.raises(InputError) as error:
            ranks[rank].meet(60)
        said[rank] = str(error.value)

    threads = [threading.Thread(target=meet, args=one) for one in ((0, "fit"), (1, "test"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for watchdog in ranks:
        watchdog.close()
    assert said[0] == said[1]
    assert said[0].startswith("rank 0 calls fit, rank 1 calls test; all ranks must make the same calls")


def test_a_rank_that_has_left_the_run_is_not_waited_for() -> None:
    store = dist.HashStore()
    ranks = [Watchdog(store, rank, 3, beat_s=0.05) for rank in range(2)]
    for watchdog in ranks:
        watchdog.begin("fit")
    ranks[1].depart("KeyError: 'x'")
    with pytest.raises(LostRankError, match=r"rank 1 has left fit \(KeyError: 'x'\)"):
        ranks[0].meet(60)
    for watchdog in ranks:
        watchdog.close()


def test_ranks_whose_store_went_with_rank_zero_tell_of_the_signal_that_ended_it() -> None:
    store, broken = dist.HashStore(), dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed")
    first, second = (Watchdog(store, rank, 2, beat_s=0.05) for rank in range(2))
    for watchdog in (first, second):
        watchdog.begin("fit")
    other = meeting.why_not_joined(RuntimeError("stoi"), 1, second)
    assert (type(other), str(other)) == (LostRankError, "rank 1: the ranks cannot join: stoi")
    said = meeting.why_not_joined(broken, 1, second)
    assert str(said).startswith("rank 1: the ranks cannot join: rank 0 is at test_meeting.py")
    first.signalled(signal.SIGINT)
    said = meeting.why_not_joined(broken, 1, second)
    assert isinstance(said, SignalError)
    assert str(said).startswith("SIGINT reached rank 0")
    for watchdog in (first, second):
        watchdog.close()


def test_ranks_whose_store_is_gone_are_told_so_and_what_torch_said() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=datetime.timedelta(seconds=20))
    watchdogs = [Watchdog(store, 1, 2, beat_s=0.05) for _ in range(4)]
    del server
    with pytest.raises(dist.DistNetworkError) as caught:
        store.get("anything")
    first = str(caught.value).splitlines()[0]
    assert watchdogs[0].diagnose() == NO_STORE
    errors = (caught.value, ConnectionResetError(104, "reset"), TimeoutError("late"))
    for error, said, watchdog in zip(errors, (first, "[Errno 104] reset", "late"), watchdogs[1:], strict=True):
        told = meeting.why_not_joined(error, 1, watchdog)
        assert str(told) == f"rank 1: the ranks cannot join: {NO_STORE} ({said})"
    for watchdog in watchdogs:
        watchdog.close()


def test_an_error_of_a_connection_of_the_users_own_is_told_as_it_is() -> None:
    strategy = GraphDDPStrategy()
    strategy._watchdog = mock.Mock(verdict=None, signum=0, diagnose=lambda: "rank 1 is late")
    for error in (ConnectionRefusedError("no server of logs"), TimeoutError("of a download")):
        assert strategy._explained(error) is error
    broken = dist.DistNetworkError("Connection was likely closed")
    assert str(strategy._explained(broken)).endswith("a collective call failed; rank 1 is late")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes")
def test_launched_processes_that_end_or_freeze_are_given_up() -> None:
    code = "import time; time.sleep(600)"  # as one that waits for a file
    gone = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    waiting, frozen = (subprocess.Popen([sys.executable, "-c", code]) for _ in range(2))
    try:
        gone.wait(60)
        frozen.send_signal(signal.SIGSTOP)
        launched = meeting.Launched([gone, waiting, frozen], 1, lost_after_s=2.0)
        said = [launched.fate(rank) for rank in range(5)]
        assert said[1] == f"(process {gone.pid}) ended with exit code 3 before it came here"
        assert said[0] is said[2] is said[3] is said[4] is None
        for _ in range(25):
            time.sleep(0.1)
            said = [launched.fate(rank) for rank in (2, 3)]
            assert said[0] is None
        assert said[1] is not None
        assert said[1].startswith(f"(process {frozen.pid}) was stopped before it came here, for ")
    finally:
        for process in (waiting, frozen):
            process.kill()
            process.wait()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes")
def test_a_rank_zero_that_froze_before_it_told_of_its_store_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, whose ranks wait for the address."""
    frozen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(meeting, "siblings", lambda: {0: frozen.pid})
    try:
        frozen.send_signal(signal.SIGSTOP)
        said = rf"rank 1 waits for the store of rank 0: rank 0 \(process {frozen.pid}\) was stopped before it came here"
        with pytest.raises(LostRankError, match=said):
            meeting._answer_of_rank_zero(dist.HashStore(), "a", 1, 1.0, 60.0)
        assert frozen.wait(timeout=120) == -signal.SIGKILL
        with pytest.raises(LostRankError, match="rank 0 has not told for 1 s where its store is"):
            meeting._answer_of_rank_zero(dist.HashStore(), "a", 1, 60.0, 1.0)
    finally:
        frozen.kill()
        frozen.wait()


def test_a_rank_that_is_stopped_as_the_run_ends_does_not_stay_behind(caplog: pytest.LogCaptureFixture) -> None:
    stopped, runs_on = (subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2))
    try:
        stopped.send_signal(signal.SIGSTOP)
        while busy_ticks(stopped.pid) is not None:
            time.sleep(0.01)
        meeting.Launched([stopped, runs_on], 1, 0.2).end_stopped()
        assert stopped.wait(timeout=120) == -signal.SIGKILL
        assert runs_on.poll() is None
        assert caplog.messages == [f"rank 1 (process {stopped.pid}) was stopped as the run ended: killed"]
    finally:
        for process in (stopped, runs_on):
            process.kill()
            process.wait()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> LightningEnvironment:
    for name in ("MASTER_ADDR", "MASTER_PORT", "STANDALONE_PORT", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(meeting, "_hosted", None)
    return LightningEnvironment()


def test_a_port_that_the_user_chose_and_another_process_has_is_named(
    environment: LightningEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(InputError, match=f"MASTER_PORT={port} is taken by another process"):
            meeting.host(environment)


@pytest.mark.parametrize("address", ["no.such.host.invalid", "a b", "256.1.1.1"])
def test_an_address_that_is_none_is_named(
    address: str, environment: LightningEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_NAMED_S", 0.1)
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(InputError, match=f"MASTER_ADDR: there is no host '{address}'"):
        meeting.host(environment)


def test_otherwise_the_store_is_there_before_ranks_start(
    environment: LightningEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "0")  # restored afterwards
    monkeypatch.delenv("MASTER_PORT")
    meeting.host(environment)
    store = meeting.connect(environment, 0, timeout_s=5, warn_after_s=5)
    assert isinstance(store, dist.TCPStore)
    assert os.environ["MASTER_PORT"] == str(store.port) == str(environment.main_port)
    store.set("here", "yes")
    assert meeting.connect(environment, 1, timeout_s=5, warn_after_s=5).get("here") == b"yes"


def test_a_rank_without_a_store_does_not_wait_for_ever(
    environment: LightningEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    with pytest.raises(LostRankError, match=r"rank 1: rank 0 does not answer at 127\.0\.0\.1:"):
        meeting.connect(environment, 1, timeout_s=0.3, warn_after_s=0.1)


@pytest.mark.parametrize(("name", "where"), [("-", "standard input"), ("-c", "the command line")])
def test_a_script_that_cannot_be_run_again_starts_no_ranks(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(InputError, match=f"it came from {where}, which cannot be read again: save it in a file"):
        launcher._check_script()
    monkeypatch.setattr(sys, "argv", [__file__])
    launcher._check_script()


def _calls(rank: int, world_size: int, folder: str, calls: list[str]) -> str:
    classifier, data = runs.module(folder)
    trainer = runs.trainer(rank, world_size, folder, max_epochs=1)
    try:
        getattr(trainer, calls[rank])(classifier, datamodule=data)
    except InputError as error:
        return str(error)
    return "none"


@pytest.mark.slow
@pytest.mark.parametrize("calls", [["fit", "test"], ["validate", "predict"]])
def test_ranks_that_make_other_calls_of_the_trainer(calls: list[str], tmp_path: Path, pool: RankPool) -> None:
    for said in pool.run(_calls, 2, str(tmp_path), calls):
        assert said.startswith(f"rank 0 calls {calls[0]}, rank 1 calls {calls[1]}; all ranks must make the same calls")


def _copies(rank: int, world_size: int, folder: str, backend: str) -> list[float]:
    classifier, data = runs.module(folder, backend=backend)
    graph = runs.graph()
    strategy = {"strategy": "model_averaging"} if backend == "replica" else {}
    runs.trainer(rank, world_size, folder, **strategy).fit(classifier, datamodule=data)
    trained = classifier.model(graph.x, graph.edge_index)
    saved = io.BytesIO()
    torch.save(classifier, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(classifier), pickle.loads(pickle.dumps(classifier)), torch.load(saved, weights_only=False)
    ]  # fmt: skip
    losses = []
    for one in copies:
        assert torch.equal(one.model(graph.x, graph.edge_index), trained)
        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        history = runs.History()
        callbacks = [history] if backend == "replica" else [history, averaging]
        runs.trainer(rank, world_size, folder, callbacks=callbacks, **strategy).fit(one, datamodule=data)
        losses.append(history.epochs[-1]["train_loss"])
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["comm", "replica"])
def test_copies_of_a_trained_module_run_alone_and_train_again(backend: str, tmp_path: Path, pool: RankPool) -> None:
    for losses in pool.run(_copies, 2, str(tmp_path), backend):
        assert losses == pytest.approx([losses[0]] * 3, abs=1e-12)


class Copying(pl.Callback):
    """Copies the module while it evaluates parts in turn, whose exchanges are of this pass."""

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for one in (copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))):
            assert one._kept_evaluation is None
        torch.save(pl_module, io.BytesIO())


@pytest.mark.slow
def test_a_module_is_copied_while_it_evaluates_parts_in_turn(tmp_path: Path) -> None:
    classifier, data = runs.module(str(tmp_path), backend="replica")
    data.num_parts = 2
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="model_averaging", max_epochs=1, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[Copying()],
    )  # fmt: skip
    trainer.fit(classifier, datamodule=data)


class Evaluating(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            pl_module.eval()


def _evaluates(rank: int, world_size: int, folder: str, backend: str) -> str:
    classifier, data = runs.module(folder, options={"dropout": 0.5}, backend=backend)
    strategy = {"strategy": "model_averaging"} if backend == "replica" else {}
    trainer = runs.trainer(rank, world_size, folder, callbacks=[Evaluating()], **strategy)
    with pytest.raises(InputError) as error:
        trainer.fit(classifier, datamodule=data)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["comm", "replica"])
def test_a_rank_that_evaluates_while_others_train(backend: str, tmp_path: Path, pool: RankPool) -> None:
    for said in pool.run(_evaluates, 2, str(tmp_path), backend):
        assert said.startswith("rank 0 is in training, rank 1 is in evaluation: all ranks must run GCN")


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, data = runs.module(str(tmp_path))
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_progress_bar": False}
    folder = tmp_path / "read-only"
    folder.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
    trainer = pl.Trainer(**options, default_root_dir=folder / "run")
    with pytest.raises(InputError, match=f"{folder}: cannot be written to, .*default_root_dir"):
        trainer.fit(classifier, datamodule=data)
    pl.Trainer(**options, default_root_dir=tmp_path / "run").fit(classifier, datamodule=data)


@pytest.mark.parametrize(
    ("nnodes", "env", "words"),
    [
        pytest.param("1:2", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, ["DISABLE_SHARE", "--rdzv-id"], id="both"),
        pytest.param("1:2", {}, ["machines may join torchrun --nnodes=1:2 later: give it an --rdzv-id"], id="no-name"),
        pytest.param("1:2", {"TORCHELASTIC_RUN_ID": "a"}, [], id="prepared"),
        pytest.param("2", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, [], id="as-many-always"),
    ],
)
def test_machines_that_may_join_later_need_options(
    nnodes: str, env: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    command = ["sh", "-c", "echo; read line", "--nnodes", nnodes]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdout is not None
    agent.stdout.readline()  # its arguments cannot be read until it runs
    try:
        for name, value in {"TORCHELASTIC_RUN_ID": "none", "PYGDIST_PARENT": str(agent.pid), **env}.items():
            monkeypatch.setenv(name, value)
        meeting.warn_of_joining.__wrapped__()
    finally:
        agent.communicate(b"end\n")
    assert len(caplog.messages) == bool(words)
    assert all(word in caplog.messages[0] for word in words)


def test_ranks_that_torchrun_starts_again_do_not_meet_those_before() -> None:
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent.set("pygdist/knocks/1", "one that is gone")
    seconds = datetime.timedelta(seconds=20)
    environment = mock.Mock(main_address="127.0.0.1", main_port=agent.port, world_size=lambda: 3)

    def start(rank: int) -> dist.Store:
        mine = dist.TCPStore("127.0.0.1", agent.port, None, False, timeout=seconds)
        return meeting._of_this_start(mine, environment, rank, 30.0, seconds)

    before = b""
    for number in range(2):
        with mock.patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="True"), ThreadPoolExecutor(3) as ranks:
            first, *others = ranks.map(start, range(3))
            port = os.environ["MASTER_PORT"].encode()
            assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        first.set("start", str(number))
        assert [store.get("start") for store in others] == [str(number).encode()] * 2
        assert port not in (before, str(agent.port).encode())
        before = port
