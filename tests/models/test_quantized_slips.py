"""Slips that readers of others' folders make: each gives other numbers than those that the tests compare with."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.weights.decode import read_floats
from headrace.weights.schemes import awq as reader
from headrace.weights.schemes.folder import open_folder
from tests.quantized import DATA, LAYER, Made, awq, gptq, load_fixture, mxfp4

K = f"{LAYER}.self_attn.k_proj"
STATE = f"{K}.weight.quant_state.bitsandbytes__nf4"


def of(name: str) -> Made:
    """What bitsandbytes wrote, with the numbers of one matrix by its own arithmetic."""
    made = load_fixture(name)
    made.values[K] = load_file(DATA / name / "expected.safetensors")["k_proj"].numpy()
    return made


def version_two(made: Made, patch: pytest.MonkeyPatch) -> None:
    made.settings["checkpoint_format"] = "gptq_v2"


def in_order(made: Made, patch: pytest.MonkeyPatch) -> None:
    made.tensors[f"{K}.g_idx"] = made.tensors[f"{K}.g_idx"].sort().values


def keep_output_order(made: Made, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reader, "PLACES", np.arange(8))


def other_half_first(made: Made, patch: pytest.MonkeyPatch) -> None:
    packed = made.tensors[f"{K}.weight"]
    made.tensors[f"{K}.weight"] = packed >> 4 | packed << 4


def half_an_offset(made: Made, patch: pytest.MonkeyPatch) -> None:
    state = json.loads(made.tensors[STATE].numpy().tobytes())
    assert state["nested_offset"] != 0
    made.tensors[STATE] = torch.tensor(
        list(json.dumps({**state, "nested_offset": state["nested_offset"] / 2}).encode()), dtype=torch.uint8
    )


def another_bias(made: Made, patch: pytest.MonkeyPatch) -> None:
    made.tensors[f"{K}.weight_scales"] = made.tensors[f"{K}.weight_scales"] + 1


Slip = Callable[[Made, pytest.MonkeyPatch], None]
SLIPS: dict[str, tuple[Callable[[], Made], Slip]] = {
    "zero points of version 1 as they are": (lambda: gptq(sym=False), version_two),
    "act-order that is left out": (lambda: gptq(act_order=True), in_order),
    "outputs of AWQ in order": (awq, keep_output_order),
    "the low half of a byte first": (lambda: of("bnb-nf4-nested"), other_half_first),
    "absmax with half its offset": (lambda: of("bnb-nf4-nested"), half_an_offset),
    "exponents less 127 of the doubled table": (mxfp4, another_bias),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far beyond what is allowed of numbers that are not exact."""
    make, slip = SLIPS[name]

    def apart(made: Made, folder: str) -> float:
        values = made.values[K]
        return float(
            np.abs(read_floats(open_folder(made.write(tmp_path / folder)), f"{K}.weight") - values).max() / values.std()
        )

    made = make()
    assert apart(made, "right") < 0.02
    slip(made, monkeypatch)
    assert apart(made, "wrong") > 0.1
