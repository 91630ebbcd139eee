"""Origins: the stored tensor of each parameter, and its layout.

Keys are parameter parts ("layers.{i}.qkv.q.weight"). Families (models.families) give the tensor names for each kind of file.
Layouts that differ from ours:

* rope_pairs: GGUF stores the q and k rows of llama as rotary pairs (0, d/2, 1, d/2 + 1, ...) of each head, because llama.cpp
  rotates neighbours;
* minus_one: Hugging Face stores gemma's norm weights as w, GGUF as 1 + w;
* by_group: InternLM2 stores q, k and v as one tensor: for each K/V head its query heads, the key head, the value head;
* transposed: Hugging Face stores GPT-2's linear weights [in, out] (Conv1D);
* padded: RoBERTa's table of positions begins with PADDED_ROWS rows for padding, which no token uses;
* conv: convolutions are stored [out, in, taps], and are linear layers [out, taps * in] here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Layout = Literal["plain", "rope_pairs", "by_group", "transposed", "minus_one", "padded", "conv"]
# Rows before the first position in a table of the layout "padded".
PADDED_ROWS = 2


@dataclass(frozen=True, slots=True)
class Origin:
    """Stored tensor of a parameter part. stacked: the tensor holds all parts of the parameter, their rows in this order."""

    name: str
    layout: Layout = "plain"
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class NameMap:
    """prefix: may precede every name, or be missing (a base model saved alone). ignored: patterns of tensors that are not
    needed.
    """

    names: Mapping[str, Origin]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def full(self, name: str) -> str:
        """A name with its prefix."""
        return name if name.startswith(("lm_head.", "output.")) else self.prefix + name


def origins(names: Mapping[str, str]) -> dict[str, Origin]:
    """Plain origins by tensor name; entries without a field stand for weight and bias."""
    result = {}
    for target, origin in names.items():
        if target.endswith((".weight", ".bias")):
            result[target] = Origin(origin)
        else:
            result |= {f"{target}.{field}": Origin(f"{origin}.{field}") for field in ("weight", "bias")}
    return result


def laid_out(names: Mapping[str, Origin], layout: Layout, *endings: str) -> dict[str, Origin]:
    """The same origins, with `layout` for every target that has one of the endings."""
    return {target: replace(o, layout=layout) if target.endswith(endings) else o for target, o in names.items()}


def stacked(target: str, parts: Iterable[str], name: str) -> dict[str, Origin]:
    """Parts of `target` (q, k, v; gate, up) of layers that store them as one tensor, `name`."""
    fields = ("weight", "bias")
    return {f"{target}.{part}.{field}": Origin(f"{name}.{field}", stacked=True) for part in parts for field in fields}
