"""Formats of tool calls, one for each way in which model families write them, and the format of a chat template."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class XmlTags:
    """Tags of a call as XML: `head` NAME `head_end`, per parameter `key` KEY `key_end` `wrap` VALUE `wrap` `value_end`, and
    `end`."""

    head: str
    head_end: str
    key: str
    key_end: str
    value_end: str
    end: str
    wrap: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of one model family: `opening` {"name": …, `key`: {…}} `closing`, with `between` between two calls.

    Without an opening, an answer that begins with a brace is a call. listed: the calls are one JSON list. named: a call is
    `opening` NAME `named` {…}, without a closing. xml: a call is `opening`, its tags, `closing`. python: a call is
    NAME(KEY=VALUE, …), and all of them stand between one `opening` and one `closing`.
    """

    name: str
    opening: str
    closing: str
    key: str
    between: str
    listed: bool = False
    named: str | None = None
    xml: XmlTags | None = None
    python: bool = False

    @property
    def tags(self) -> XmlTags:
        """The tags of a format with `xml`."""
        assert self.xml is not None
        return self.xml


# Qwen 2.5 and 3, SmolLM3, Granite 4, EXAONE 4, ERNIE 4.5, Arcee, and models whose template has no tools.
HERMES = CallFormat("hermes", "<tool_call>", "\n</tool_call>", "arguments", "\n")
LLAMA3 = CallFormat("llama3_json", "", "", "parameters", "; ")
# Mistral up to its third tokenizer; later ones, and Ministral 3.
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "", "arguments", ", ", listed=True)
MISTRAL_NAMED = CallFormat("mistral_named", "[TOOL_CALLS]", "", "arguments", "", named="[ARGS]")
# Granite 3.
GRANITE = CallFormat("granite", "<|tool_call|>", "", "arguments", ", ", listed=True)
# Phi-4-mini.
PHI4 = CallFormat("phi4", "<|tool_call|>", "<|/tool_call|>", "arguments", ", ", listed=True)
# InternLM 2.5 and 3.
INTERNLM = CallFormat("internlm", "<|action_start|><|plugin|>", "<|action_end|>", "parameters", "\n")
# GLM-4 (0414).
GLM4 = CallFormat("glm4", "", "", "arguments", "\n", named="\n")
FUNCTION = XmlTags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>\n")
SEED = CallFormat("seed", "<seed:tool_call>", "</seed:tool_call>", "arguments", "\n", xml=FUNCTION)
# Qwen3-Coder: a value has lines of its own.
QWEN_XML = CallFormat("qwen_xml", "<tool_call>", "</tool_call>", "arguments", "\n", xml=replace(FUNCTION, wrap="\n"))
# GLM-4.5 and later.
ARGUMENT = XmlTags("", "", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "")
GLM_XML = CallFormat("glm_xml", "<tool_call>", "</tool_call>", "arguments", "\n", xml=ARGUMENT)
OLMO = CallFormat("olmo", "<function_calls>", "</function_calls>", "arguments", "\n", python=True)  # OLMo 3

FORMATS = (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, GRANITE, PHI4, INTERNLM, GLM4, SEED, QWEN_XML, GLM_XML, OLMO)
# Optional tags before the calls, by format.
LEADS = {
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "granite": ("<|tool_call|>", "<tool_call>"),
    "phi4": ("<|tool_call|>", "functools"),
}


def format_of(template: str | None) -> CallFormat | None:
    """The format of a chat template; None if it has no tools."""
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<|tool|>" in template:
        return PHI4
    for form in (GRANITE, INTERNLM, SEED, OLMO):
        if form.opening in template:
            return form
    if "<parameter=" in template:
        return QWEN_XML
    if "<arg_key>" in template:
        return GLM_XML
    if "<|observation|>" in template and HERMES.opening not in template:
        return GLM4
    return LLAMA3 if "<|python_tag|>" in template or '"parameters": ' in template else HERMES
