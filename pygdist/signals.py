"""SIGTERM and SIGINT end a run: noted at once, in one line, with exit code 143 or 130.

Python runs a signal's handler only between two steps of the main thread, which may wait for other ranks, or work in a
native routine, for minutes. A thread therefore learns of a signal as it arrives: it tells a listener (the watchdog, so
that the other ranks hear of it), and ends the process if the main thread cannot.

The process that starts ranks names itself to them; a rank whose starter has died ends too (:func:`follow_parent`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pygdist.errors import SignalError

PARENT = "PYGDIST_PARENT"
"""Environment variable: the process that started this rank."""

_ENDING = (signal.SIGTERM, signal.SIGINT)
_LEAVE_S = 15.0  # the main thread has this long to end the process
_AGAIN_S = 1.0  # a signal that comes later than this after the first one ends the process at once
_POLL_S = 0.5
_SOON_S = 0.05
_FROZEN_S = 20.0  # for which the starter is stopped, if nobody says otherwise
_ORPHAN_S = 5.0  # within which a rank whose starter died finds by itself that the exchange fails, and says more


@dataclass(eq=False)
class _Handling:
    """The signals of this process from one :func:`install` to the next."""

    installed: bool = False
    in_command: bool = False
    before: dict[int, Any] = field(default_factory=dict)  # the handlers that ours replaced
    fds: tuple[int, int] = (-1, -1)
    listener: Callable[[int], None] | None = None
    defer_s: float = 0.0
    received: int = 0
    raised: bool = False
    told: bool = False  # the user's handler
    heard: bool = False  # by the other ranks
    cause: str = ""  # the signal that another rank told of before
    ended_before: str | None = None  # ranks that had ended before, in words, once that was looked up
    asked: threading.Event = field(default_factory=threading.Event)  # set when the cause is known
    interrupt_at: float = 0.0  # when a thread does so, unless the main thread has left before
    end_at: float = 0.0
    expected: int = 0  # signals that this process sends itself
    left: threading.Event = field(default_factory=threading.Event)


_state = _Handling()
_parent_watch: tuple[threading.Event, int] | None = None  # set, it ends the thread that watches this process
_frozen_s = _FROZEN_S
_last: list[Callable[[], object]] = []
_siblings: dict[int, int] = {}  # processes that torchrun started beside this one, by rank


def received() -> int:
    """Return the number of the signal that this process has received, or 0."""
    return _state.received


def only_here() -> bool:
    """Tell if a signal reached this rank and no other process of ours has heard of it, as ranks had not met yet."""
    return bool(_state.received) and not _state.heard and not os.environ.get(PARENT)


def note_cause(text: str) -> None:
    """Note, from a listener, the signal that another rank told of before this process got its own; empty if none."""
    _state.cause = text
    _state.asked.set()


def first_told(message: str) -> str:
    """Return what to say of a signal that ends this rank: ``message``, or what reached another rank before.

    ``torchrun`` sends SIGTERM to all ranks when one ends, whatever ended that one.
    """
    if _state.heard:
        _state.asked.wait(_AGAIN_S)
    return _state.cause if _state.cause and message == reason() else message


def reason() -> str:
    """Say whom the signal has reached, or why ``torchrun`` has sent it."""
    return ended_before() or _reached(_state.received)


def ended_before() -> str:
    """Say which ranks had ended before ``torchrun``'s SIGTERM reached this one; empty if none, as after other signals.

    ``torchrun`` sends it to the others when one has ended, whose process is no longer there then, not even as a zombie.
    """
    if _state.ended_before is None and _state.received:
        sought = _siblings if _state.received == signal.SIGTERM else {}
        gone = ", ".join(f"rank {rank} (process {pid})" for rank, pid in sorted(sought.items()) if not _lives(pid))
        _state.ended_before = f"{gone} had ended before torchrun's SIGTERM reached {_who()}" if gone else ""
    return _state.ended_before or ""


def has_the_word() -> bool:
    """Tell if no other rank that ``torchrun`` started here has said why the run ends; from now on this one has.

    An empty file tells the others, in ``torchrun``'s folder of temporary files, which stays behind without it too.
    """
    with contextlib.suppress(KeyError, IndexError, FileNotFoundError, PermissionError):
        folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]  # of this start of the ranks
        try:
            (folder / "a-rank-has-said-why").touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _reached(signum: int) -> str:
    return f"{name_of(signum)} reached {_who()}"


def name_of(signum: int) -> str:
    """Return the name of a signal, such as ``SIGTERM``."""
    return signal.Signals(signum).name


def signal_of(exit_code: int) -> int:
    """Return the signal that an exit code tells of, if one of ours ended the process; otherwise 0."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return number if number in _ENDING else 0


