"""GGUF files whose metadata hold extreme numbers: each is refused in one line, or runs. None ends the process, takes far more
memory than the file has bytes, or silently changes tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from tests.tiny_files import write_tiny_gguf

ROOT = Path(__file__).parents[2]
INT32_MAX, UINT32_MAX = 2**31 - 1, 2**32 - 1

# Metadata, and the result: "same" tokens as without them, "runs", "refused", or None: either of the last two.
CASES: list[tuple[dict[str, int | float], str | None]] = [
    ({"llama.attention.sliding_window": INT32_MAX}, "same"),
    ({"llama.attention.sliding_window": INT32_MAX - 7}, "same"),
    ({"llama.attention.sliding_window": 256}, "same"),
    ({"llama.attention.sliding_window": 2**31}, "refused"),
    ({"llama.attention.sliding_window": UINT32_MAX}, "refused"),
    ({"llama.attention.sliding_window": 1}, "runs"),
    ({"llama.attention.sliding_window": -1}, "refused"),
    ({"llama.attention.head_count": INT32_MAX}, "refused"),
    ({"llama.attention.head_count": INT32_MAX - 1, "llama.attention.key_length": 8}, "refused"),
    ({"llama.attention.head_count": 32}, "refused"),
    ({"llama.attention.head_count_kv": 4}, "refused"),
    ({"llama.attention.key_length": INT32_MAX}, "refused"),
    ({"llama.attention.key_length": INT32_MAX - 1}, "refused"),
    ({"llama.attention.key_length": 65536}, "refused"),
    ({"llama.attention.key_length": 1}, "refused"),
    ({"llama.embedding_length": INT32_MAX}, "refused"),
    ({"llama.feed_forward_length": INT32_MAX}, "refused"),
    ({"llama.block_count": 1024}, "refused"),
    ({"llama.block_count": UINT32_MAX}, "refused"),
    ({"llama.rope.dimension_count": 2}, "runs"),
    ({"llama.rope.dimension_count": UINT32_MAX}, "refused"),
    ({"llama.rope.freq_base": 1e-38}, None),
    ({"llama.rope.freq_base": float("inf")}, "refused"),
    ({"llama.rope.scaling.factor": 1e-38}, None),
    ({"llama.context_length": INT32_MAX}, None),
    ({"llama.context_length": 2**31}, "refused"),
    ({"llama.context_length": 1}, None),
    ({"llama.attention.layer_norm_rms_epsilon": 1e38}, None),
    ({"llama.attention.layer_norm_rms_epsilon": 1e-45}, None),
    ({"llama.attn_logit_softcapping": 1e-38}, None),
    ({"llama.final_logit_softcapping": 1e-38}, None),
    ({"llama.logit_scale": float("inf")}, None),
    ({"llama.embedding_scale": 1e38}, None),
    ({"llama.residual_scale": float("nan")}, None),
    ({"tokenizer.ggml.eos_token_id": UINT32_MAX}, None),
    ({"tokenizer.ggml.bos_token_id": UINT32_MAX}, None),
    ({"general.alignment": 2**31}, None),
    ({"llama.expert_count": UINT32_MAX}, None),
]

OPEN = """
import json, resource, sys
from headrace.data.params import SamplingParams
from headrace.llm import LLM

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
for name in sys.stdin.read().split():
    try:
        llm = LLM(name, threads=int(sys.argv[1]), max_model_len=None if "context" in name else 64)
        (output,) = llm.generate("The mill", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        said = list(output.outputs[0].token_ids)
        llm.close()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([name, said]), flush=True)
"""


def kind_of(value: int | float) -> gguf.GGUFValueType:
    if isinstance(value, float):
        return gguf.GGUFValueType.FLOAT32
    return gguf.GGUFValueType.INT32 if value < 0 else gguf.GGUFValueType.UINT32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A plain file, then one for each case."""
    folder = tmp_path_factory.mktemp("extreme")
    made = [write_tiny_gguf(folder / "plain.gguf")]
    for number, (keys, _) in enumerate(CASES):

        def set_keys(writer: gguf.GGUFWriter, keys: dict[str, int | float] = keys) -> None:
            for key, value in keys.items():
                writer.kv_data[0][key] = gguf.GGUFValue(value, kind_of(value))

        name = f"{number}.context.gguf" if "llama.context_length" in keys else f"{number}.gguf"
        made.append(write_tiny_gguf(folder / name, metadata=set_keys))
    return made


@pytest.mark.parametrize("threads", [1, 2])
def test_extreme_numbers_in_a_file_are_refused_in_a_line_or_run(files: list[Path], threads: int) -> None:
    """With two threads only what may run: a file is refused before there are threads."""
    plain, *each = files
    chosen = [(path, case) for path, case in zip(each, CASES, strict=True) if threads == 1 or case[1] != "refused"]
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(threads)],
        input="\n".join(map(str, [plain, *(path for path, _ in chosen)])),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
        timeout=600,
    )
    answers = {Path(name): said for name, said in map(json.loads, done.stdout.splitlines())}
    assert isinstance(answers[plain], list), answers[plain]
    for path, case in chosen:
        assert path in answers, f"{case} ended the process with {done.returncode}: {done.stderr[-1000:]}"
        said, wanted = answers[path], case[1]
        if isinstance(said, list):
            assert wanted != "refused", f"{case}: {said}"
            assert wanted != "same" or said == answers[plain], f"{case}: {said}, not {answers[plain]}"
        else:
            assert wanted in ("refused", None), f"{case}: {said}"
            assert "\n" not in said, f"{case}: {said}"
            assert not said.startswith(("MemoryError", "TypeError", "OverflowError", "AssertionError")), f"{case}: {said}"
