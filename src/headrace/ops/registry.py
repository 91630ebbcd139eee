"""The op registry: an op's torch body IS its meaning; faster implementations register beside it and are held to it."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Case:
    """One generated call of an op. The values are the same at every dtype (they are exact in bfloat16)."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Inputs = Callable[[torch.dtype, torch.device], Iterator[Case]]

# Every op of the vocabulary by name: the one global of the package.
OPS: "dict[str, Op[..., Any]]" = {}

# How far a dtype may be from float64, relative to the largest value of the result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Op(Generic[P, R]):
    """A callable of the vocabulary.

    A call goes to the value's own `__headrace_op__(name, args, kwargs)` when the first value is not a tensor (that is how a
    recorder traces a model file), else to the implementation of the tensor's device type, else to the torch body.
    """

    def __init__(self, reference: Callable[P, R], inputs: Inputs, tol: dict[torch.dtype, float]) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = reference
        self.parameters = tuple(inspect.signature(reference).parameters)
        self.inputs = inputs
        self.tol = {**TOLERANCE, **tol}
        self.implementations: dict[str, Callable[P, R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if not isinstance(first, torch.Tensor):
            forward = getattr(first, "__headrace_op__", None)
            if forward is None:
                raise TypeError(f"{self.name}: the first value must be a tensor or be recording, not {type(first).__name__}")
            return cast(R, forward(self.name, args, kwargs))
        return self.implementations.get(first.device.type, self.reference)(*args, **kwargs)

    def on(self, device_type: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an implementation for tensors of a device type ("cuda"); it is held to the reference by `inputs`, `tol`."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self.implementations[device_type] = function
            return function

        return register


def op(inputs: Inputs, tol: dict[torch.dtype, float] | None = None) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a function an op of the vocabulary.

    `inputs(dtype, device)` yields the cases every implementation must pass; `tol` replaces single entries of TOLERANCE.
    """

    def register(function: Callable[P, R]) -> Op[P, R]:
        made = Op(function, inputs, tol or {})
        if made.name in OPS:
            raise ValueError(f"op {made.name!r} is defined twice")
        OPS[made.name] = made
        return made

    return register


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type sums are formed in: float64 stays, everything else is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
