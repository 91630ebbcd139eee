"""What a Python user sees first: names, types, reprs, data; and no shorthand of this project's own."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import headrace
from headrace import LLM, RequestOutput, SamplingParams
from headrace.data.outputs import Embedding, Score, unit_vector
from headrace.data.plan import TokenLogprob
from headrace.text.chat import ChatTemplate
from tests.tiny_files import write_tiny_gguf

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headrace"
SHORTHAND = re.compile(r"\bcards? [A-Z]\d|\b[WK]\d{1,2}\b")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"), dtype="float64", threads=1)


def test_the_package_shows_its_names_and_nothing_else() -> None:
    assert dir(headrace) == sorted(headrace.__all__)


def test_types_reach_a_users_type_checker() -> None:
    """The stub names what the package names, each from where it lives; both files are in the package's folder."""
    assert (PACKAGE / "py.typed").exists()
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    found = {node.names[0].asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom)}
    assert found == headrace._HOME  # type: ignore[attr-defined]
    (names,) = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(names) == headrace.__all__


def shorthand(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if SHORTHAND.search(line)]


def test_docstrings_have_no_shorthand() -> None:
    assert shorthand("stages of card B1\nplain") == ["stages of card B1"]
    assert shorthand("(W12: T = 0)") == ["(W12: T = 0)"]
    found = {str(path): shorthand(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert all(inspect.getdoc(getattr(headrace, name)) for name in headrace._HOME)  # type: ignore[attr-defined]


def test_a_model_is_a_context_manager_with_a_repr(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(llm, "close", lambda: closed.append(True))
    with llm as entered:
        assert entered is llm
        assert closed == []
    assert closed == [True]
    with pytest.raises(ZeroDivisionError), llm:
        raise ZeroDivisionError
    assert closed == [True, True]
    assert re.fullmatch(r"LLM\('.*tiny.gguf', llama, torch in float64, context 256\)", repr(llm))
    assert re.fullmatch(r"Tokenizer\(\d+ tokens, bos '.*', eos '.+'\)", repr(llm.tokenizer))
    assert repr(ChatTemplate(None)) == "ChatTemplate(none)"
    assert repr(SamplingParams(temperature=0.5)) == "SamplingParams(temperature=0.5)"


def test_from_pretrained_opens_a_model(llm: LLM) -> None:
    """Who comes from transformers writes it so; its settings have other names here, which is said before anything is read."""
    with LLM.from_pretrained(llm.opened.path, dtype="float64", threads=1) as same:
        assert (
            same.generate("The mill", temperature=0, max_tokens=3)[0].to_dict()["outputs"]
            == (llm.generate("The mill", temperature=0, max_tokens=3)[0].to_dict()["outputs"])
        )
    for theirs, said in (
        ("torch_dtype", "did you mean kv_dtype or dtype"),
        ("device_map", "did you mean device"),
        ("x", "it takes dtype, "),
    ):
        with pytest.raises(TypeError, match=f"there is no setting '{theirs}'; {said}"):
            LLM.from_pretrained("nowhere", **{theirs: "auto"})


def test_outputs_as_text_and_as_data(llm: LLM) -> None:
    (output,) = llm.generate("The mill", temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=0)
    (one,) = output.outputs
    assert repr(one) == f"CompletionOutput({one.text!r}, 3 tokens, finish_reason='length')"
    assert repr(output).endswith(f"tokens of prompt, [{one!r}])")
    found = output.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["prompt"] == "The mill"
    assert found["outputs"][0]["text"] == one.text
    entry = one.logprobs[0] if one.logprobs else None
    assert isinstance(entry, TokenLogprob)
    assert found["outputs"][0]["logprobs"][0]["token"] == entry.token
    assert found["outputs"][0]["logprobs"][0]["logprob"] == entry.logprob
    assert found["prompt_logprobs"][0] is None
    assert found["metrics"]["arrival"] > 0
    (score,) = llm.score("The mill stands")
    assert isinstance(score, Score)
    assert "perplexity=" in repr(score)
    assert score.to_dict()["logprobs"] == score.logprobs
    assert repr(Embedding([1], unit_vector([3.0, 4.0]))) == "Embedding(2 numbers of 1 token)"
    assert isinstance(output, RequestOutput)


def test_parameters_as_data_make_the_same_again() -> None:
    made = SamplingParams(temperature=0.5, stop=("a",), bad_words=((1, 2),), structured_outputs={"regex": "a"})
    assert SamplingParams(**made.to_dict()) == made
    assert SamplingParams().to_dict() == {}


def test_a_tokenizer_is_callable_as_in_transformers(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The mill")
    found = llm.tokenizer("The mill")
    assert found["input_ids"] == found.input_ids == ids
    assert found.attention_mask == [1] * len(ids)
    assert llm.tokenizer(["The mill", "a"]).input_ids == [ids, llm.tokenizer.encode("a")]
    assert llm.tokenizer("The mill", add_special_tokens=False).input_ids == llm.tokenizer.encode("The mill", add_special=False)
