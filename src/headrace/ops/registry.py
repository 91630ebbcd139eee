"""The op registry: an op's torch body IS its meaning; faster implementations register beside it and are held to it.

An op is declared by its name and parameters, which is all that a recording needs; its body is loaded with the first tensor it
is given, so that who only records never waits for torch.
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
    """One generated call of an op. The values are the same at every dtype (they are exact in bfloat16)."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Inputs = Callable[[Any, Any], Iterator[Case]]  # of a torch dtype and device

# Every op of the vocabulary by name: the one global of the package.
OPS: "dict[str, Op[..., Any]]" = {}


class Op(Generic[P, R]):
    """A callable of the vocabulary.

    A call goes to the value's own `__headrace_op__(name, args, kwargs)` where the first value has one (that is how a recorder
    traces a model file), else to the implementation of the tensor's device type, else to the torch body.
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
        """What comes with the body: its module is loaded."""
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
        """Give the op its torch body. Raises ValueError where it has one, or where the parameters are not those declared."""

        def register(function: Callable[..., Any]) -> "Op[P, R]":
            found = tuple(inspect.signature(function).parameters)
            if function.__name__ != self.name or found != self.parameters:
                raise ValueError(f"op {self.name!r} takes {self.parameters}, and the body {function.__name__!r} {found}")
            if "reference" in self.__dict__:
                raise ValueError(f"op {self.name!r} is defined twice")
            self.reference, self.inputs, self.tol = function, inputs, tol
            return self

        return register

    def on(self, device_type: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an implementation for tensors of a device type ("cuda"); it is held to the reference by `inputs`, `tol`."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self.implementations[device_type] = function
            return function

        return register


def declare(home: str) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a declaration an op of the vocabulary, whose body the module `home` has."""

    def register(function: Callable[P, R]) -> Op[P, R]:
        if function.__name__ in OPS:
            raise ValueError(f"op {function.__name__!r} is declared twice")
        made = Op(function, home)
        OPS[made.name] = made
        return made

    return register
