"""The whole vocabulary of model files. A model file uses these on values and nothing else, so that it can also be recorded."""

from headrace.ops.attention import attention
from headrace.ops.elementwise import act, act_mul, norm, residual, tap
from headrace.ops.linears import embed, head, linear

__all__ = ["act", "act_mul", "attention", "embed", "head", "linear", "norm", "residual", "tap"]
