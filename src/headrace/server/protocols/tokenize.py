"""/tokenize, /detokenize and /tokenizer_info: token ids of texts, texts of token ids, and settings of the tokenizer."""

from typing import Any

from headrace.server.engines.models import Service
from headrace.server.http.api_error import bad
from headrace.server.protocols import chat
from headrace.server.protocols.fields import ChatRequest, DetokenizeRequest, TokenizeRequest
from headrace.server.protocols.time_slices import TOKENS_PER_SLICE, decode_in_slices, slices

CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "tools", "tool_choice", "chat_template_kwargs")


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text or a conversation, their number, and the context length. Raises ApiError."""
    if (request.prompt is None) == (request.messages is None):
        raise bad("give either prompt or messages", "prompt")
    if request.messages is None:
        for name in CHAT_FIELDS:
            if getattr(request, name):
                raise bad(f"{name} goes with messages; give them in place of prompt", name)
        special = request.add_special_tokens is not False
        tokens = await service.llm.encode(request.prompt or "", add_special=special, limited=False)
    else:
        if request.add_special_tokens:
            raise bad("the chat template writes the special tokens; leave add_special_tokens out", "add_special_tokens")
        given = {name: getattr(request, name) for name in CHAT_FIELDS}
        body = ChatRequest(model=service.name, messages=request.messages, **given)
        tokens = await chat.read(body).prompt_tokens(service)
    answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
    answer["max_model_len"] = service.llm.loaded.max_model_len if service.llm.loaded is not None else None
    if request.return_token_strs:
        text = service.llm.opened.tokenizer.token_text
        answer["token_strs"] = [text(token) async for piece in slices(tokens, TOKENS_PER_SLICE) for token in piece]
    return answer


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Settings of the tokenizer under the names of tokenizer_config.json, as in vLLM."""
    tokenizer, template = service.llm.opened.tokenizer, service.llm.opened.template
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token or None,
        "eos_token": tokenizer.eos_token or None,
        "chat_template": template.source,
        "model_max_length": service.llm.loaded.max_model_len if service.llm.loaded is not None else None,
        "vocab_size": tokenizer.vocab_size,
    }


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, control tokens included. Raises ApiError."""
    tokenizer = service.llm.opened.tokenizer
    largest = max(request.tokens, default=0)
    if largest >= tokenizer.vocab_size:
        raise bad(f"there is no token {largest}; ids are 0 to {tokenizer.vocab_size - 1}", "tokens")
    return {"prompt": await decode_in_slices(tokenizer, request.tokens, skip_special=False)}
