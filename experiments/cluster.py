"""Emulates several hosts on one Linux machine, joined by links of limited rate.

    sudo python experiments/cluster.py --hosts 4 --rate 1gbit -- pygdist fit --config run.yaml --trainer.num_nodes=4

Every host is a network namespace with one interface, ``eth0``. A bridge in another namespace joins the hosts, and a
token bucket limits both directions of every link. The command runs once on each host, with the variables that torchrun
sets (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ...). The namespaces have no names and live as long as the processes
that hold them. The kernel kills these when the thread that made them ends, however it ends. Each command runs in its
own process namespace, so all its processes end with it.

This needs root and iproute2 on Linux. Elsewhere the same command runs as plain local processes, and every figure must
be called *unshaped*. These are killed with the command, unless this program itself is killed by SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Cluster", "LinkBytes", "Outcome", "run", "why_unshaped"]

INTERFACE = "eth0"
_NETWORK = "10.77.0"
_MOST_HOSTS = 250
# A packet that waits longer for its link is dropped. This is long enough for the packets of three senders: if packets
# are lost, an exchange of half a second measures how TCP recovers, not the link.
_QUEUE_MS = 100
# Every kernel has Reno, so hosts are the same everywhere. BBR, some kernels' default, shares a link slowly: in short
# exchanges among 4 hosts it used two thirds of a link, Reno nine tenths.
_CONGESTION_CONTROL = "reno"
_BURST_MS = 2  # size of the bucket, in time at the link's rate, at least _LEAST_BURST bytes
_LEAST_BURST = 1 << 17
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # before any fork, as little may be done after
_TOOLS = ("ip", "tc", "nsenter", "unshare")


@dataclass(frozen=True)
class Outcome:
    """The end of the process on one host.

    Attributes:
        host: Number of the host.
        code: Exit code; negative if a signal ended the process.
        out: Standard output.
        err: Standard error.
        waited: True if it was still running after another had failed, and was killed for that.
    """

    host: int
    code: int
    out: str
    err: str
    waited: bool = False


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that the kernel counted on the link of one host, with TCP/IP and Ethernet headers."""

    sent: int
    received: int


def why_unshaped() -> str | None:
    """Return the reason why hosts cannot be emulated here, in one line; ``None`` if they can. Tried once."""
    if sys.platform != "linux":
        return f"network namespaces exist on Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root: sudo, or a container with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is missing: apt install iproute2 util-linux (cluster.py --install does so)"
    return _refused()


@functools.cache
def _refused() -> str | None:
    """Try to make a namespace with a link and a token bucket; return the kernel's complaint, if any."""
    link = "ip link add br0 type bridge && ip link add port0 type veth peer name port1"
    bucket = "tc qdisc add dev port0 root tbf rate 1mbit burst 10kb latency 50ms"
    command = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", f"{link} && {bucket}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"the kernel refuses: {' '.join(done.stderr.split())}" if done.returncode else None


