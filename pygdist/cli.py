"""The ``pygdist`` command: Lightning's ``fit``, ``validate``, ``test`` and ``predict``, and tools for graphs in parts.

Only the command that runs is imported, so that help and mistakes take no time.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from pygdist import signals
from pygdist.errors import InputError, LostRankError, RefusedError, SignalError, did_you_mean, is_first_rank
from pygdist.memory.limits import refusal_of
from pygdist.memory.scratch import ScratchFolder, is_scratch

_HELP = """\
Train unmodified PyTorch Geometric models on graphs that are split across processes.

usage: pygdist COMMAND [options]

Graphs:
  generate    write a synthetic graph like Reddit, ogbn-products, ogbn-papers100M or ogbn-mag, at any scale
  partition   split a graph into parts, one for each process
  check       read all files of a partitioned graph, and name one that is damaged
  info        say what a partitioned graph or a checkpoint holds

Models:
  fit         train a model
  validate    evaluate a model on the validation nodes or edges
  test        evaluate a model on the test nodes or edges
  predict     write a prediction for every node to a .npy file
  export      write the model of a checkpoint as plain PyTorch weights

Machine:
  doctor      say what this machine has, and how fast its processes exchange rows

Results:
  verify      check that a training step on several processes gives the numbers of one process
  report      make one HTML page of tables and plots from a folder of results

Options:
  -h, --help  show this help; pygdist COMMAND --help lists the options of a command
  --version   show the version, also after a command

Examples:
  pygdist fit --config run.yaml --trainer.devices=4
  pygdist fit --config run.yaml --print_config       print every option with its value, as YAML
  pygdist partition --dataset=reddit-like --parts=4

A configuration names classes, which are imported and run: use only those that you would run as a script.
"""

_LONGEST_PLACE = 56  # names of sockets in a folder of multiprocessing, in ours, have at most 107 characters
_folders: list[ScratchFolder] = []  # they go with the process, after all that has files in them
_LONGEST = 660

_COMMANDS = {
    **dict.fromkeys(("fit", "validate", "test", "predict"), "train"),
    **{name: name for name in ("generate", "partition", "check", "info", "doctor", "verify", "export", "report")},
}


def program() -> int:
    """Run the command line as a process of its own, which a signal ends without a word once the command has ended."""
    try:
        code = main()
    finally:
        signals.default()
    if code:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End this process without Python's own end: it would abort where a thread of a failed run still asks the store."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or file
            stream.flush()
    signals.exit_now(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0 after success, 1 if the run failed or numbers differ, 2 after a mistake in the input or if
        the machine refuses what the command needs, which one line on standard error explains, 143 after SIGTERM, 130
        after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        here = os.getcwd()
    except OSError as error:
        _complain(f"the current folder: {error.strerror}; change to a folder that is there")
        return 2
    if here not in sys.path:
        sys.path.insert(0, here)  # so that YAML can name the user's own classes, as under "python -m"
    command, *rest = arguments or ["--help"]
    try:
        with signals.command():
            try:
                return _run(command, rest)
            except Exception as error:
                if not (signum := signals.received()):
                    raise
                raise SignalError(f"{signals.reason()} ({error})", signum) from error
    except SignalError as error:
        return _ended(error)


def _run(command: str, rest: list[str]) -> int:
    try:
        if command in ("-h", "--help", "help"):
            sys.stdout.write(_HELP)
            sys.stdout.flush()
            return 0
        if command == "--version" or (command in _COMMANDS and "--version" in rest):
            sys.stdout.write(f"pygdist {importlib.import_module('pygdist').__version__}\n")
            return 0
        with _scratch(), _threads() as of_threads:
            run = _load(command)
            logging.basicConfig(level=logging.INFO, format="%(message)s")  # before Lightning is imported, it would echo
            code = run(command, rest)
            sys.stdout.flush()  # while what a full disk says can still be told
            if of_threads:
                raise of_threads[0]
            return code
    except InputError as error:
        if error.of_one_rank or is_first_rank():
            _complain(str(error))
        return 2
    except LostRankError as error:
        _, _, refusal = str(error).partition(f"{RefusedError.__name__}: ")
        if not refusal:
            _complain(str(error))
        return 2 if refusal else 1  # the rank that was refused something has said so
    except SignalError:
        raise
    except Exception as error:
        if signals.received():  # which a library took for a failure of its own
            raise
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes the stream once more as it ends
            return 128 + signal.SIGPIPE
        if (refused := refusal_of(error)) is not None:
            _complain(str(refused))
            return 2
        if not isinstance(error, OSError) or not _is_named(error, rest):
            raise
        if is_first_rank():
            _complain(f"{str(error.filename)[:200]}: {error.strerror}; name another file or folder")
        return 2
    except SystemExit as leaving:  # after --help and --print_config
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def _open_streams() -> None:
    """Open a standard stream that is closed, so that no file of ours gets its number, to which libraries print."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free: this one
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process


