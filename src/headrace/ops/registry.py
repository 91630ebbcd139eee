"""The op registry. An op's torch body defines its meaning; faster implementations are registered for a device type and must
match it.

An op is declared by name and parameters, which is all a recording needs. Its body is loaded with the first tensor, so a
recording does not import torch.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Case:
    """One generated call of an op. The values are the same at every dtype, being exact in bfloat16."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Inputs = Callable[[Any, Any], Iterator[Case]]  # (torch dtype, device) -> cases

# Every op of the vocabulary by name: the one global of the package.
OPS: "dict[str, Op[..., Any]]" = {}


class Op(Generic[P, R]):
    """A callable of the vocabulary.

    If the first value has `__headrace_op__(name, args, kwargs)`, the call goes there: so a recorder traces a model file.
    Otherwise it goes to the implementation of the tensor's device type, or to the torch body.
    """

    reference: Callable[P, R]  # the torch body
    inputs: Inputs  # the cases that every implementation must pass
    tol: dict[Any, float]  # how far a dtype may be from float64, relative to the largest value of the result

    def __init__(self, declared: Callable[P, R], home: str) -> None:
        self.name = declared.__name__
        self.__doc__ = declared.__doc__
        self.signature = inspect.signature(declared)
        self.parameters = tuple(self.signature.parameters)
        self.home = home
        self.implementations: dict[str, Callable[P, R]] = {}

    def __getattr__(self, name: str) -> Any:
        """Import the module with the op's torch body when `reference`, `inputs` or `tol` is first read."""
        if name not in ("reference", "inputs", "tol"):
            raise AttributeError(name)
        import_module(self.home)
        if name not in self.__dict__:
            raise AttributeError(f"{self.home} gives op {self.name!r} no body")
        return self.__dict__[name]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        forward = getattr(first, "__headrace_op__", None)
        if forward is not None:
            return cast(R, forward(self.name, args, kwargs))
        if not hasattr(first, "device"):
            raise TypeError(f"{self.name}: the first value must be a tensor or be recording, not {type(first).__name__}")
        return self.implementations.get(first.device.type, self.reference)(*args, **kwargs)

    def body(self, inputs: Inputs, tol: dict[Any, float]) -> "Callable[[Callable[..., Any]], Op[P, R]]":
        """Register the op's torch body. Raises ValueError if it has one, or if its parameters differ from the declared ones."""

        def register(function: Callable[..., Any]) -> "Op[P, R]":
            parameters = tuple(inspect.signature(function).parameters)
            if function.__name__ != self.name or parameters != self.parameters:
                raise ValueError(f"op {self.name!r} takes {self.parameters}, and the body {function.__name__!r} {parameters}")
            if "reference" in self.__dict__:
                raise ValueError(f"op {self.name!r} is defined twice")
            self.reference, self.inputs, self.tol = function, inputs, tol
            return self

        return register

    def on(self, device_type: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an implementation for tensors of a device type ("cuda"), which must match the reference by `inputs` and
        `tol`."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self.implementations[device_type] = function
            return function

        return register


def declare(home: str) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a declaration an op of the vocabulary, with its body in module `home`."""

    def register(function: Callable[P, R]) -> Op[P, R]:
        if function.__name__ in OPS:
            raise ValueError(f"op {function.__name__!r} is declared twice")
        op = Op(function, home)
        OPS[op.name] = op
        return op

    return register