class Cluster:
    """Emulated hosts that exist during a ``with`` block. The thread that enters the block must outlive it.

    Args:
        hosts: Number of hosts.
        rate: Rate of each direction of each link, such as ``1gbit`` or ``100mbit``; ``None`` for no limit.
        shaped: ``False`` runs commands as plain local processes. Default: only if hosts cannot be emulated.

    Attributes:
        hosts: Number of hosts.
        rate: Bits per second of a link; ``None`` without a limit.
        shaped: True if there are emulated hosts with links.

    Raises:
        ValueError: If an argument makes no sense.
        OSError: If the kernel refuses a namespace or a link.

    Example:
        >>> with Cluster(4, rate="1gbit") as cluster:
        ...     outcomes = cluster.run([sys.executable, "train.py"])
        ...     print(cluster.traffic())
    """

    def __init__(self, hosts: int, *, rate: str | None = "1gbit", shaped: bool | None = None) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise ValueError(f"hosts: expected 1 to {_MOST_HOSTS}, got {hosts}")
        self.hosts = hosts
        self.rate = None if rate is None else bits_per_second(rate)
        self.shaped = why_unshaped() is None if shaped is None else shaped
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        if self.shaped:
            try:
                self._build()
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def described(self) -> str:
        """The rate of the links, as tables show it; ``unshaped`` if there are none."""
        if not self.shaped:
            return "unshaped"
        return "no limit" if self.rate is None else f"{self.rate / 1e6:g} Mbit/s"

    def address(self, host: int) -> str:
        """Return the address of a host inside the cluster."""
        return f"{_NETWORK}.{host + 1}" if self.shaped else "127.0.0.1"

    def cut(self, host: int) -> None:
        """Take the link of a host down: what is under way is lost, and no side is told."""
        _ip(self._holders[host + 1].pid, f"link set {INTERFACE} down")

    def mend(self, host: int) -> None:
        """Bring the link of a host up again."""
        _ip(self._holders[host + 1].pid, f"link set {INTERFACE} up")

    def kill(self, host: int) -> None:
        """Kill all processes that run on a host, at once, as if it lost its power."""
        holder = self._holders[host + 1]
        inside = os.readlink(f"/proc/{holder.pid}/ns/net")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if int(folder.name) != holder.pid and os.readlink(folder / "ns" / "net") == inside:
                    os.kill(int(folder.name), signal.SIGKILL)

    def traffic(self) -> list[LinkBytes]:
        """Return the bytes that crossed each host's link since the cluster was made.

        Raises:
            RuntimeError: If there are no links.
        """
        if not self.shaped:
            raise RuntimeError("local processes have no links to count on")
        links = []
        for holder in self._holders[1:]:
            for line in Path(f"/proc/{holder.pid}/net/dev").read_text().splitlines():
                name, _, counters = line.partition(":")
                if name.strip() == INTERFACE:
                    fields = counters.split()
                    links.append(LinkBytes(sent=int(fields[8]), received=int(fields[0])))
        return links

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        threads: int = 1,
        timeout: float | None = None,
        grace_s: float = 10.0,
        show: bool = False,
    ) -> list[Outcome]:
        """Run a command once on each host and wait until all have ended.

        Args:
            command: The program and its arguments.
            env: Environment variables beside those of this process.
            threads: ``OMP_NUM_THREADS`` of each process.
            timeout: Seconds until all are killed.
            grace_s: Seconds that the others get to end by themselves, if one fails.
            show: Let host 0 write to this terminal; its outcome then holds no text.

        Returns:
            One outcome per host.

        Raises:
            TimeoutError: If they did not end in time; all are killed by then.
        """
        port = _free_port()
        with contextlib.ExitStack() as stack:
            files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in range(self.hosts)]
            processes: list[subprocess.Popen[bytes]] = []
            stack.callback(lambda: _kill(processes))
            for host, (out, err) in enumerate(files):
                variables = {**os.environ, **self._variables(host, port, threads), **(env or {})}
                pipes = {} if show and host == 0 else {"stdout": out, "stderr": err}
                processes.append(
                    _started([*self._enter(host), *command], env=variables, start_new_session=True, **pipes)
                )
            in_time = _wait(processes, timeout, grace_s)
            waited = [process.poll() is None for process in processes]
            _kill(processes)
            ended, processes[:] = list(processes), []  # the system may reuse their process ids
            outcomes = []
            for host, (process, (out, err)) in enumerate(zip(ended, files, strict=True)):
                said = []
                for file in (out, err):
                    file.seek(0)
                    said.append(file.read().decode(errors="replace"))
                code = process.wait()
                code = 128 - code if self.shaped and code > 128 else code  # a shell reports signal n as 128 + n
                outcomes.append(Outcome(host, code, said[0], said[1], waited[host]))
        if not in_time:
            last = outcomes[0].err.strip().splitlines()[-1:]
            raise TimeoutError(f"{command[0]}: did not end within {timeout} s; host 0 said last: {last}")
        return outcomes

    def _variables(self, host: int, port: int, threads: int) -> dict[str, str]:
        """Return torchrun's variables. Each local process also counts as a host, so one command suits both cases."""
        variables = {
            "RANK": host, "WORLD_SIZE": self.hosts, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": host,
            "NODE_RANK": host, "MASTER_ADDR": self.address(0), "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "cluster",
            "OMP_NUM_THREADS": threads,
        }  # fmt: skip
        if self.shaped:
            variables["GLOO_SOCKET_IFNAME"] = INTERFACE
        return {name: str(value) for name, value in variables.items()}

    def _enter(self, host: int) -> list[str]:
        """Return the prefix that runs a command on a host, so that all its processes end with the first one."""
        if not self.shaped:
            return []
        inside = ["nsenter", f"--net=/proc/{self._holders[host + 1].pid}/ns/net", "--"]
        # a shell comes first, since the first process of a namespace ignores signals that it has no handler for
        first = ["sh", "-c", '"$@"; exit $?', "host"]
        return [*inside, "unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--", *first]

    def _build(self) -> None:
        """Make namespaces, links, bridge and buckets. Holder 0 holds the namespace of the switch."""
        for _ in range(self.hosts + 1):
            self._holders.append(
                _started(
                    ["unshare", "--net", "--", "sh", "-c", "echo; exec sleep infinity"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                )
            )
            holder = self._holders[-1]
            assert holder.stdout is not None
            if holder.stdout.readline() != b"\n":
                raise OSError("the kernel refuses a network namespace (unshare --net)")
        switch = self._holders[0].pid
        _ip(switch, "link add br0 type bridge", "link set br0 up")
        for host, holder in enumerate(self._holders[1:]):
            port = f"port{host}"
            _ip(switch, f"link add {port} type veth peer name {INTERFACE} netns {holder.pid}")
            _ip(switch, f"link set {port} master br0 up")
            _ip(holder.pid, f"address add {self.address(host)}/24 dev {INTERFACE}", f"link set {INTERFACE} up")
            _ip(holder.pid, "link set lo up")
            _ip(holder.pid, f"route replace {_NETWORK}.0/24 dev {INTERFACE} congctl {_CONGESTION_CONTROL}")
            if self.rate is not None:
                for pid, device in ((switch, port), (holder.pid, INTERFACE)):
                    _shape(pid, device, self.rate)

    def _end(self) -> None:
        _kill(self._holders)
        self._holders = []


def run(
    command: Sequence[str], *, hosts: int, rate: str | None = "1gbit", timeout: float | None = None
) -> list[Outcome]:
    """Make a cluster, run a command once on each host, and take the cluster down."""
    with Cluster(hosts, rate=rate) as cluster:
        return cluster.run(command, timeout=timeout)


def bits_per_second(rate: str) -> int:
    """Convert a rate as tc takes it, such as ``100mbit``.

    Raises:
        ValueError: If ``rate`` is not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.strip().lower())
    if not match or float(match[1]) == 0:
        raise ValueError(f"rate: expected a rate such as 1gbit or 100mbit, got {rate!r}")
    return round(float(match[1]) * _UNITS[match[2]])


def _started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that the kernel kills when the calling thread ends."""
    if _PRCTL is None:  # not Linux
        return subprocess.Popen(command, **options)
    parent = os.getpid()

    def die_with_parent() -> None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before this call
            os._exit(1)

    return subprocess.Popen(command, preexec_fn=die_with_parent, **options)


def _shape(pid: int, device: str, rate: int) -> None:
    burst = max(_LEAST_BURST, rate // 8 * _BURST_MS // 1000)
    _in(pid, ["tc", *f"qdisc add dev {device} root tbf rate {rate}bit burst {burst} latency {_QUEUE_MS}ms".split()])


def _ip(pid: int, *lines: str) -> None:
    for line in lines:
        _in(pid, ["ip", *line.split()])


def _in(pid: int, command: list[str]) -> None:
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float | None, grace_s: float) -> bool:
    """Wait until all have ended, or for a while after one failed. Return False if the time ran out."""
    end = None if timeout is None else time.monotonic() + timeout
    failed_at = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if end is not None and now > end:
            return False
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + grace_s:
            return True
        time.sleep(0.02)
    return True


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes and all others of their sessions."""
    for process in processes:
        process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the session does not exist, or has ended
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _install() -> None:
    """Install iproute2 and util-linux, as the user asked."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        print("--install needs root and apt-get", file=sys.stderr)
        raise SystemExit(2)
    for words in (["update"], ["install", "-y", "iproute2", "util-linux"]):
        if code := subprocess.run(["apt-get", *words], check=False).returncode:
            print(f"--install: apt-get {words[0]} ended with exit code {code}", file=sys.stderr)
            raise SystemExit(2)


def main() -> int:
    """Run the command line; return the exit code of the first host that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default: 2)")
    parser.add_argument(
        "--rate", default="1gbit", help="rate of each direction of each link (default: 1gbit); none for no limit"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (default: 1)")
    parser.add_argument("--timeout", type=float, help="seconds until the command is killed")
    parser.add_argument("--install", action="store_true", help="install iproute2 with apt-get if it is missing")
    parser.add_argument("command", nargs="+", help="the command to run on each host, after --")
    options = parser.parse_args()
    if options.install and any(shutil.which(tool) is None for tool in _TOOLS):
        _install()
    if reason := why_unshaped():
        print(f"unshaped: {reason}", file=sys.stderr)
    try:
        made = Cluster(options.hosts, rate=None if options.rate == "none" else options.rate)
    except ValueError as error:
        parser.error(str(error))
    for number in (signal.SIGTERM, signal.SIGHUP):  # exit normally: without links, nothing else ends the processes
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    with made as cluster:
        try:
            outcomes = cluster.run(options.command, threads=options.threads, timeout=options.timeout, show=True)
        except TimeoutError as error:
            print(error, file=sys.stderr)
            return 1
        for outcome in outcomes:
            if outcome.code:
                print(f"host {outcome.host} ended with {outcome.code}\n{outcome.err}", file=sys.stderr)
        if cluster.shaped:
            for host, link in enumerate(cluster.traffic()):
                print(f"host {host}: {link.sent:,} bytes sent, {link.received:,} received", file=sys.stderr)
    codes = [outcome.code for outcome in outcomes]
    return next((code for code in codes if code > 0), max(abs(code) for code in codes))


if __name__ == "__main__":
    raise SystemExit(main())
