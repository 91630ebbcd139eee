"""`--chat-template NAME` of run, chat and ask: one of a model's named templates, refused before loading if there is none."""

from pathlib import Path
from typing import Any

import pytest

from headrace.llm import LLM
from tests.cli_shell import Shell
from tests.tiny_files import write_tiny_gguf

GIVEN = ("-t", "0", "-m", "1", "--threads", "1", "--backend", "native")


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of each prompt that a command hands over, without spaces."""
    found: list[str] = []
    for name in ("stream", "add"):
        original = getattr(LLM, name)

        def record_prompts(self: LLM, prompt: Any, *args: Any, original: Any = original, **more: Any) -> Any:
            found.append(self.tokenizer.decode(prompt).replace(" ", ""))
            return original(self, prompt, *args, **more)

        monkeypatch.setattr(LLM, name, record_prompts)
    return found


def with_templates(path: Path, default: str | None, **named: str) -> Path:
    """A tiny model with these chat templates."""

    def add(writer: Any) -> None:
        for name, text in named.items():
            writer.add_string(f"tokenizer.chat_template.{name}", text)

    return write_tiny_gguf(path, template=default, metadata=add)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("templates") / "named.gguf"
    return with_templates(path, "default", tool_use="tool", rag="rag {{ messages[-1].content[:4] }}")


@pytest.mark.parametrize(("options", "begins"), [((), "default"), (("--chat-template", "rag"), "rag")])
def test_run_chat_and_ask(
    shell: Shell, model: Path, prompts: list[str], tmp_path: Path, options: tuple[str, ...], begins: str
) -> None:
    assert shell("run", model, "mill", *options, *GIVEN)[0] == 0
    code, _, err = shell("chat", model, *options, *GIVEN, stdin="mill\n/stats\n")
    assert code == 0, err
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("The mill turns.\n")
    assert shell("ask", model, tmp_path / "docs", "Does the mill turn?", *options, "-m", "1")[0] == 0
    assert [prompt.startswith(begins) for prompt in prompts] == [True] * 3


@pytest.mark.parametrize("command", ["run", "chat"])
def test_an_unknown_name_is_refused_before_loading(
    shell: Shell, model: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "from_settings", lambda *_, **__: pytest.fail("the model was loaded"))
    given = ("a",) if command == "run" else ()
    code, _, err = shell(command, model, *given, "--chat-template", "rags", stdin="")
    assert code == 1
    assert "--chat-template 'rags': this model has no template of this name; it has default, rag and tool_use" in err


def test_raw_prompts_use_no_template(shell: Shell, model: Path) -> None:
    code, _, err = shell("run", model, "--raw", "a", "--chat-template", "rag")
    assert code != 0
    assert "--raw uses no chat template, so it takes no --system and no --chat-template" in err


def test_a_model_without_a_default_template_needs_a_name(shell: Shell, tmp_path: Path, prompts: list[str]) -> None:
    model = with_templates(tmp_path / "named.gguf", None, rag="rag", code="code")
    code, _, err = shell("run", model, "a", *GIVEN)
    assert code == 1
    assert "several chat templates and no default; set --chat-template to code and rag" in err
    assert shell("run", model, "a", "--chat-template", "code", *GIVEN)[0] == 0
    assert prompts == ["code"]
