"""Workers of a notebook: results of all ranks, what they keep, and how a call ends that goes wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.nn import GCN

import pygdist
from pygdist.errors import InputError, LostRankError, RefusedError
from pygdist.loop import Worker, WorkerError, Workers, processes
from pygdist.loop import workers as module
from tests.lightning.runs import graph as small_graph

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.fixture(scope="module")
def two(fork_server: None) -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


def _who(worker: Worker) -> tuple[int, int, str, int]:
    return worker.rank, worker.num_ranks, str(worker.device), os.getpid()


def test_results_come_in_rank_order_and_processes_last(two: Workers) -> None:
    first, second = two.run(_who), two.run(_who)
    assert [one[:3] for one in first] == [(0, 2, "cpu"), (1, 2, "cpu")]
    assert first == second, "the same processes"
    assert os.getpid() not in {one[3] for one in first}
    assert not dist.is_initialized(), "the caller joins no group"


def _load(worker: Worker, folder: str) -> int:
    torch.manual_seed(worker.rank)
    worker.graph = pygdist.open_graph(small_graph(), cache_dir=folder)  # type: ignore[attr-defined]
    torch.manual_seed(3)
    worker.model = worker.graph.distribute(GCN(12, 8, num_layers=2, out_channels=4).double())  # type: ignore[attr-defined]
    return len(worker.graph.x)


def _train(worker: Worker, steps: int) -> list[float]:
    graph, losses = worker.graph, []
    optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        out = worker.model(graph.x, graph.edge_index)
        loss = graph.mean_loss(F.cross_entropy, out, graph.y, graph.train_mask)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ranks_keep_their_graph_and_model_from_call_to_call(two: Workers, tmp_path: Path) -> None:
    assert sum(two.run(_load, str(tmp_path))) == small_graph().num_nodes
    losses = [*two.run(_train, 2)[0], *two.run(_train, steps=2)[1]]
    torch.manual_seed(3)
    data, model = small_graph(), GCN(12, 8, num_layers=2, out_channels=4).double()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-9)


def test_functions_and_classes_of_a_notebook_s_cells_travel_both_ways(two: Workers) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import torch\nSCALE = 3\n"
        "class Scaled(torch.nn.Linear):\n    def forward(self, x):\n        return SCALE * super().forward(x)\n"
        "def make(worker, size):\n    worker.made = Scaled(size, 1)\n    return worker.made\n",
        cell,
    )
    models = two.run(cell["make"], 2)
    assert all(type(model) is cell["Scaled"] for model in models), "the notebook's own class"
    x, plain = torch.ones(1, 2), torch.nn.Linear(2, 1)
    plain.load_state_dict(models[0].state_dict())
    assert torch.equal(models[0](x), 3 * plain(x))


def _print(worker: Worker) -> None:
    sys.stdout.write("so far")
    sys.stderr.write(f": {worker.rank}\nunfinished")


def test_lines_that_ranks_print_appear_with_their_number(two: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    two.run(_print)
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"rank {rank}")] == [
            f"rank {rank}: so far: {rank}",
            f"rank {rank}: unfinished",
        ]


def _keep(worker: Worker) -> None:
    worker.number = worker.rank  # type: ignore[attr-defined]


def _kept(worker: Worker) -> int:
    return worker.number  # type: ignore[no-any-return]


def _divide(worker: Worker) -> float:
    return 1 / 0


def test_an_error_of_all_ranks_alike_names_the_line_and_leaves_what_they_keep(two: Workers) -> None:
    two.run(_keep)
    with pytest.raises(WorkerError, match=r"^all ranks: ZeroDivisionError: division by zero\n\nTraceback") as caught:
        two.run(_divide)
    said = str(caught.value)
    assert "in _divide\n    return 1 / 0" in said
    assert "processes.py" not in said, "no frames of ours"
    assert caught.value._render_traceback_() == [f"WorkerError: {said}"], "all that IPython shows"
    assert two.run(_kept) == [0, 1]


def _fail_alone(worker: Worker, how: str) -> None:
    if worker.rank == 1 and how == "raise":
        raise KeyError("the reason")
    if worker.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if worker.rank == 1 and how == "exits":
        raise SystemExit(3)
    if worker.rank == 1 and how == "full":
        raise OSError(28, "No space left on device", "/somewhere")
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (
            "raise",
            WorkerError,
            r"^rank 1 of 2: KeyError: 'the reason'\n\nended while still at work: rank 0\n\nTraceback",
        ),
        ("killed", WorkerError, r"^rank 1 of 2: the process ended \(exit code -9\); was there enough memory\?"),
        ("exits", WorkerError, r"^rank 1 of 2: SystemExit: 3"),
        ("full", RefusedError, r"^rank 1: /somewhere: No space left on device; make room"),
    ],
)
def test_an_error_of_one_rank_ends_the_others_and_the_next_call_starts_anew(
    how: str, kind: type[Exception], said: str
) -> None:
    with Workers(2, grace_s=0.5) as workers:  # the other waits in a barrier, for ever
        workers.run(_keep)
        with pytest.raises(kind, match=said):
            workers.run(_fail_alone, how)
        with pytest.raises(WorkerError, match="the worker keeps no 'number': run the cell that sets it"):
            workers.run(_kept)
        assert len(workers.run(_who)) == 2


def _fail_one_by_one(worker: Worker) -> None:
    time.sleep(6 * worker.rank)
    raise KeyError("alike")


def test_ranks_that_fail_alike_at_different_times_keep_what_they_have(
    two: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    two.run(_keep)
    with pytest.raises(WorkerError, match=r"^all ranks: KeyError: 'alike'"):
        two.run(_fail_one_by_one)
    assert capsys.readouterr().out == "rank 0: KeyError: 'alike' (the ranks still at work, [1], are ended in 55 s)\n"
    assert two.run(_kept) == [0, 1]


def _fail_with_words(worker: Worker, how: str) -> None:
    if how == "note":
        error = KeyError("the reason")
        error.add_note("try something else")
        raise error
    if worker.rank == 0:
        if how == "ends":
            dist.barrier()
        raise LostRankError("rank 1 is lost")
    if how == "ends":
        os._exit(1)
    raise ValueError("no Connection to the data")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_notes_of_an_error_do_not_take_the_place_of_its_message(two: Workers) -> None:
    with pytest.raises(WorkerError, match=r"^all ranks: KeyError: 'the reason'\n(.|\n)*try something else$"):
        two.run(_fail_with_words, "note")


@pytest.mark.parametrize(
    ("how", "said"),
    [("words", "ValueError: no Connection to the data"), ("ends", r"the process ended \(exit code 1\)")],
)
def test_the_rank_is_named_that_the_others_have_lost(how: str, said: str) -> None:
    with Workers(2) as workers, pytest.raises(WorkerError, match=f"^rank 1 of 2: {said}"):
        workers.run(_fail_with_words, how)


def _load_elsewhere(worker: Worker) -> float:
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, num_workers=1)
    return sum(float(batch.sum()) for (batch,) in loader)


def test_functions_may_start_processes(two: Workers) -> None:
    assert two.run(_load_elsewhere) == [15.0, 15.0]


def _fork(worker: Worker, ends: bool) -> int:
    if not (child := os.fork()):
        sys.stdout.write("printed by no rank\n")
        time.sleep(0 if ends else 40)
        os._exit(0)
    if ends:
        return os.waitpid(child, 0)[1]
    os._exit(3)


def test_a_forked_process_neither_speaks_for_its_rank_nor_hides_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    with Workers(1) as workers:
        assert workers.run(_fork, ends=True) == [0]
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"the process ended \(exit code 3\)"):
            workers.run(_fork, ends=False)
        assert time.monotonic() - start < 30
    assert "rank 0: printed" not in capfd.readouterr().out


def _print_later(worker: Worker) -> None:
    def speak() -> None:
        time.sleep(0.3)
        for _ in range(20):
            sys.stdout.write("one ")
            time.sleep(0.001)
            sys.stdout.write("line\n")

    for _ in range(2):
        threading.Thread(target=speak).start()


def test_lines_of_threads_have_a_number_after_the_call_too(two: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    two.run(_print_later)
    time.sleep(1.0)
    two.run(_who)
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0: one line"] * 40 + ["rank 1: one line"] * 40


def test_workers_that_start_at_the_same_time_leave_the_script_in_its_place() -> None:
    main = sys.modules["__main__"]
    ranks: list[Workers] = [Workers(2) for _ in range(4)]
    threads = [threading.Thread(target=one._processes.start, args=(2,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.modules["__main__"] is main
    for one in ranks:
        one.close()


def test_a_rank_that_died_between_calls_is_named() -> None:
    with Workers(2) as workers:
        os.kill(workers.run(_who)[1][3], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"^rank 1 of 2: the process ended \(exit code -9\)"):
            workers.run(_who)
        assert time.monotonic() - start < 30


def test_a_mistake_keeps_its_type_and_its_one_line(two: Workers, tmp_path: Path) -> None:
    two.run(_keep)
    with pytest.raises(InputError, match=r"^dataset 'no-such-graph': neither a folder"):
        two.run(_open, "no-such-graph", str(tmp_path))
    assert two.run(_kept) == [0, 1], "all ranks raise it, so none waits"


def _open(worker: Worker, name: str, folder: str) -> None:
    pygdist.open_graph(name, cache_dir=folder)


def _sleep(worker: Worker) -> None:
    time.sleep(600)


def test_an_interrupt_ends_a_call_and_the_workers() -> None:
    with Workers(2) as workers:
        before = workers.run(_who)
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt, match="the workers were ended; the next call starts new ones"):
            workers.run(_sleep)
        assert repr(workers) == "Workers(2 ranks, not started)"
        after = workers.run(_who)
        assert not {one[3] for one in before} & {one[3] for one in after}


def test_an_interrupt_of_another_cell_reaches_no_worker(two: Workers) -> None:
    two.run(_keep)
    for _, _, _, pid in two.run(_who):
        os.kill(pid, signal.SIGINT)  # Jupyter sends it to the whole process group
    assert two.run(_kept) == [0, 1]


def test_ranks_that_hang_are_named() -> None:
    with Workers(2) as workers:
        workers.run(_who)
        workers.timeout_s = 0.5
        with pytest.raises(WorkerError, match=r"no answer within 0.5 s from ranks \[0, 1\](.|\n)*in _sleep"):
            workers.run(_sleep)


def test_what_cannot_be_sent_is_told(two: Workers) -> None:
    with pytest.raises(InputError, match=r"cannot be sent to other processes.*lock"):
        two.run(_who, threading.Lock())
    with pytest.raises(WorkerError, match=r"the result cannot be sent from this process \(TypeError.*lock"):
        two.run(_lock)


def _lock(worker: Worker) -> Any:
    return threading.Lock()


def test_closing_twice_or_before_the_start_does_nothing() -> None:
    workers = Workers(1)
    workers.close()
    assert workers.run(_who)[0][:2] == (0, 1)
    pid = workers.run(_who)[0][3]
    workers.close()
    workers.close()
    assert not Path(f"/proc/{pid}").exists()
    assert repr(workers) == "Workers(1 ranks, not started)"


def test_workers_that_nobody_holds_end() -> None:
    workers = Workers(1)
    pid = workers.run(_who)[0][3]
    del workers
    assert not Path(f"/proc/{pid}").exists()


def test_variables_reach_workers_but_not_those_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_OPTION", "5")
    monkeypatch.setenv("SLURM_NTASKS", "1")  # a notebook in a job: its workers are no tasks of it
    with Workers(2) as workers:
        seen = workers.run(_variables)
    assert [one["MY_OPTION"] for one in seen] == ["5", "5"]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in seen] == [("0", "0", "2"), ("1", "1", "2")]
    assert not any("SLURM_NTASKS" in one for one in seen)


def _variables(worker: Worker) -> dict[str, str]:
    return dict(os.environ)


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="num_ranks is 0, expected at least 1"):
        Workers(0)
    monkeypatch.setattr(module, "CAN_SEND_CODE", False)
    with pytest.raises(InputError, match="cloudpickle, which is not installed; install it: pip install cloudpickle"):
        Workers(2)


@pytest.mark.slow
def test_lightning_s_trainer_runs_in_workers_as_often_as_one_likes(tmp_path: Path) -> None:
    with Workers(2) as workers:
        first, second = (workers.run(_fit, str(tmp_path)) for _ in range(2))
        assert first == second
        assert first[0] == first[1]
        assert sum(workers.run(_load, str(tmp_path))) == small_graph().num_nodes, "and own loops after it"


def _fit(worker: Worker, folder: str) -> float:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=worker.num_ranks, strategy="graph_ddp", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = pygdist.NodeClassifier(GCN(12, 8, num_layers=2, out_channels=4))
    trainer.fit(module, datamodule=pygdist.GraphDataModule(small_graph(), cache_dir=folder))
    assert trainer.world_size == 2
    return float(trainer.callback_metrics["train_loss"])


_SCRIPT = """
import os, sys, time
import pygdist
from pygdist.loop import Workers

workers = Workers(2)  # with no guard: the script is not run again

def work(worker, seconds):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    time.sleep(seconds)
    return worker.rank

workers.run(work, 0)
print(len(os.listdir(sys.argv[1])), flush=True)
if sys.argv[2] == "is killed":
    workers.run(work, 600)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("end", ["is killed", "ends"])
def test_workers_of_a_script_end_with_it_however_it_ends(end: str, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "pids"), end], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "2\n"
    if end == "is killed":
        time.sleep(0.5)  # the next call has begun
        process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 20
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_workers_end_with_a_process_that_calls_nothing_at_its_exit() -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_hold)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 0


def _hold() -> None:
    held = Workers(1)
    sys.modules[__name__].held = held  # type: ignore[attr-defined]
    assert held.run(_who)[0][:2] == (0, 1)


@pytest.mark.slow
def test_workers_where_there_is_a_gpu_import_everything_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_HAS_FORK_SERVER", False)
    with Workers(2) as workers:
        assert workers.run(_parent) == [os.getpid()] * 2, "no server between"
        assert workers.run(_who)[1][:2] == (1, 2)


def _parent(worker: Worker) -> int:
    return os.getppid()
