"""The whole vocabulary of model files. A model file uses these on values and nothing else, so that it can also be recorded."""

from headrace.ops.activations import act, act_mul
from headrace.ops.attention import attention
from headrace.ops.linears import embed, head, linear
from headrace.ops.norms import norm, residual
from headrace.ops.taps import tap

__all__ = ["act", "act_mul", "attention", "embed", "head", "linear", "norm", "residual", "tap"]
