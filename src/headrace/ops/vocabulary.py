"""The op vocabulary of model files. A model file applies only these to values, so it can also be recorded.

This module declares names and parameters; the torch bodies in the named modules define the meaning. `w` is a holder of weights
(`ops.weights`), `ctx` the step.
"""

from typing import Any

from headrace.ops.registry import declare

__all__ = ["act", "act_mul", "attention", "embed", "head", "linear", "norm", "residual", "store", "tap"]


@declare("headrace.ops.elementwise")
def norm(x: Any, w: Any) -> Any:
    """RMSNorm or LayerNorm of x [n, width], by w.kind."""


@declare("headrace.ops.elementwise")
def residual(x: Any, y: Any, post_norm: Any = None) -> Any:
    """x + y, or x + norm(y)."""


@declare("headrace.ops.elementwise")
def act(x: Any, kind: str) -> Any:
    """`kind` (silu | gelu | gelu_tanh | relu | relu2) of every value of x [n, width]."""


@declare("headrace.ops.elementwise")
def act_mul(gate_up: Any, kind: str) -> Any:
    """kind(gate) * up for gate_up [n, 2 * width], the gate's columns first -> [n, width]."""


@declare("headrace.ops.elementwise")
def tap(x: Any, name: str, ctx: Any) -> Any:
    """Returns x unchanged, and stores it if the step asked for `name`."""


@declare("headrace.ops.linears")
def embed(
    ids: Any, w: Any, scale: float = 1.0, types: Any = None, pos: Any = None, positions: Any = None, exact: bool = False
) -> Any:
    """Rows of w for ids [n] -> [n, hidden], times `scale`, plus token types, plus learned positions.

    scale: rounded to w's dtype unless `exact`.
    """


@declare("headrace.ops.linears")
def linear(x: Any, w: Any, ctx: Any) -> Any:
    """x [n, n_in] times all parts of w at once, plus bias: [n, n_out], or one value per part where w.split."""


@declare("headrace.ops.linears")
def head(x: Any, w: Any, scale: float = 1.0, softcap: float | None = None) -> Any:
    """Logits of rows x [r, hidden] -> [r, vocabulary]."""


@declare("headrace.ops.attention")
def attention(
    q: Any,
    k: Any,
    v: Any,
    ctx: Any,
    layer: int,
    rope: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    causal: bool = True,
    source: bool = False,
    bias: Any = None,
) -> Any:
    """softmax(q kᵀ · scale) v over the paged pool, of q [n, heads * head_dim] and k, v [n, kv_heads * head_dim]."""


@declare("headrace.ops.attention")
def store(k: Any, v: Any, ctx: Any, layer: int, rope: Any = None, k_norm: Any = None) -> Any:
    """Write k and v [n, kv_heads * head_dim] into the pool; nothing is read. Returns k."""
