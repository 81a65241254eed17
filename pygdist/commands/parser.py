"""The parser of commands that take their options from the signature of a function or a dataclass."""

from __future__ import annotations

from typing import NoReturn

from jsonargparse import ArgumentParser
from typing_extensions import override

from pygdist.commands.messages import shorten
from pygdist.errors import InputError

__all__ = ["Parser"]


class Parser(ArgumentParser):
    """jsonargparse's parser, which reports a mistake in one line and without the usage text."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise InputError(shorten(message)) from ex
