"""Origins: which tensor of a file holds a parameter, and how it is laid out there.

Keys are our parameters by part ("layers.{i}.qkv.q.weight"). Families (models.families) say the names of each kind of file; the
layouts that differ are

* rope_pairs: GGUF stores llama's q and k rows as rotary pairs (0, d/2, 1, d/2 + 1, ...) of each head: llama.cpp turns
  neighbours;
* minus_one: Hugging Face stores gemma's norms as w; GGUF stores 1 + w, which is what is multiplied;
* transposed: Hugging Face stores GPT-2's linears [in, out] (Conv1D).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Layout = Literal["plain", "rope_pairs", "transposed", "minus_one"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor a part comes from."""

    name: str
    layout: Layout = "plain"
    rows: tuple[int, int] = (0, 1)  # part a of n equal ones of its output rows


@dataclass(frozen=True, slots=True)
class NameMap:
    """`prefix` may stand before every name or be missing (a base model saved alone). `ignored`: patterns of tensors that
    files carry and nothing needs."""

    names: Mapping[str, Origin]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def full(self, name: str) -> str:
        """A name as files usually have it."""
        return name if name.startswith("lm_head.") else self.prefix + name


def origins(names: Mapping[str, str]) -> dict[str, Origin]:
    """Plain origins by their names; entries without a field stand for weight and bias both."""
    made = {}
    for target, origin in names.items():
        if target.endswith((".weight", ".bias")):
            made[target] = Origin(origin)
        else:
            made |= {f"{target}.{field}": Origin(f"{origin}.{field}") for field in ("weight", "bias")}
    return made


def laid_out(names: Mapping[str, Origin], layout: Layout, *endings: str) -> dict[str, Origin]:
    """The same origins with a layout for every target that ends so."""
    return {target: replace(o, layout=layout) if target.endswith(endings) else o for target, o in names.items()}


def thirds(name: str) -> dict[str, Origin]:
    """q, k and v of layers that store the three as one tensor, `name`."""
    return {
        f"layers.{{i}}.qkv.{part}.{field}": Origin(f"{name}.{field}", rows=(third, 3))
        for third, part in enumerate("qkv")
        for field in ("weight", "bias")
    }
