"""A module's hooks run pygdist's part even if a subclass overrides them without ``super()``.

Lightning's own hooks do nothing, so subclasses often leave ``super()`` out. Ours bring weights and gradients that
travel between ranks; without them a run trains, or saves, another model than it should.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

#: Hooks in which pygdist does something, and in which Lightning by itself does nothing.
HOOKS = (
    "setup", "teardown", "on_save_checkpoint", "on_load_checkpoint", "on_fit_start",
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end",
    "on_before_backward", "on_after_backward",
    "on_validation_epoch_start", "on_test_epoch_start", "on_predict_epoch_start",
    "on_validation_end", "on_test_end", "on_predict_end", "on_validation_epoch_end",
)  # fmt: skip
_wrapped = WeakSet[Callable[..., Any]]()


class WithHooks:
    """Base of a module whose hooks all run pygdist's part, once in each call.

    A subclass's hook that calls ``super()`` decides when that part runs. Otherwise it runs before the subclass's hook;
    in ``setup`` after it, as a subclass may make its model there.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in HOOKS:
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            hook = None if owner is None else vars(owner)[name]
            if owner is None or not inspect.isfunction(hook) or hook in _wrapped:
                continue
            # the owner may be a mixin, which knows nothing of modules
            wrapped = _once(name, hook) if _is_ours(owner) else _with_ours(name, hook)
            _wrapped.add(wrapped)
            setattr(cls, name, wrapped)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def _ours(module: object, name: str) -> Callable[..., Any]:
    """Return pygdist's version of a hook; it is looked up in each call, as a subclass may have several bases."""
    hook: Callable[..., Any] = next(
        vars(base)[name] for base in type(module).__mro__ if _is_ours(base) and name in vars(base)
    )
    return hook


def _done(module: object) -> dict[str, bool]:
    """Return the subclass's hooks that are running, and whether pygdist's part of each has run."""
    running: dict[str, bool] = vars(module).setdefault("_hooks_done", {})
    return running


def _once(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of pygdist's that does nothing if it has run already in the same call of a subclass's hook."""

    @wraps(hook)
    def once(self: object, *args: Any, **kwargs: Any) -> Any:
        done = _done(self)
        if done.get(name):
            return None
        result = hook(self, *args, **kwargs)
        if name in done:
            done[name] = True
        return result

    return once


def _with_ours(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a subclass's hook that runs pygdist's part too."""
    code = getattr(inspect.unwrap(hook), "__code__", None)
    goes_first = name != "setup" and (code is None or name not in code.co_names)  # it does not call super()

    @wraps(hook)
    def with_ours(self: object, *args: Any, **kwargs: Any) -> Any:
        done = _done(self)
        if name in done:  # called by a subclass of the subclass, which sees to our part
            return hook(self, *args, **kwargs)
        done[name] = False
        try:
            if goes_first:
                _ours(self, name)(self, *args, **kwargs)
            result = hook(self, *args, **kwargs)
            _ours(self, name)(self, *args, **kwargs)
        finally:
            del done[name]
        return result

    return with_ours
