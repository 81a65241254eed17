"""Emulated hosts: a command on each, traffic between them that the kernel counts, and nothing left behind."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SEND = """
import os, socket
rank = int(os.environ["RANK"])
if rank == 1:
    with socket.create_server(("", 7000)) as server:
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
elif rank == 0:
    while True:
        try:
            connection = socket.create_connection(("10.77.0.2", 7000))
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.05)
    with connection:
        connection.sendall(bytes(2_000_000))
print("rank", rank, "done")
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("cluster")


@pytest.fixture
def emulated(cluster: ModuleType) -> ModuleType:
    """The same, where hosts can be emulated."""
    if reason := cluster.why_unshaped():
        pytest.skip(reason)
    return cluster


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def namespace(pid: int) -> str:
    return re.sub(r"\D", "", os.readlink(f"/proc/{pid}/ns/net"))


def gone(those: set[str]) -> bool:
    """Whether network namespaces are gone, which takes the kernel a moment."""
    for _ in range(200):
        out = subprocess.run(["lsns", "-t", "net", "-n", "-o", "NS"], capture_output=True, text=True, check=True).stdout
        if not those & set(out.split()):
            return True
        time.sleep(0.05)
    return False


def test_a_command_on_each_host_and_what_crossed_the_links(emulated: ModuleType) -> None:
    with emulated.Cluster(3, rate="1gbit") as cluster:
        inside = {namespace(holder.pid) for holder in cluster._holders}
        assert len(inside - {namespace(os.getpid())}) == 4  # three hosts and the switch
        outcomes = cluster.run(python(SEND), timeout=60)
        assert [outcome.code for outcome in outcomes] == [0, 0, 0], outcomes
        assert outcomes[0].out == "rank 0 done\n"
        sender, receiver, _ = cluster.traffic()
        assert 2_000_000 < sender.sent < 2_200_000
        assert 2_000_000 < receiver.received < 2_200_000
        assert receiver.sent < 200_000
        assert cluster.described == "1000 Mbit/s"
    assert gone(inside)


def test_the_variables_of_torchrun(cluster: ModuleType) -> None:
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MINE')))"
    with cluster.Cluster(2, shaped=False) as local:
        assert local.described == "unshaped"
        outcomes = local.run(python(code), env={"MINE": "7"}, timeout=60)
        with pytest.raises(RuntimeError, match="no links"):
            local.traffic()
    assert [outcome.out for outcome in outcomes] == ["0 2 0 127.0.0.1 7\n", "1 2 0 127.0.0.1 7\n"]


@pytest.mark.slow
def test_codes_and_time_out(cluster: ModuleType) -> None:
    with cluster.Cluster(2, shaped=False) as local:
        outcomes = local.run(python("import os, sys; sys.exit(3 * int(os.environ['RANK']))"), timeout=60)
        assert [outcome.code for outcome in outcomes] == [0, 3]
        waiting = ["sh", "-c", "echo waiting >&2; sleep 4321 & wait"]
        with pytest.raises(TimeoutError, match=r"did not end within 3 s; host 0 said last: \['waiting'\]"):
            local.run(waiting, timeout=3)
    assert _ended("sleep 4321")


def test_signals_end_a_command_as_anywhere(emulated: ModuleType) -> None:
    with emulated.Cluster(1, rate=None) as cluster:
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT):
            (outcome,) = cluster.run(python(f"import os; os.kill(os.getpid(), {int(number)})"), timeout=60)
            assert outcome.code == -number
        (outcome,) = cluster.run(python("import sys; sys.stdout.buffer.write(bytes([200])); sys.exit(3)"), timeout=60)
        assert (outcome.code, outcome.out) == (3, "\ufffd")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind(emulated: ModuleType, how: signal.Signals) -> None:
    mark = f"sleep {1000 + how}"
    command = [sys.executable, str(EXPERIMENTS / "cluster.py"), "--hosts", "2", "--", "sh", "-c", f"{mark} & wait"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=_interruptible) as process:
        for _ in range(600):
            if len(_processes(mark)) == 2:
                break
            time.sleep(0.05)
        else:
            process.kill()
            pytest.fail("the hosts did not come up")
        inside = {namespace(pid) for pid in _processes(mark)}
        process.send_signal(how)
    assert gone(inside)
    assert _ended(mark)


def _interruptible() -> None:
    """Not everybody who starts tests leaves Ctrl-C as it is."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _processes(command: str) -> list[int]:
    """Processes with exactly this command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() == command:
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def _ended(command: str) -> bool:
    """Whether no process has this command line any more, which takes the kernel a moment after it killed them."""
    for _ in range(200):
        if not _processes(command):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("rate", "expected"), [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Gbit", 25 * 10**8)])
def test_rates(cluster: ModuleType, rate: str, expected: int) -> None:
    assert cluster.bits_per_second(rate) == expected


@pytest.mark.parametrize("rate", ["fast", "10", "0bit", "1gb"])
def test_no_rate(cluster: ModuleType, rate: str) -> None:
    with pytest.raises(ValueError, match="expected a rate such as 1gbit"):
        cluster.bits_per_second(rate)


def test_without_root_it_says_why(cluster: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "geteuid", lambda: 1000)
    assert "needs root" in cluster.why_unshaped()
    with cluster.Cluster(2) as local:
        assert not local.shaped