def listen(listener: Callable[[int], None] | None, *, defer_s: float = 0.0) -> None:
    """Call a function, from a thread, as soon as a signal ends this process.

    Args:
        listener: The function; it gets the signal's number.
        defer_s: The main thread has so many seconds to ask for :func:`received` and to leave by itself; only then the
            signal interrupts it.
    """
    _state.listener, _state.defer_s = listener, defer_s


@contextlib.contextmanager
def command() -> Iterator[None]:
    """Handle signals within the block, a command of ours that tells the user of a :class:`SignalError` by itself."""
    installed = install()
    _state.in_command = installed
    try:
        release()
        yield
    finally:
        if installed:
            _state.in_command = False
            uninstall()


def in_command() -> bool:
    """Tell if this process runs a command of ours."""
    return _state.in_command


def install() -> bool:
    """Handle SIGTERM and SIGINT from now on.

    Returns:
        ``False`` if they are handled already, or cannot be, as this is not the main thread.
    """
    global _state
    if _state.installed or threading.current_thread() is not threading.main_thread():
        return False
    _state = _Handling(installed=True, before=_state.before)
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules  # where Ctrl-C stops a cell, not the process
    for number in _ENDING[: 1 if interactive else 2]:
        before = signal.getsignal(number)
        if before not in (signal.SIG_IGN, None):  # as under nohup, or one in C that could not be put back
            signal.signal(number, _on_signal)
            if before is not _on_signal:
                _state.before[number] = before
    forget_siblings()  # of another run in this process
    siblings()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    other = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if other != -1:  # an event loop needs it; signals are then noted when the main thread runs
        signal.set_wakeup_fd(other)
    _state.fds = reading, writing
    threading.Thread(target=_read, args=(_state, reading), daemon=True, name="pygdist-signals").start()
    return True


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let Ctrl-C wait in the processes that the block starts, until they call :func:`release`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release() -> None:
    """Take a Ctrl-C that came while this process could not handle it, as Python had not started yet."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def postpone_end(seconds: float) -> None:
    """Give the main thread so much time from now on to leave after a signal; no less than it has."""
    later = time.monotonic() + seconds
    _state.interrupt_at, _state.end_at = max(_state.interrupt_at, later), max(_state.end_at, later + _LEAVE_S)


def uninstall() -> None:
    """Put the handlers of before back."""
    if not _state.installed:
        return
    fds, _state.fds, _state.installed = _state.fds, (-1, -1), False
    _state.left.set()
    for number, handler in _state.before.items():
        signal.signal(number, handler)
    _state.listener, _state.defer_s = None, 0.0
    if fds[1] != -1:
        if (current := signal.set_wakeup_fd(-1)) not in (-1, fds[1]):
            signal.set_wakeup_fd(current)
        os.close(fds[1])  # the thread ends


def default() -> None:
    """Let the system end this process at a signal: there is no work to lose any more, and nothing to say."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if not _state.installed:  # Lightning has put this handler back, after ours were uninstalled
        before = _state.before.get(signum, signal.SIG_DFL)
        if callable(before):
            before(signum, frame)
            return
        signal.signal(signum, before)
        signal.raise_signal(signum)
        return
    first = _state.received in (0, signum) and not _state.raised
    _state.received = _state.received or signum
    before = _state.before.get(signum)
    if first and not _state.told and callable(before) and before is not signal.default_int_handler:
        _state.told = True
        before(signum, frame)  # the user's
    if not first or _state.defer_s:
        return
    if _in_destructor(frame):
        _interrupt_again(_state, signum)
        return
    _state.raised = True
    raise SignalError(reason(), signum)


def _in_destructor(frame: FrameType | None) -> bool:
    """Tell if an error would be lost: Python prints what a destructor raises, and goes on."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _interrupt_again(state: _Handling, signum: int) -> None:
    """Send the signal to the main thread once more, in a moment."""

    def send() -> None:
        if not state.left.wait(_SOON_S):
            state.expected += 1
            signal.pthread_kill(threading.main_thread().ident or 0, signum)

    threading.Thread(target=send, daemon=True, name="pygdist-again").start()


def _read(state: _Handling, fd: int) -> None:
    """Note signals as they arrive; ends when the pipe is closed."""
    began = 0.0
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while numbers := pipe.read(1):
            signum = numbers[0]
            if signum not in _ENDING:
                continue
            if state.expected:
                state.expected -= 1
                continue
            if began and time.monotonic() - began > _AGAIN_S:
                end(signum, f"{name_of(signum)} reached {_who()} again")
            if began:
                continue
            began = time.monotonic()
            state.received = state.received or signum
            state.interrupt_at = began + state.defer_s
            state.end_at = state.interrupt_at + _LEAVE_S
            if not state.defer_s and state.listener is not None:
                state.heard = True
                state.listener(signum)
            arguments = state, signum, began
            threading.Thread(target=_see_to_the_end, args=arguments, daemon=True, name="pygdist-end").start()


def _see_to_the_end(state: _Handling, signum: int, began: float) -> None:
    """Interrupt the main thread if it was to leave by itself and has not, and end the process if it still is there."""
    while (rest_s := state.interrupt_at - time.monotonic()) > 0:
        if state.left.wait(rest_s):
            return
    if state.defer_s:
        state.defer_s, state.expected = 0.0, 1
        if state.listener is not None:
            state.heard = True
            state.listener(signum)
        signal.pthread_kill(threading.main_thread().ident or 0, signum)
    while (rest_s := state.end_at - time.monotonic()) > 0:
        if state.left.wait(rest_s):
            return
    end(signum, f"{name_of(signum)} reached {_who()}, whose work has not ended within {time.monotonic() - began:.0f} s")


def end(signum: int, text: str = "") -> NoReturn:
    """End this process at once, after one line on standard error."""
    if text and has_the_word():
        sys.stderr.write(f"pygdist: error: {text}\n")
        sys.stderr.flush()
    exit_now(128 + signum)


def before_exit(function: Callable[[], object]) -> None:
    """Call a function before :func:`exit_now` ends the process, which no other function of Python's hears of."""
    _last.append(function)


