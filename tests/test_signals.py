"""A signal ends a process in one line with the exit code that shells give it, whatever the main thread does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pygdist import cli, signals

ROOT = Path(__file__).parents[1]
_PATIENCE_S = 120.0  # on a machine that is busy; the programs sleep for longer
COMMAND = """
import os, signal, sys, time
from pygdist import cli, signals
from pygdist.errors import SignalError

try:
    with signals.command():
        print("ready", flush=True)
        {work}
except SignalError as error:
    print(error.message, file=sys.stderr)
    raise
"""
#: A mutex that is locked twice: no signal interrupts the wait.
NATIVE = "import ctypes; mutex = ctypes.create_string_buffer(64); c = ctypes.CDLL(None); "
NATIVE += "signals._LEAVE_S = 1.0; c.pthread_mutex_lock(mutex); c.pthread_mutex_lock(mutex)"


def _begin(code: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a trainer of another test has left, if it failed: it would be one rank of several. Leave nothing."""
    signals.uninstall()
    monkeypatch.setattr(signals, "_state", signals._Handling())
    for name in ("RANK", "LOCAL_RANK", "PYGDIST_PARENT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("work", ["time.sleep(600)", "while True: pass"])
def test_a_signal_ends_a_command_in_one_line(signum: signal.Signals, code: int, work: str) -> None:
    process = _begin(COMMAND.format(work=work), RANK="3")
    process.send_signal(signum)
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert errors == f"{signum.name} reached rank 3 (process {process.pid})\n"
    assert process.returncode == code


def test_a_native_routine_does_not_outlast_a_signal(tmp_path: Path) -> None:
    folder = "from pygdist.memory.scratch import ScratchFolder; from pathlib import Path; "
    folder += f"folder = ScratchFolder(Path({str(tmp_path)!r})); "
    process = _begin(COMMAND.format(work=folder + NATIVE))
    time.sleep(1.0)  # it is in the routine
    assert list(tmp_path.iterdir())
    process.terminate()
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert not list(tmp_path.iterdir()), "its temporary files go with it"
    said = f"pygdist: error: SIGTERM reached process {process.pid}, whose work has not ended within 1 s\n"
    assert (process.returncode, errors) == (143, said)


def test_ctrl_c_waits_until_a_rank_can_handle_it() -> None:
    work = [sys.executable, "-c", COMMAND.format(work="time.sleep(600)")]
    with signals.held():
        process = subprocess.Popen(work, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    process.send_signal(signal.SIGINT)  # Python has not begun yet
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, errors) == (130, f"SIGINT reached process {process.pid}\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_after_a_command_a_signal_ends_the_process_without_a_word(signum: signal.Signals) -> None:
    at_exit = "import atexit, time; atexit.register(lambda: (print('ready', flush=True), time.sleep(600)))\n"
    process = _begin(at_exit + "from pygdist import cli; cli._HELP = ''; cli.program()")
    process.send_signal(signum)
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, errors) == (-signum, "")


DEFERRED = """
        signals.listen(lambda number: print("noted", number, signals.received(), flush=True), defer_s={seconds})
        print("listens", flush=True)
        for _ in range(6000):
            time.sleep(0.1)"""


def _begin_deferred(seconds: float) -> subprocess.Popen[str]:
    process = _begin(COMMAND.format(work=DEFERRED.format(seconds=seconds)))
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    process.terminate()
    return process


def test_whoever_defers_goes_on_and_a_second_signal_ends_the_process() -> None:
    process = _begin_deferred(30.0)
    time.sleep(1.2)
    assert process.poll() is None
    process.terminate()
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, errors) == (143, f"pygdist: error: SIGTERM reached process {process.pid} again\n")


def test_whoever_defers_is_interrupted_in_the_end() -> None:
    process = _begin_deferred(1.5)
    time.sleep(1.0)
    assert process.poll() is None
    out, errors = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, out, errors) == (143, "noted 15 15\n", f"SIGTERM reached process {process.pid}\n")


def test_a_signal_that_comes_while_an_object_is_removed_is_not_lost() -> None:
    """Python prints what a destructor raises, and goes on."""
    work = """
        class Removed:
            def __del__(self):
                for _ in range(20):
                    time.sleep(0.05)
        Removed()
        time.sleep(600)"""
    process = _begin(COMMAND.format(work=work))
    time.sleep(0.3)
    process.terminate()
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, errors) == (143, f"SIGTERM reached process {process.pid}\n")


def test_a_forked_process_has_signals_of_its_own() -> None:
    work = """
        child = os.fork()
        if not child:
            time.sleep(600)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signals.received(), flush=True)"""
    process = _begin(COMMAND.format(work=work))
    out, errors = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, out, errors) == (0, "-15 0\n", "")


def test_the_handlers_of_before_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # after one of notebooks, where Ctrl-C stops a cell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning may have kept ours in another test
    before = signal.getsignal(signal.SIGINT)
    with signals.command():
        ours = signal.getsignal(signal.SIGINT)
        assert ours is not before
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, ours)  # as Lightning does, which has kept it
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(signals, "_LEAVE_S", 0.2)  # who catches the error lives on
        with signals.command(), pytest.raises(SystemExit, match=f"SIGINT reached process {os.getpid()}"):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.5)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("outlives", "said"),
    [("never", "error: process {}, which started rank 1 (process "), ("from the first on", ""),
     ("after it", "process {}, which started rank 1 (process ")],
)  # fmt: skip
def test_a_rank_ends_with_the_process_that_started_it(outlives: str, said: str, tmp_path: Path) -> None:
    outlive = "pygdist.signals.outlive_parent(); "
    child = f"import os, time, pygdist; {outlive if outlives == 'from the first on' else ''}"
    child += f"started = os.getppid(); open({str(tmp_path / 'began')!r}, 'w').close(); "
    if outlives == "after it":  # the run ends by itself
        child += f"[time.sleep(0.1) for _ in range(300) if os.getppid() == started]; time.sleep(2); {outlive}"
    child += f"time.sleep(9); open({str(tmp_path / 'went on')!r}, 'w')"
    code = f"""
import os, subprocess, sys, time
os.environ["PYGDIST_PARENT"], os.environ["LOCAL_RANK"] = str(os.getpid()), "1"
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print("ready", flush=True)
time.sleep(600)
"""
    process = _begin(code)
    deadline = time.monotonic() + _PATIENCE_S
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "began").exists()
    process.kill()
    _, errors = process.communicate(timeout=_PATIENCE_S)  # until the child has closed its end, too
    assert errors.startswith(f"pygdist: {said.format(process.pid)}") if said else errors == ""
    assert errors.endswith("had ended before the run did\n") is (outlives == "after it")
    assert (tmp_path / "went on").exists() is (outlives != "never")


