"""The ``pygdist`` command: Lightning's ``fit``, ``validate``, ``test``, ``predict``, and tools for graphs in parts."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence

from pygdist.errors import InputError, LostRankError

__all__ = ["main"]

_HELP = """\
usage: pygdist COMMAND [options]

Train unmodified PyTorch Geometric models on a graph in parts.

  fit         train a model          pygdist fit --config run.yaml --trainer.devices=4
  validate    evaluate on the validation nodes
  test        evaluate on the test nodes
  predict     write a prediction for every node of the graph to a .npy file
  generate    write a graph like Reddit, ogbn-products, ogbn-papers100M or ogbn-mag, at any scale
  partition   partition a graph and write the parts
  verify      compare one training step on N processes with one process, number by number
  export      write the plain model of a checkpoint, loadable without pygdist
  report      make one page of tables and plots of a folder of results

Each command explains its options with --help; fit --print_config prints a complete configuration.
"""

_COMMANDS = {
    **dict.fromkeys(("fit", "validate", "test", "predict"), "train"),
    "generate": "generate",
    "partition": "partition",
    "verify": "verify",
    "export": "export",
    "report": "report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0; 1 if the run failed or numbers differ; 2 after a mistake in the input, told in one line; 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # classes of the user's own, named in YAML, as "python -m" finds them
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_HELP)
        return 0
    command, rest = arguments[0], arguments[1:]
    try:
        return _load(command)(command, rest)
    except InputError as error:
        if error.of_one_rank or _speaks():
            _complain(str(error))
        return 2
    except LostRankError as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except SystemExit as leaving:  # after --help and --print_config
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)


def _load(command: str) -> Callable[[str, list[str]], int]:
    if command not in _COMMANDS:
        raise InputError(f"unknown command '{command}'; known are {', '.join(_COMMANDS)}; see pygdist --help")
    # imported on demand: what needs no Lightning does not wait for it
    run: Callable[[str, list[str]], int] = importlib.import_module(f"pygdist.commands.{_COMMANDS[command]}").run
    return run


def _speaks() -> bool:
    """Whether this process tells of a mistake, which every rank finds: the first one, whoever started the ranks."""
    numbers = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return all(number == "0" for number in numbers)


def _complain(message: str) -> None:
    sys.stderr.write("pygdist: error: " + " ".join(message.split()) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
