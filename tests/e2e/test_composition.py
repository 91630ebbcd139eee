"""The table of methods and features in the docs agrees with the engine on both back ends."""

from pathlib import Path

import pytest

from tests.composition import opened, refusal, table
from tests.pages import stale, written


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_table_is_not_stale(backend: str, tmp_path: Path) -> None:
    decoders, sources = opened(tmp_path, backend=backend, **({"dtype": "float64"} if backend == "torch" else {}))
    found = table(decoders, sources)
    assert found == written("composition"), stale("composition")
    assert "* `logprobs`, `prompt_logprobs`, `logit_bias`" in found
    assert "beam search" in refusal(decoders.plain, {"beam_width": 2}, {"top_p": 0.5})
    decoders.close()
    sources.close()