def test_a_rank_ends_if_the_process_that_started_it_is_stopped(tmp_path: Path) -> None:
    child = "import time, pygdist; pygdist.signals.follow_parent(1.0); "
    child += f"open({str(tmp_path / 'began')!r}, 'w').close(); time.sleep(600)"
    code = f"""
import os, subprocess, sys, time
os.environ["PYGDIST_PARENT"], os.environ["LOCAL_RANK"] = str(os.getpid()), "1"
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print("ready", flush=True)
time.sleep(600)
"""
    process = _begin(code)
    deadline = time.monotonic() + _PATIENCE_S
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "began").exists()
    process.send_signal(signal.SIGSTOP)
    _, errors = process.communicate(timeout=_PATIENCE_S)  # until both have closed their ends
    assert process.returncode == -signal.SIGKILL
    assert re.fullmatch(
        f"pygdist: error: process {process.pid}, which started rank 1 .*, was stopped for 6 s; leaving\n", errors
    )


@pytest.mark.parametrize(("variables", "says"), [({"RANK": "1"}, True), ({"RANK": "1", "PYGDIST_PARENT": "1"}, False)])
def test_a_rank_whose_signal_nobody_else_has_heard_of_says_so(
    variables: dict[str, str], says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "_load", lambda command: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setitem(signals._siblings, 7, 1 << 30)  # of another run in this process
    assert cli.main(["fit"]) == 143
    said = capsys.readouterr().err
    assert said.startswith("pygdist: error: SIGTERM reached rank 1") if says else said == "", said


_RANK = """
import sys, time
from pygdist import cli

def works(command, arguments):
    print("ready", flush=True)
    time.sleep(600)

cli._load = lambda command: works
cli.program()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("first", [0, 1])
def test_of_ranks_that_torchrun_ends_one_line_tells_which_had_ended(
    signum: signal.Signals, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun does, this process reaps the rank that has ended, and then sends SIGTERM to the others."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    files = [tmp_path / str(rank) / "error.json" for rank in range(3)]
    for file in files:
        file.parent.mkdir()
    starting = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, "fit"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(file)},
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    for rank in starting:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    ended = starting.pop(first)
    ended.send_signal(signum)
    _, said = ended.communicate(timeout=_PATIENCE_S)
    for rank in starting:
        rank.terminate()
    said += "".join(rank.communicate(timeout=_PATIENCE_S)[1] for rank in starting)
    who = rf"rank {first} \(process {ended.pid}\)"
    after = rf"{who} had ended before torchrun's SIGTERM reached rank \d \(process \d+\)"
    assert re.fullmatch(f"pygdist: error: {after if signum == signal.SIGKILL else f'SIGTERM reached {who}'}\n", said)
    assert {rank.returncode for rank in starting} == {143}


def test_a_rank_whose_starter_has_died_before_ends() -> None:
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    rank = "import time, pygdist; print('ready', flush=True); time.sleep(600)"
    process = _begin(rank, PYGDIST_PARENT=str(starter.pid))
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 1
    assert errors.startswith(f"pygdist: error: process {starter.pid}, which started process {process.pid}, has ended")


def test_the_users_handler_is_called_too() -> None:
    handler = "import signal; signal.signal(signal.SIGTERM, lambda number, _: print('mine', number, flush=True))\n"
    process = _begin(handler + COMMAND.format(work="time.sleep(600)"))
    process.terminate()
    out, errors = process.communicate(timeout=_PATIENCE_S)
    assert (process.returncode, out, errors) == (143, "mine 15\n", f"SIGTERM reached process {process.pid}\n")


def test_an_import_that_hides_the_signal_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(command: str) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise ImportError("numpy cannot be imported") from error

    monkeypatch.setattr(cli, "_load", load)
    assert cli.main(["fit"]) == 143
    said = f"pygdist: error: SIGTERM reached process {os.getpid()} (numpy cannot be imported)\n"
    assert capsys.readouterr().err == said


_ASKS = """
import threading, time
import torch.distributed as dist
from pygdist import cli

def asks(store):
    while True:
        store.check(["a"])

def main():
    store = dist.TCPStore("127.0.0.1", 0, None, True)
    for _ in range(3):
        threading.Thread(target=asks, args=(store,), daemon=True).start()
    time.sleep(0.3)
    print("its last words")
    return 1

cli.main = main
"""


def test_a_failed_run_ends_although_threads_ask_the_store() -> None:
    """Python's own end would abort the process: "terminate called without an active exception"."""
    ends = [sys.executable, "-c", f"{_ASKS}\ncli.program()"]
    run = subprocess.run(ends, capture_output=True, text=True, timeout=_PATIENCE_S)
    assert (run.returncode, run.stdout, run.stderr) == (1, "its last words\n", "")
