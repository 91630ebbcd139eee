"""Adapters (LoRA) per request: equal to the formula in float64, and bitwise alike in any batch on the native core."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from headrace import core
from headrace.backends.eager.program import attach
from headrace.compress.grids.encode import encode
from headrace.data.params import SamplingParams
from headrace.engine.engine import AdmissionError
from headrace.kv.pool import KVPool
from headrace.llm import LLM
from headrace.ops.context import FeedRows, build
from headrace.startup.read_adapter import read_adapter
from headrace.weights import gguf as weights_gguf
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import TensorInfo
from tests.cli_shell import Shell
from tests.models.feeding import feed
from tests.models.gguf_writer import write_gguf
from tests.models.zoo import CONFIGS, FLOAT32, in_float64, oracle
from tests.tiny_adapters import ALL, add_to, tensors_of, write_adapter, write_gguf_adapter

EXACT: dict[str, Any] = {"backend": "torch", "dtype": "float64", "threads": 1, "device": "cpu", "max_model_len": 128}
PROMPTS = [[5, 9, 60, 7, 33, 12], [80, 3], [17, 44, 90, 2, 61, 8, 25, 70, 14, 1, 53], [5, 9, 60, 7, 33, 12]]
NAMES = ("", "one", "two", "three")


def write_base(folder: Path, name: str) -> Any:
    """A model of the zoo as a folder, with a vocabulary of bytes. Returns the model of `transformers` in float64."""
    folder.mkdir(parents=True)
    with in_float64():
        model = oracle(name, torch.float64)
    model.config.dtype, model.config.architectures = None, [type(model).__name__]
    model.config.save_pretrained(folder)
    tied = model.config.tie_word_embeddings
    tensors = {key: value.to(FLOAT32) for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    vocabulary = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:96])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("adapters") / "base"
    return folder, write_base(folder, "llama-gqa")


@pytest.fixture(scope="module")
def adapters(base: tuple[Path, Any]) -> str:
    """Three adapters: of all layers, of q and v alone with another rank and rslora, and of the MLP."""
    folder, model = base
    write_adapter(folder.parent / "one", model, 1)
    write_adapter(folder.parent / "two", model, 2, ("q_proj", "v_proj"), 3, use_rslora=True)
    write_adapter(folder.parent / "three", model, 3, ("gate_proj", "down_proj"), 8, lora_alpha=4)
    return ",".join(f"{name}={folder.parent / name}" for name in NAMES[1:])


@torch.no_grad()
def logits(model: Any, prompt: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] by `transformers` in float64."""
    with in_float64():
        rows: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return rows


