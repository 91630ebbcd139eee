"""Which of a model's chat templates is used: the choice of transformers, for folders and GGUF files."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers

from headrace.text.chat import ChatTemplate, TemplateError
from headrace.text.gguf_keys import tokenizer_keys
from headrace.text.gguf_vocab import read_gguf
from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from tests.unit.test_tokenizer_oracle import save
from tests.unit.vocabularies import byte_level

TALK = [{"role": "user", "content": "a"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
TEXTS = {name: f"{name}: {{{{ messages[0].content }}}}" for name in ("default", "tool_use", "rag")}
LISTED = [{"name": name, "template": text} for name, text in TEXTS.items()]
# tokenizer_config.json, and template files
FOLDERS: dict[str, tuple[Any, dict[str, str]]] = {
    "one": (TEXTS["default"], {}),
    "a list": (LISTED, {}),
    "a list of one": (LISTED[:1], {}),
    "a list without a default": (LISTED[1:], {}),
    "a file": (None, {"chat_template.jinja": "file"}),
    "a file and a list": (LISTED, {"chat_template.jinja": "file"}),
    "files": (None, {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tool file"}),
    "files and a list": (LISTED, {"additional_chat_templates/rag.jinja": "rag file"}),
    "two defaults": (None, {"chat_template.jinja": "file", "additional_chat_templates/default.jinja": "other file"}),
}
ASKED: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": []},
    {"chat_template": "rag"},
    {"chat_template": "default", "tools": TOOLS},
]


def rendered(template: ChatTemplate, asked: dict[str, Any]) -> str:
    tools = asked.get("tools")
    return template.choose(asked.get("chat_template"), tools=tools is not None).render(TALK, tools=tools)


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_a_folder_selects_templates_like_transformers(name: str, tmp_path: Path) -> None:
    listed, files = FOLDERS[name]
    save(tmp_path, "bytes", chat_template=listed)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    template = ChatTemplate.of(Tokenizer.from_folder(tmp_path))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for asked in ASKED:
        named = asked.get("chat_template")
        if named is not None and named not in template.named:
            with pytest.raises(TemplateError, match="no template of this name; it has"):
                rendered(template, asked)
        if named is not None and (named not in template.named or not isinstance(oracle.chat_template, dict)):
            continue  # transformers takes the name for a template
        try:
            want = oracle.apply_chat_template(TALK, tokenize=False, **asked)
        except ValueError:
            with pytest.raises(TemplateError, match="no default; set chat_template to rag"):
                rendered(template, asked)
            continue
        assert rendered(template, asked) == want


def test_a_gguf_file(tmp_path: Path) -> None:
    """Written by the `gguf` package."""
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_chat_template([{"name": name, "template": text} for name, text in TEXTS.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile(tmp_path / "a.gguf") as file:
        keys = {key: value for key, value in file.metadata.items() if "chat_template" in key}
    template = ChatTemplate.of(Tokenizer.from_gguf({**byte_level(), **keys}))
    assert [rendered(template, asked).partition(":")[0] for asked in ASKED] == [
        "default", "tool_use", "tool_use", "rag", "default"
    ]  # fmt: skip


def test_a_gguf_file_of_a_folder_has_all_templates(tmp_path: Path) -> None:
    folder = Tokenizer.from_folder(save(tmp_path, "bytes", chat_template=LISTED))
    keys = tokenizer_keys(tmp_path, folder.vocab_size)
    assert keys["tokenizer.chat_templates"] == ["tool_use", "rag"]
    assert read_gguf(keys).templates == TEXTS


def test_a_template_of_the_users_own_is_the_only_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, "bytes", chat_template=LISTED))
    template = ChatTemplate.of(tokenizer, "own")
    assert rendered(template, {"tools": TOOLS}) == "own"
    with pytest.raises(TemplateError, match=r"chat_template 'rag': this model has no template of this name; it has default$"):
        template.choose("rag")


@pytest.mark.parametrize(
    ("value", "message"),
    [([{"name": "default"}], "chat_template 'default' in tokenizer_config.json must be text"), (5, "must be text")],
)
def test_an_invalid_template_is_refused(value: object, message: str, tmp_path: Path) -> None:
    save(tmp_path, "bytes", chat_template=value)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer.chat_template.rag must be text"):
        Tokenizer.from_gguf({**byte_level(), "tokenizer.chat_template.rag": 3})
