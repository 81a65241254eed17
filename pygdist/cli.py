"""The ``pygdist`` command: Lightning's ``fit``, ``validate``, ``test``, ``predict``, and tools for graphs in parts."""

from __future__ import annotations

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
  partition   partition a graph and write the parts
  verify      compare one training step on N processes with one process, number by number
  export      write the plain model of a checkpoint, loadable without pygdist

Each command explains its options with --help; fit --print_config prints a complete configuration.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0; 1 if the run failed or numbers differ; 2 after a mistake in the input, told in one line.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_HELP)
        return 0
    command, rest = arguments[0], arguments[1:]
    try:
        return _commands().get(command, _unknown)(command, rest)
    except InputError as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # every rank raises it; one line is enough
            _complain(str(error))
        return 2
    except LostRankError as error:
        _complain(str(error))
        return 1


def _commands() -> dict[str, Callable[[str, list[str]], int]]:
    # imported here: --help and the tools answer without loading Lightning
    from pygdist.commands import export, partition, train, verify

    lightning = dict.fromkeys(("fit", "validate", "test", "predict"), train.run)
    return {**lightning, "partition": partition.run, "verify": verify.run, "export": export.run}


def _unknown(command: str, rest: list[str]) -> int:
    raise InputError(f"unknown command '{command}'; known are {', '.join(_commands())}; see pygdist --help")


def _complain(message: str) -> None:
    sys.stderr.write("pygdist: error: " + " ".join(message.split()) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