def _nobody_reads() -> bool:
    """Tell if standard output is a pipe whose reader has gone, as that of ``pygdist --help | head -1``."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _ended(error: SignalError) -> int:
    message = signals.first_told(error.message)
    concerns = is_first_rank() or signals.only_here() or signals.ended_before()  # the first rank may have ended
    if concerns and signals.has_the_word():
        _complain(message)
    return 128 + error.signum


def _load(command: str) -> Callable[[str, list[str]], int]:
    """Return the function that runs a command, given its name and arguments."""
    if command not in _COMMANDS:
        hint = did_you_mean(command, _COMMANDS) or "."
        raise InputError(f"unknown command '{command}'{hint} The commands are {', '.join(_COMMANDS)}")
    if _COMMANDS[command] in ("train", "verify"):  # these import Lightning
        variables = importlib.import_module("pygdist.launch_variables")
        variables.check_launch(os.environ)
        variables.check_libraries(os.environ)
    try:
        run: Callable[[str, list[str]], int] = importlib.import_module(f"pygdist.commands.{_COMMANDS[command]}").run
    except (ValueError, RuntimeError) as error:  # torch refuses variables of the environment so
        if signals.received():
            raise
        raise InputError(f"pygdist {command} cannot be imported: {error}; look at the environment variables") from error
    return run


@contextlib.contextmanager
def _scratch() -> Iterator[None]:
    """Let temporary files of this process, and of those that it starts, go with it; libraries leave some behind."""
    before, folder = (tempfile.tempdir, os.environ.get("TMPDIR")), _new_folder()
    if folder is None:
        yield
        return
    _folders.append(folder)
    # compiled models are kept for the next run
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder.path.parent}/torchinductor_{os.getuid()}")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder.path)
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        del os.environ["TMPDIR"]
        os.environ |= {} if before[1] is None else {"TMPDIR": before[1]}


def _new_folder() -> ScratchFolder | None:
    """Return a folder of this process; ``None`` in a rank that another command started, which has one."""
    try:
        place = tempfile.gettempdir()
        return None if is_scratch(place) or len(place) > _LONGEST_PLACE else ScratchFolder()
    except OSError:  # there is no room: a command that needs some says so
        return None


@contextlib.contextmanager
def _threads() -> Iterator[list[RefusedError]]:
    """Yield the list of what the machine refuses to other threads, which would each print a traceback."""
    refused: list[RefusedError] = []
    before = threading.excepthook

    def note(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None and (refusal := refusal_of(failure.exc_value)) is not None:
            refused.append(refusal)
        else:
            before(failure)

    threading.excepthook = note
    try:
        yield refused
    finally:
        threading.excepthook = before


def _is_named(error: OSError, arguments: list[str]) -> bool:
    """Tell if an error of the system is about a file that the command line names, or one in a folder that it names."""
    values = [argument.partition("=")[2] or argument for argument in arguments]
    return isinstance(error.filename, str) and any(value and value in error.filename for value in values)


def _complain(message: str) -> None:
    signals.has_the_word()  # whom torchrun ends for this has nothing to add
    line = " ".join(message.split())
    if len(line) > _LONGEST:  # an option of thousands of characters, say; advice is at the end
        line = f"{line[: _LONGEST - 200]} … {line[-200:]}"
    sys.stderr.write(f"pygdist: error: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(program())