@torch.no_grad()
def ours(folder: Path, paths: dict[str, Path], numbers: list[int]) -> list[torch.Tensor]:
    """Logits of all prompts in one step, each with the adapter of its number (0: none)."""
    source = SafetensorsFolder(folder)
    model = load_model(source, torch.float64)
    attach(model, [read_adapter(name, path, model) for name, path in paths.items()])
    tables, blocks = [], 0
    for prompt in PROMPTS:
        tables.append(list(range(blocks, blocks + -(-len(prompt) // 4))))
        blocks += len(tables[-1])
    pool = KVPool(model.config, blocks, 4, torch.float64)
    feeds = [FeedRows(prompt, table, adapter=number) for prompt, table, number in zip(PROMPTS, tables, numbers, strict=True)]
    return list(model(build(pool, feeds)).split([len(prompt) for prompt in PROMPTS]))


def scored(llm: LLM, name: str, prompt: list[int]) -> list[float]:
    (one,) = llm.score([prompt], adapter=name)
    return one.logprobs


@pytest.mark.parametrize("name", ["llama-gqa", "phi3-window", "gpt2", "qwen3", "gemma3-one-kv-head"])
def test_an_adapter_equals_its_formula_in_float64(name: str, tmp_path: Path) -> None:
    """Also with joined matrices (Phi-3) and transposed ones (GPT-2, whose peft matrices are not)."""
    model = write_base(tmp_path / "base", name)
    if name == "gpt2":
        targets: tuple[str, ...] = ("c_attn", "c_fc", "c_proj")
        write_transposed(tmp_path / "one", model, targets)
    else:
        targets = ("qkv_proj", "gate_up_proj", *ALL) if name.startswith("phi3") else ALL
        write_adapter(tmp_path / "one", model, 1, targets)
    expected = [logits(model, prompt) for prompt in PROMPTS[:2]]
    add_to(model, tmp_path / "one") if name != "gpt2" else add_transposed(model, tmp_path / "one")
    expected += [logits(model, prompt) for prompt in PROMPTS[2:]]
    for numbers, right in (([0, 0, 1, 1], True), ([1, 1, 0, 0], False)):
        made = ours(tmp_path / "base", {"one": tmp_path / "one"}, numbers)
        gaps = [float((a - b).abs().max()) for a, b in zip(made, expected, strict=True)]
        assert max(gaps) <= 1e-10 if right else min(gaps) > 1e-3


def write_transposed(folder: Path, base: Any, targets: tuple[str, ...]) -> None:
    """An adapter of GPT-2, whose weights lie as [in, out]: fan_in_fan_out."""
    tensors, rng = {}, torch.Generator().manual_seed(5)
    for name, value in base.named_parameters():
        module = name.removesuffix(".weight")
        if value.dim() == 2 and module.rpartition(".")[2] in targets:
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, value.shape[0], generator=rng) * 0.1
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(value.shape[1], 4, generator=rng)
    write_adapter(folder, base, 1, ())
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings(folder, fan_in_fan_out=True)


@torch.no_grad()
def add_transposed(model: Any, folder: Path) -> None:
    tensors, parameters = tensors_of(folder), dict(model.named_parameters())
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        weight = parameters[key.removeprefix("base_model.model.").replace("lora_A.", "")]
        product = tensors[key.replace("lora_A", "lora_B")].double() @ tensors[key].double()
        weight += 2.0 * product.t()


def settings(folder: Path, **change: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_several_adapters_in_a_batch_equal_their_formula(base: tuple[Path, Any], adapters: str) -> None:
    folder, model = base
    expected = []
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        if name:
            add_to(model, folder.parent / name)
        expected.append(logits(model, prompt))
        if name:
            add_to(model, folder.parent / name, -1.0)
    made = ours(folder, {name: folder.parent / name for name in NAMES[1:]}, [0, 1, 2, 3])
    assert max(float((a - b).abs().max()) for a, b in zip(made, expected, strict=True)) <= 1e-10
    neighbours = ours(folder, {name: folder.parent / name for name in NAMES[1:]}, [0, 2, 3, 1])
    assert min(float((a - b).abs().max()) for a, b in zip(neighbours[1:], expected[1:], strict=True)) > 1e-3


def params(llm: LLM, name: str, **more: Any) -> Any:
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, adapter=name, logprobs=0, **more)


@pytest.fixture(scope="module")
def native(base: tuple[Path, Any], adapters: str) -> Iterator[LLM]:
    if not core.available():
        pytest.skip(core.reason())
    with LLM(base[0], adapter=adapters, backend="native", threads=2) as llm:
        yield llm


def drawn(outputs: list[Any]) -> list[Any]:
    return [(one.outputs[0].token_ids, [entry.logprob for entry in one.outputs[0].logprobs]) for one in outputs]


def test_a_batch_gives_the_bits_of_each_request_alone(native: LLM, base: tuple[Path, Any]) -> None:
    """Base and three adapters together, in other orders and companies; base rows have the bits of a model without adapters."""
    each = [params(native, name) for name in NAMES]
    alone = [drawn(native.generate([prompt], one))[0] for prompt, one in zip(PROMPTS, each, strict=True)]
    assert alone[0] != alone[3], "an adapter changes the output of the same prompt"
    assert drawn(native.generate(PROMPTS, each)) == alone
    assert drawn(native.generate(PROMPTS[::-1] * 5, each[::-1] * 5)) == alone[::-1] * 5
    with LLM(base[0], backend="native", threads=1) as plain:
        expected = drawn(plain.generate(PROMPTS, params(plain, "")))
    assert drawn(native.generate(PROMPTS, params(native, ""))) == expected
    mixed = native.generate(PROMPTS * 2, [params(native, "")] * 4 + each)
    assert drawn(mixed) == [*expected, *alone]


@pytest.mark.parametrize(
    "settings", [{}, {"quantize": "int4"}, {"quantize": "int8"}, {"draft_tokens": 3}, {"kv_cache_memory": 80_000}], ids=str
)
def test_batches_of_1_to_33_rows(settings: dict[str, Any], base: tuple[Path, Any], adapters: str) -> None:
    """A batch has the tokens of each request alone: quantized base, drafts, preemption. Adapters of other rows are seen."""
    if not core.available():
        pytest.skip(core.reason())
    requests = [([3 + (at * number) % 80 for at in range(4 + number % 9)] * 2, NAMES[number % 4]) for number in range(33)]
    settings = {**settings, "draft": base[0]} if "draft_tokens" in settings else settings
    asked = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, adapter=name) for _, name in requests]
    with LLM(
        base[0], adapter=adapters, backend="native", threads=2, max_model_len=128, enable_prefix_caching=False, **settings
    ) as llm:
        prompts = [prompt for prompt, _ in requests]
        tokens = lambda count, params: [one.outputs[0].token_ids for one in llm.generate(prompts[:count], params[:count])]  # noqa: E731
        alone = [llm.generate([prompt], [one])[0].outputs[0].token_ids for prompt, one in zip(prompts, asked, strict=True)]
        for count in (2, 3, 8, 16, 17, 33):
            assert tokens(count, asked) == alone[:count], count
        assert tokens(33, asked[1:] + asked[:1]) != alone
        assert "draft" not in settings or sum(one.metrics.drafted for one in llm.generate(prompts, asked)) > 0
        assert "kv_cache_memory" not in settings or llm.engine.scheduler.preemptions > 0


def test_the_native_core_is_close_to_torch(native: LLM, base: tuple[Path, Any], adapters: str) -> None:
    with LLM(base[0], adapter=adapters, **EXACT) as llm:
        for name, prompt in zip(NAMES, PROMPTS, strict=True):
            exact, ours = np.array(scored(llm, name, prompt)), np.array(scored(native, name, prompt))
            assert np.abs(exact - ours).max() < 0.4  # the core holds all weights as bfloat16
            others = [np.abs(np.array(scored(native, other, prompt)) - exact).max() for other in NAMES if other != name]
            assert min(others) > np.abs(exact - ours).max()


def test_chunks_prefix_hits_and_forks_keep_an_adapters_bits(native: LLM, base: tuple[Path, Any], adapters: str) -> None:
    long = [[7 + at * 13 % 80 for at in range(70)]]
    first = [drawn(native.generate(long, params(native, name))) for name in NAMES]
    assert len({json.dumps(each) for each in first}) == 4
    again = [drawn(native.generate(long, params(native, name))) for name in NAMES]  # their prefixes are cached now
    assert again == first
    with LLM(base[0], adapter=adapters, backend="native", threads=1, max_num_batched_tokens=16) as small:
        assert [drawn(small.generate(long, params(small, name))) for name in NAMES] == first
    forked = native.generate(long, params(native, "one", n=3))[0]
    assert [one.token_ids for one in forked.outputs] == [first[1][0][0]] * 3


def test_control_a_prefix_cache_without_the_adapter_is_seen(base: tuple[Path, Any], adapters: str, monkeypatch: Any) -> None:
    long = [[7 + at * 13 % 80 for at in range(70)]]
    monkeypatch.setattr("headrace.engine.engine.with_adapter", lambda salt, *_: salt)
    with LLM(base[0], adapter=adapters, **EXACT) as llm:
        made = [llm.generate(long, params(llm, name))[0].outputs[0].cumulative_logprob for name in ("one", "two")]
        llm.close()
    with LLM(base[0], adapter=adapters, **EXACT) as fresh:
        assert fresh.generate(long, params(fresh, "two"))[0].outputs[0].cumulative_logprob != made[1]


def test_a_gguf_adapter_equals_the_folder(base: tuple[Path, Any], adapters: str, tmp_path: Path) -> None:
    """Its rows of q and k lie as rotary pairs. Control: left as they are, the logits differ."""
    folder, _ = base
    config = CONFIGS["llama-gqa"]()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    arch, layers = gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers
    right = write_gguf_adapter(tmp_path / "right.gguf", folder.parent / "one", arch, layers, heads)
    wrong = write_gguf_adapter(tmp_path / "wrong.gguf", folder.parent / "one", arch, layers, {})
    with LLM(folder, adapter=f"{adapters},right={right},wrong={wrong}", **EXACT) as llm:
        expected, same, other = (np.array(scored(llm, name, PROMPTS[2])) for name in ("one", "right", "wrong"))
    assert np.abs(expected - same).max() < 1e-9
    assert np.abs(expected - other).max() > 1e-3


CONTROLS: dict[str, dict[str, Any]] = {
    "alpha": {"lora_alpha": 16},
    "rslora": {"use_rslora": True},
    "alpha of a module": {"alpha_pattern": {"q_proj": 16}},
}


@pytest.mark.parametrize("what", CONTROLS)
def test_every_number_of_an_adapter_is_seen(what: str, base: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = base
    write_adapter(tmp_path / "a", model, 1)
    write_adapter(tmp_path / "b", model, 1, **CONTROLS[what])
    with LLM(folder, adapter=f"a={tmp_path / 'a'},b={tmp_path / 'b'}", **EXACT) as llm:
        assert np.abs(np.array(scored(llm, "a", PROMPTS[2])) - scored(llm, "b", PROMPTS[2])).max() > 1e-3


def change(folder: Path, update: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    update(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another base": (lambda f: change(f, lambda t: t.update({KEY.format("A"): torch.zeros(4, 32)})), "it is of another base"),
    "another architecture": (
        lambda f: change(f, lambda t: t.update({k.replace("layers.0", "h.0"): t.pop(k) for k in [*t] if "layers.0.mlp" in k})),
        "is it the adapter of another base",
    ),
    "NaN": (lambda f: change(f, lambda t: t[KEY.format("B")].fill_(torch.nan)), "NaN"),
    "half of a pair": (lambda f: change(f, lambda t: t.pop(KEY.format("B"))), "one of its two matrices"),
    "a head": (
        lambda f: change(f, lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                                                "base_model.model.lm_head.lora_B.weight": torch.zeros(96, 4)})),
        "is no linear layer",
    ),
    "saved modules": (lambda f: change(f, lambda t: t.update({"base_model.model.model.norm.weight": torch.ones(64)})), "not"),
    "dora": (lambda f: settings(f, use_dora=True), "asks for use_dora"),
    "bias": (lambda f: settings(f, bias="all"), "asks for bias"),
    "modules to save": (lambda f: settings(f, modules_to_save=["lm_head"]), "asks for modules_to_save"),
    "bias of the matrices": (lambda f: settings(f, lora_bias=True), "asks for lora_bias"),
    "an invocation": (lambda f: settings(f, alora_invocation_tokens=[5]), "asks for alora_invocation_tokens"),
    "rows of the table": (lambda f: settings(f, trainable_token_indices=[5]), "asks for trainable_token_indices"),
    "experts": (lambda f: settings(f, target_parameters=["experts.gate_up_proj"]), "asks for target_parameters"),
    "embeddings": (
        lambda f: change(f, lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 96)})),
        "lora_embedding_A' is not supported; only low-rank matrices of linear layers are",
    ),
    "another kind": (lambda f: settings(f, peft_type="IA3"), "peft_type must be LORA"),
    "another rank": (lambda f: settings(f, r=5), "have rank 4, and adapter_config.json says 5"),
    "rank 0": (lambda f: settings(f, r=0), "r must be a number above 0"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "is a pickle"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_an_adapter_that_cannot_be_used_is_refused_in_one_line(what: str, base: tuple[Path, Any], tmp_path: Path) -> None:
    damage, says = DAMAGE[what]
    folder = write_adapter(tmp_path / "adapter", base[1], 1)
    damage(folder)
    with pytest.raises(ValueError, match=says) as error:
        LLM(base[0], adapter=f"a={folder}", **EXACT)
    assert "\n" not in str(error.value)


def test_settings_and_requests_that_cannot_work_are_refused(base: tuple[Path, Any], adapters: str) -> None:
    folder = base[0]
    for given, says in (
        ({"adapter": "a b=x"}, "must be NAME=PATH"),
        ({"adapter": f"{adapters},one={folder}"}, "given twice"),
        ({"adapter": "a=/no/such/place"}, "is no adapter"),
        ({"adapter": adapters, "cascade": folder}, "adapter does not go with cascade"),
        ({"adapter": adapters, "tp": 2}, "tp=2 does not run adapters"),
        ({"adapter": adapters, "pp": 2}, "pp=2 does not run adapters"),
        ({"adapter": adapters, "offload": True}, "adapter does not go with offload"),
    ):
        with pytest.raises(ValueError, match=says):
            LLM(folder, **given)
    unknown = "unknown adapter 'four'; this model has one, two, three"
    with LLM(folder, adapter=adapters, **EXACT) as llm, pytest.raises(AdmissionError, match=unknown):
        llm.generate(PROMPTS[0], adapter="four", max_tokens=1)
    with LLM(folder, **EXACT) as llm, pytest.raises(AdmissionError, match="open the model with adapter=NAME=PATH"):
        llm.generate(PROMPTS[0], adapter="one", max_tokens=1)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_a_merged_model_equals_the_adapter(name: str, tmp_path: Path, shell: Shell) -> None:
    model = write_base(tmp_path / "base", name)
    if name == "gpt2":
        write_transposed(tmp_path / "one", model, ("c_attn", "c_proj"))
        add_transposed(model, tmp_path / "one")
    else:
        write_adapter(tmp_path / "one", model, 1, use_rslora=True)
        add_to(model, tmp_path / "one")
    code, out, err = shell("merge", tmp_path / "base", tmp_path / "one", "-o", tmp_path / "merged")
    assert (code, out) == (0, ""), err
    expected = [logits(model, prompt) for prompt in PROMPTS]
    made = ours(tmp_path / "merged", {}, [0, 0, 0, 0])
    assert max(float((a - b).abs().max()) for a, b in zip(made, expected, strict=True)) < 1e-4  # rounded to float32
    assert "of another base" in shell("merge", tmp_path / "base", change_width(tmp_path / "one"), "-o", tmp_path / "x")[2]


@pytest.mark.parametrize("format", ["F32", "Q8_0"])
def test_a_merged_gguf_file_equals_the_adapter(format: str, tmp_path: Path, shell: Shell) -> None:
    """Its rows of q and k lie as rotary pairs. Quantised tensors keep their kinds and need --requantise."""
    model = write_base(tmp_path / "base", "llama-gqa")
    write_adapter(tmp_path / "one", model, 1)
    file, out = write_gguf(model, tmp_path / "base.gguf"), tmp_path / "merged.gguf"
    if format != "F32":
        file = requantised(file, tmp_path / "packed.gguf", format)
        code, _, err = shell("merge", file, tmp_path / "one", "-o", out)
        assert (code, out.exists()) == (1, False)
        assert "its weights are Q8_0; --requantise rounds them a second time" in err
    before = [rows.clone() for rows in file_logits(file)]
    code, _, err = shell("merge", file, tmp_path / "one", "-o", out, "--requantise")
    assert code == 0, err
    assert {info.kind for info in map(GGUFFile(out).info, GGUFFile(out).names())} >= {format}
    add_to(model, tmp_path / "one")
    expected, made = [logits(model, prompt) for prompt in PROMPTS], file_logits(out)
    near, far = (float((torch.cat(rows) - torch.cat(expected)).abs().median()) for rows in (made, before))
    assert near < (1e-5 if format == "F32" else 0.2) * far  # control: the file without the adapter is far
    assert far > 0.1
    assert "name a folder for the output" in shell("merge", tmp_path / "base", tmp_path / "one", "-o", out)[2]


def requantised(file: Path, out: Path, kind: str) -> Path:
    """The file with its matrices of whole blocks in another kind."""
    source = GGUFFile(file)
    infos, chunks = [], []
    for name in source.names():
        info, values = source.info(name), np.ascontiguousarray(source.raw(name))
        if len(info.shape) == 2 and info.shape[-1] % 32 == 0:
            values = encode(values.view(np.float32), kind)
            info = TensorInfo(name, info.shape, kind, values.nbytes)
        infos.append(info)
        chunks.append((name, values.reshape(-1)))
    weights_gguf.write_gguf(out, [source.entry(key) for key in source.metadata], infos, iter(chunks))
    return out


@torch.no_grad()
def file_logits(file: Path) -> list[torch.Tensor]:
    return feed(load_model(GGUFFile(file), torch.float64), PROMPTS, "whole", torch.float64)


def test_a_rank_above_the_limit_is_refused(base: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = base
    write_adapter(tmp_path / "wide", model, 1, ("q_proj",), 65)
    with pytest.raises(ValueError, match="has rank 65 and --max-lora-rank is 64; raise it"):
        LLM(folder, adapter=f"wide={tmp_path / 'wide'}", **EXACT)
    with LLM(folder, adapter=f"wide={tmp_path / 'wide'}", max_lora_rank=65, **EXACT) as llm:
        assert scored(llm, "wide", PROMPTS[0]) != scored(llm, "", PROMPTS[0])


def change_width(folder: Path) -> Path:
    change(folder, lambda tensors: tensors.update({key: torch.zeros(4, 8) for key in tensors if key.endswith("A.weight")}))
    return folder


def test_a_command_uses_the_one_adapter_that_it_is_given(base: tuple[Path, Any], adapters: str, shell: Shell) -> None:
    one, options = adapters.split(",")[0], ("--raw", "--temperature", "0", "--max-tokens", "8", "--threads", "1")
    plain, adapted = (shell("run", base[0], "abc", *options, *more) for more in ((), ("--adapter", one)))
    assert plain[0] == adapted[0] == 0, adapted[2]
    assert plain[1] != adapted[1]
    repeated = [word for pair in adapters.split(",") for word in ("--adapter", pair)]
    for several in (("--adapter", adapters), repeated):
        assert "a command uses one adapter" in shell("run", base[0], "abc", *options, *several)[2]
