"""Embeddings of a large encoder in turns: Headrace in bfloat16 and Q8_0, torch in float32, llama.cpp in Q8_0 and F16.

usage: python -m benchmarks.peers.encoders [--tokens 128,256,512] [--texts 4] [--rounds 5] [--threads 2] [--engines ...]

The model has the shape of bge-m3 (XLM-R large) and random weights; `--small` is a tiny one. Its files are written once under
$HEADRACE_HOME/peers/models. All engines get the same tokens and give the first row, normalised. Prints the median seconds of a
batch, and the ratio of seconds and the least cosine to the first engine (Headrace in bfloat16).
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.peers.engines import ENGINES, WORKERS, PeerError
from headrace.bench.competitors import SOURCE, start_worker, worker_command
from headrace.bench.worker import EngineProcess
from headrace.weights.store import home

# Vocabulary, width, layers, heads, width of the MLP, positions.
SIZES = {"bge-m3": (250002, 1024, 24, 16, 4096, 8194), "small": (300, 64, 2, 4, 128, 600)}
KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
XLMR = {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5}
CONTROL = ["<s>", "<pad>", "</s>", "<unk>"]
KINDS = ("Q8_0", "F16")
# Settings of the worker by engine: the kind of weights, and whether llama.cpp takes all texts in one batch.
VARIANTS: dict[str, tuple[str, str, bool]] = {
    "headrace bf16": ("headrace", "", True),
    "headrace Q8_0": ("headrace", "Q8_0", True),
    "torch f32": ("torch", "", True),
    "llama.cpp Q8_0": ("llama.cpp", "Q8_0", True),
    "llama.cpp Q8_0, one by one": ("llama.cpp", "Q8_0", False),
    "llama.cpp F16": ("llama.cpp", "F16", True),
    "llama.cpp F16, one by one": ("llama.cpp", "F16", False),
}


def write_model(folder: Path, sizes: Sequence[int]) -> None:
    """Write a folder in bfloat16 and GGUF files of the same random weights. Raises PeerError if a package is missing."""
    try:
        import gguf
        import torch
        import transformers
    except ImportError as error:
        raise PeerError(f"{error.name} is not installed; install the extras of the clone: pip install -e .[dev]") from None
    settings: dict[str, Any] = {**dict(zip(KEYS, sizes, strict=True)), **XLMR}
    config: Any = transformers.XLMRobertaConfig(**settings)
    torch.manual_seed(0)
    model: Any = transformers.XLMRobertaModel(config, add_pooling_layer=False)
    model = model.to(torch.bfloat16).eval()
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    pieces = [*CONTROL, *(f"▁w{number}" for number in range(config.vocab_size - len(CONTROL)))]
    scores = [0.0] * len(CONTROL) + [-1.0 - 1e-5 * number for number in range(config.vocab_size - len(CONTROL))]
    _write_tokenizer(staging, pieces, scores)
    for kind in KINDS:
        writer = gguf.GGUFWriter(str(staging / f"{kind}.gguf"), "bert")
        _write_settings(writer, config, pieces, scores)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
        for name, tensor in model.state_dict().items():
            if "position_ids" in name:
                continue
            values = tensor.float().numpy()
            if "position_embeddings" in name:
                values = values[config.pad_token_id + 1 :]
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            packed = values.ndim == 2 and "position" not in name and "token_type" not in name
            as_kind = gguf.GGMLQuantizationType[kind]
            data = gguf.quants.quantize(np.ascontiguousarray(values), as_kind) if packed else np.ascontiguousarray(values)
            writer.add_tensor(stored, data, raw_dtype=as_kind if packed else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    staging.rename(folder)


def _write_settings(writer: Any, config: Any, pieces: list[str], scores: list[float]) -> None:
    import gguf

    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types([3, 3, 3, 2] + [1] * (len(pieces) - len(CONTROL)))
    for key, number in (("bos", 0), ("eos", 2), ("unk", 3), ("sep", 2), ("pad", 1)):
        getattr(writer, f"add_{key}_token_id")(number)
    writer.add_token_type_count(1)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    writer.add_context_length(config.max_position_embeddings - config.pad_token_id - 1)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_causal_attention(False)
    writer.add_layer_norm_eps(config.layer_norm_eps)


def _write_tokenizer(folder: Path, pieces: list[str], scores: list[float]) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(list(zip(pieces, scores, strict=True)), CONTROL.index("<unk>")))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    backend.add_special_tokens(CONTROL[:3])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def started(stack: ExitStack, name: str, folder: Path, threads: int, setting: dict[str, Any]) -> EngineProcess:
    """The process of a variant, loaded. Raises PeerError if its engine is missing or cannot load the model."""
    engine, kind, together = VARIANTS[name]
    python, environment = Path(sys.executable), SOURCE
    if engine == "llama.cpp":
        peer = ENGINES["llama.cpp"]
        if not peer.installed:
            how = "python -m benchmarks.peers MODEL --engines llama.cpp --install"
            raise PeerError(
                f"llama.cpp is not installed under {peer.folder}; install it with {how}, or leave it out of --engines"
            )
        python, environment = peer.python, {}
    file = folder / f"{kind}.gguf" if kind else folder
    process = start_worker(stack, f"encoder {name}", worker_command(WORKERS / "encoder.py", python), environment)
    try:
        reply = process.ask(
            model=str(file), threads=threads, setting={"engine": engine, "together": together, **setting}, kv_bytes=0.0
        )
    except ValueError as error:
        raise PeerError(f"{name}: {error}; leave its engine out of --engines") from None
    print(f"{name}: {reply['about']}", flush=True)
    return process


def texts(count: int, tokens: int, vocab: int) -> list[list[int]]:
    return [[0, *((7 * i + 11 * j * (i + 3)) % (vocab - 10) + 5 for j in range(tokens - 2)), 2] for i in range(count)]


def least_cosine(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    a, b = np.asarray(ours), np.asarray(theirs)
    cosines = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return float(cosines.min())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.encoders", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", default="128,256,512", help="lengths of the texts")
    parser.add_argument("--texts", type=int, default=4, help="texts of a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engines", default="headrace,torch,llama.cpp", help="of headrace, torch, llama.cpp")
    parser.add_argument("--variants", default="", help="some variants by name, separated by ;")
    parser.add_argument("--small", action="store_true", help="a tiny model in place of bge-m3's shape")
    given = parser.parse_args(argv)
    shape = "small" if given.small else "bge-m3"
    folder = home() / "peers" / "models" / f"encoder-{shape}"
    lengths = [int(each) for each in given.tokens.split(",")]
    wanted = given.engines.split(",")
    if unknown := [name for name in wanted if name not in ("headrace", "torch", "llama.cpp")]:
        print(f"--engines {unknown[0]}: must be headrace, torch or llama.cpp", file=sys.stderr)
        return 1
    chosen = [name.strip() for name in given.variants.split(";") if name.strip()]
    names = [name for name, (engine, _, _) in VARIANTS.items() if engine in wanted and (not chosen or name in chosen)]
    setting = {"texts": given.texts, "tokens": max(lengths)}
    try:
        if not folder.exists():
            print(f"writing {folder}", flush=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_model(folder, SIZES[shape])
        with ExitStack() as stack:
            running = {name: started(stack, name, folder, given.threads, setting) for name in names}
            for tokens in lengths:
                measure(running, texts(given.texts, tokens, SIZES[shape][0]), given.rounds)
    except PeerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def measure(running: dict[str, EngineProcess], prompts: list[list[int]], rounds: int) -> None:
    """Measure a batch in turns, after a round that does not count, and print it."""
    seconds: dict[str, list[float]] = {name: [] for name in running}
    vectors: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, process in running.items():
            reply = process.ask(prompts=prompts, new_tokens=0)
            vectors[name] = reply["first"]
            if number:
                seconds[name].append(reply["seconds"])
    first = next(iter(running))
    for name, found in seconds.items():
        spread = ", ".join(f"{each:.3f}" for each in found)
        cosine = least_cosine(vectors[first], vectors[name])
        ratio = median(found) / median(seconds[first])
        print(
            f"{len(prompts)} x {len(prompts[0])} tokens, {name}: {median(found):.3f} s ({spread}), "
            f"{ratio:.2f} x {first}, cosine {cosine:.5f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
