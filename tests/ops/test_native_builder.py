"""Descriptions of programs that cannot be: each is refused in words, with the phase, and none takes the process with it."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import core
from tests.native_builder import DIM, QKV, VOCAB, Builder, Call, attention, changed, inserted, right_calls

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

LAYER, HEAD = 8, 20  # calls: the first phase of the layer, the last one of the head


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    with Builder() as made:
        yield made


def test_the_right_program_runs(builder: Builder) -> None:
    """The control of everything below."""
    assert builder.run_calls(right_calls()) == "ran"


def test_a_crash_would_be_seen(builder: Builder) -> None:
    """The control of the child: one that dies says so, and the next one works."""
    child = builder._child
    assert child is not None
    child.kill()
    assert builder.run_calls(right_calls()) == "died: -9"
    assert builder.run_calls(right_calls()) == "ran"


WRONG: dict[str, tuple[list[Call], str]] = {
    "no heads": (changed("attention", heads=0), "a multiple of the 2 KV heads, not 0"),
    "fewer heads than KV heads": (changed("attention", heads=1), "a multiple of the 2 KV heads, not 1"),
    "heads that are no multiple": (changed("attention", heads=3), "a multiple of the 2 KV heads, not 3"),
    "more heads than q has": (changed("attention", heads=16), "cannot be 512 columns"),
    "a layer that is not there": (changed("attention", layer=7), "the KV pool has no layer 7"),
    "a rope that is not there": (changed("attention", rope=1), "a rope that is not there"),
    "a rope wider than a head": (changed("rope", frequencies=[0.1] * DIM), "turns more values than a head has"),
    "a norm of q of another width": (changed("attention", q_norm="@norm"), "a norm of 64 weights cannot be taken of 32"),
    "too few sinks": (changed("attention", sinks="@few"), "one sink for each head"),
    "a k_shift of another width": (changed("attention", k_shift="@few"), "a value for each of K's"),
    "rows that read a source, with K and V": (changed("attention", source=True), "rows have K and V, or read a source"),
    "rows with neither": (changed("attention", k=None), "rows have K and V, or read a source"),
    "a window over a source": (changed("attention", source=True, k=None, v=None, window=4), "they have no window"),
    "distances of some heads": (changed("attention", bias="@distances", heads=2), "a number for each head"),
    "distances to a source": (changed("attention", bias="@distances", source=True, k=None, v=None), "those within a text"),
    "distances that are no pairs": (changed("attention", bias="@even"), "their number is odd"),
    "K and V in the head": (inserted(21, ("store", {"layer": 0, "k": [7, 0], "v": [7, 64]})), "are stored by a layer"),
    "K and V of no layer": (inserted(LAYER, ("store", {"layer": 1, "k": [2, 0], "v": [2, 64]})), "the KV pool has no layer 1"),
    "V from a narrower buffer": (inserted(LAYER, ("store", {"layer": 0, "k": [2, 0], "v": [0, 0]})), "of one width"),
    "sinusoids that are not there": (changed("embed", sinusoids=3), "a rope that is not there"),
    "sinusoids of another width": (changed("embed", sinusoids=0), "as wide as the table"),
    "a window below 0": (changed("attention", window=-1), "a window is 0"),
    "q in a buffer of another width": (changed("attention", q=[0, 0], heads=2), "of one width"),
    "attention into its own rows": (changed("attention", out=[2, 64]), "while it uses"),
    "attention in the embedding": (inserted(7, ("attention", attention())), "embed, phase 1: attention belongs to a layer"),
    "attention into a local input": (changed("buffer", 2, local=True), "not of the kind"),
    "a buffer that is not there": (changed("linear", 0, source=99), "there is no buffer 99"),
    "a negative buffer": (changed("linear", 0, out=[-1, 0]), "there is no buffer -1"),
    "columns that are not there": (changed("linear", 0, out=[2, 100_000]), "cannot be 256 columns: the buffer has 256"),
    "negative columns": (changed("linear", 0, out=[2, -64]), "cannot be 256 columns"),
    "a linear layer of floats": (changed("linear", 0, source=0), "not of the kind"),
    "a linear layer of another form": (changed("linear", 0, linear="@bf16"), "not of the kind"),
    "a linear layer of another width": (changed("linear", 0, source=5), "all of buffer 5 cannot be 64 columns"),
    "floats where an input is made": (changed("quantize", source=[2, 0], out=2, norm=None), "not of the kind"),
    "an input before it is made": (changed("linear", 0, source=4, linear="@out"), "before the segment has made it"),
    "an input that may be left out": (changed("quantize", sublayer=1), "left out with a sublayer"),
    "a gated layer that stores": (changed("linear", 2, kind="store", out=[0, 0]), "leaves a gated result"),
    "a plain layer that is gated": (changed("linear", 0, kind="gated"), "needs a gated layer"),
    "a gated layer into an input of another width": (changed("linear", 2, out=[4, 0]), "all of buffer 4 cannot be 96 columns"),
    "maxima without logits": (changed("linear", 0, maxima=2), "only logits have maxima"),
    "a misspelt activation": (changed("linear", 2, act="sillu"), "unknown name 'sillu'; use one of silu, gelu_tanh"),
    "a norm of another width": (changed("quantize", norm="@narrow"), "a norm of 3 weights cannot be taken of 64"),
    "too few columns in an order": (changed("quantize", order=[0, 1]), "an order of columns names each once"),
    "a column twice in an order": (changed("quantize", order=[0] * 64), "an order of columns names each once"),
    "a column that is not there": (changed("quantize", order=[*range(1, 65)]), "an order of columns names each once"),
    "logits without maxima": (changed("linear", 4, maxima=-1), "there is no buffer -1"),
    "logits into rows of the step": (changed("linear", 4, out=[2, 0]), "and this phase works on the others"),
    "logits in a layer": (inserted(15, right_calls()[HEAD]), "layer 0, phase 7: logits come from the head"),
    "a head of several parts": (changed("linear", 4, linear="@halves"), "one tensor, not several"),
    "a head of some of the tokens": (changed("linear", 4, linear="@square"), "logits of 64 of 130 tokens"),
    "too few maxima": (changed("buffer", 6, width=2), "cannot be 3 columns"),
    "rows of the head in a layer": (
        inserted(21, ("begin", {"segment": "layer"}), ("copy", {"source": [7, 0], "out": [0, 0], "width": 8})),
        "layer 1, phase 0: columns [0, 8) of buffer 7 has a row for each row of the head",
    ),
    "a copy over itself": (
        inserted(LAYER, ("copy", {"source": [2, 0], "out": [2, 8], "width": 16})),
        "writes columns [8, 24) of buffer 2 while it uses columns [0, 16) of buffer 2",
    ),
    "a copy of nothing": (inserted(LAYER, ("copy", {"source": [2, 0], "out": [0, 0], "width": 0})), "cannot be 0 columns"),
    "a tap that is not there": (inserted(LAYER, ("copy_to_tap", {"source": [0, 0], "tap": 0})), "there is no tap 0"),
    "a residual's norm of another width": (
        inserted(LAYER, ("residual", {"x": [0, 0], "y": [2, 0], "out": [0, 0], "width": 64, "post_norm": "@narrow"})),
        "a norm of 3 weights",
    ),
    "an offset of another width": (changed("embed", offset="@few"), "is as wide as the table"),
    "positions of another width": (changed("embed", positions="@wide_table"), "rows of one width"),
    "a table wider than the rows": (changed("embed", table="@wide_table"), "cannot be 128 columns"),
    "a sublayer beyond the bits": (changed("quantize", sublayer=256), "incompatible function arguments"),
    "tokens that are not sorted": (
        inserted(21, ("scatter", {"source": 7, "out": 7, "maxima": 8, "ids": [3, 1], "vocab_size": VOCAB})),
        "in ascending order",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_calls_are_refused(name: str, builder: Builder) -> None:
    calls, words = WRONG[name]
    said = builder.run_calls(calls)
    assert said.startswith(("ValueError: ", "TypeError: ")), said
    assert words in said


def test_the_phase_is_named(builder: Builder) -> None:
    said = builder.run_calls(changed("attention", heads=0, name="attention"))
    assert said.startswith("ValueError: layer 0, phase 2 (attention): attention has a multiple of")


@pytest.mark.parametrize("call", [("tap", {}), ("begin", {"segment": "layer"}), right_calls()[0], right_calls()[LAYER]])
def test_a_sealed_program_takes_no_more(call: Call, builder: Builder) -> None:
    assert builder.run_calls([*right_calls(), ("seal", {}), ("seal", {})]) == "ran"
    assert "the program is sealed" in builder.run_calls([*right_calls(), ("seal", {}), call])


# -- any calls at all --------------------------------------------------------------------------------------------------

INTS = st.sampled_from([-(2**31), -1, *range(10), 16, 31, 32, 33, 63, 64, 65, 96, 128, 130, 192, 255, 256, 2**28, 2**31 - 1])
PLACES = st.tuples(INTS, INTS).map(list)
NORMS = st.sampled_from([None, "@norm", "@layer_norm", "@head_norm", "@narrow"])
LINEARS = st.sampled_from(["@qkv", "@out", "@gate_up", "@down", "@head", "@square", "@halves", "@bf16"])
VECTORS = st.sampled_from([None, "@sinks", "@few"])
DISTANCES = st.sampled_from([None, "@distances", "@even"])
TABLES = st.sampled_from([None, "@tokens", "@positions", "@wide_table"])
FLOATS = st.sampled_from([0.0, 1.0, -1.0, 1e30, float("inf"), float("nan")])
ACTS = st.sampled_from(["silu", "gelu_tanh", "gelu", "relu", "sillu"])
FLAGS = st.booleans()

ARGUMENTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "buffer": {"kind": st.sampled_from(["float", "a8", "bf16", "f16"]), "width": INTS, "local": FLAGS},
    "rope": {"frequencies": st.lists(FLOATS, max_size=40), "positions": st.integers(-1, 99), "interleaved": FLAGS},
    "tap": {},
    "begin": {"segment": st.sampled_from(["embed", "layer", "head", "tail"])},
    "embed": {
        "table": TABLES,
        "out": INTS,
        "scale": FLOATS,
        "positions": TABLES,
        "offset": VECTORS,
        "sinusoids": st.integers(-2, 2),
    },
    "norm": {"source": PLACES, "out": PLACES, "width": INTS, "norm": NORMS},
    "quantize": {"source": PLACES, "out": INTS, "norm": NORMS, "sublayer": INTS},
    "linear": {
        "linear": LINEARS,
        "source": INTS,
        "kind": st.sampled_from(["store", "add", "gated", "logits", "sum"]),
        "out": PLACES,
        "act": ACTS,
        "scale": FLOATS,
        "softcap": FLOATS,
        "maxima": INTS,
        "sublayer": INTS,
    },
    "act": {"kind": ACTS, "source": PLACES, "out": PLACES, "width": INTS},
    "act_mul": {"kind": ACTS, "source": PLACES, "out": PLACES, "width": INTS},
    "residual": {"x": PLACES, "y": PLACES, "out": PLACES, "width": INTS, "post_norm": NORMS},
    "copy": {"source": PLACES, "out": PLACES, "width": INTS},
    "scatter": {"source": INTS, "out": INTS, "maxima": INTS, "ids": st.lists(INTS, max_size=4), "vocab_size": INTS},
    "copy_to_tap": {"source": PLACES, "tap": INTS},
    "attention": {
        "layer": INTS,
        "heads": INTS,
        "q": PLACES,
        "k": PLACES,
        "v": PLACES,
        "out": PLACES,
        "scale": FLOATS,
        "rope": INTS,
        "q_norm": NORMS,
        "k_norm": NORMS,
        "window": INTS,
        "softcap": FLOATS,
        "sinks": VECTORS,
        "causal": FLAGS,
        "k_shift": VECTORS,
        "source": FLAGS,
        "bias": DISTANCES,
    },
    "store": {"layer": INTS, "k": PLACES, "v": PLACES},
    "seal": {},
}

CALLS = st.sampled_from(sorted(ARGUMENTS)).flatmap(
    lambda method: st.tuples(st.just(method), st.fixed_dictionaries(ARGUMENTS[method]))
)


@st.composite
def spoilt(draw: st.DrawFn) -> list[Call]:
    """The right program with some of it changed, left out, in another place, or beside calls that are made up."""
    calls = right_calls()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(calls) - 1))
        method, arguments = calls[at]
        way = draw(st.sampled_from(["change", "change", "change", "insert", "insert", "drop", "repeat", "move"]))
        if way == "change" and ARGUMENTS[method]:
            name = draw(st.sampled_from(sorted(ARGUMENTS[method])))
            calls[at] = (method, {**arguments, name: draw(ARGUMENTS[method][name])})
        elif way == "insert":
            calls.insert(at, draw(CALLS))
        elif way == "drop" and len(calls) > 1:
            del calls[at]
        elif way == "repeat":
            calls.insert(draw(st.integers(0, len(calls))), calls[at])
        elif way == "move":
            calls.insert(draw(st.integers(0, len(calls) - 1)), calls.pop(at))
    return calls


REFUSALS = (
    "ran",
    "ValueError: ",
    "TypeError: ",
    "IndexError: ",
    "MemoryError",
)  # IndexError: of the step, by what the program has


def survives(builder: Builder, calls: list[Call]) -> None:
    said = builder.run_calls(calls)
    assert said.startswith(REFUSALS), said


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=spoilt())
def test_no_description_takes_the_process_with_it(builder: Builder, calls: list[Call]) -> None:
    survives(builder, calls)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=spoilt())
def test_no_description_takes_the_process_with_it_for_long(builder: Builder, calls: list[Call]) -> None:
    survives(builder, calls)


assert QKV == 256  # what the words above say