def exit_now(code: int) -> NoReturn:
    """End this process from any thread, whatever the others wait for."""
    for function in _last:
        with contextlib.suppress(Exception):
            function()
    os._exit(code)


def _who() -> str:
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
    return f"process {os.getpid()}" if rank is None else f"rank {rank} (process {os.getpid()})"


def _forget() -> None:
    """Forget the parent's handlers, pipe and threads in a forked process."""
    global _state, _parent_watch
    if _state.installed:
        for number in _state.before:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        for fd in _state.fds:
            os.close(fd)
    _state, _parent_watch = _Handling(), None
    _siblings.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# -- the process that started this one ---------------------------------------------------------------------------------


def parent() -> int:
    """Return the process that started this rank, if pygdist or ``torchrun`` did; otherwise 0."""
    named = os.environ.get(PARENT, "")
    if named.isdigit() and int(named) != os.getpid():
        return int(named)
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0


def siblings() -> dict[int, int]:
    """Return the processes that ``torchrun`` started beside this one, by rank, and those seen before that have ended.

    There are none where they cannot be seen.
    """
    agent = parent()
    for folder in Path("/proc").glob("[0-9]*") if agent else ():
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == agent:
                names = dict(one.partition("=")[::2] for one in (folder / "environ").read_text().split("\0"))
                _siblings[int(names["RANK"])] = int(folder.name)
        except (OSError, KeyError, ValueError, IndexError):  # it has ended, or is no rank
            continue
    return dict(_siblings)


def forget_siblings() -> None:
    """Forget the ranks beside this one: the run has ended, and they may end too."""
    _siblings.clear()


def follow_parent(lost_after_s: float = _FROZEN_S) -> None:
    """End this process after the one that started it as a rank, until :func:`outlive_parent`.

    Ranks do so from their first import of ``pygdist`` on, and in each run.

    Args:
        lost_after_s: A starter that is stopped (SIGSTOP) for more than this, and the few seconds in which the rank may
            find more to say, is killed, and the rank ends. If the starter has died, the rank ends within seconds.
    """
    global _parent_watch, _frozen_s
    starter, _frozen_s = parent(), lost_after_s
    if starter and (starter == os.getppid() or not _lives(starter)) and _parent_watch is None:
        stop = threading.Event()
        _parent_watch = stop, starter
        threading.Thread(target=_watch_parent, args=(starter, stop), daemon=True, name="pygdist-parent").start()


def outlive_parent() -> None:
    """Go on although the process that started this rank may end: the rank's run has ended."""
    global _parent_watch
    if _parent_watch is not None:
        stop, starter = _parent_watch
        if os.getppid() != starter:
            sys.stderr.write(f"pygdist: process {starter}, which started {_who()}, had ended before the run did\n")
        stop.set()
        _parent_watch = None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _watch_parent(starter: int, stop: threading.Event) -> None:
    polls = 0  # in which the starter was stopped, and this process was not
    while os.getppid() == starter:
        polls = polls + 1 if _is_stopped(starter) else 0
        if polls * _POLL_S > _frozen_s + _ORPHAN_S:
            with contextlib.suppress(OSError):
                os.kill(starter, signal.SIGKILL)  # it would stay behind
            _leave_alone(f"was stopped for {polls * _POLL_S:.0f} s", starter)
        if stop.wait(_POLL_S):
            return
    if not stop.wait(_ORPHAN_S):
        _leave_alone("has ended", starter)


def _leave_alone(fate: str, starter: int) -> NoReturn:
    sys.stderr.write(f"pygdist: error: process {starter}, which started {_who()}, {fate}; leaving\n")
    sys.stderr.flush()
    exit_now(1)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):  # it has ended, or this system does not tell
        return False
