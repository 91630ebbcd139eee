"""/tokenize and /detokenize: what the model's tokenizer makes of a text, and back."""

from typing import Any

from headrace.server.chat import check_messages, render
from headrace.server.errors import bad
from headrace.server.fields import DetokenizeRequest, TokenizeRequest
from headrace.server.service import Service
from headrace.server.turns import TOKENS, decoded, pieces


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text or a conversation, their number, and how many the context holds."""
    if (request.prompt is None) == (request.messages is None):
        raise bad("give either prompt or messages", "prompt")
    if request.prompt is not None:
        tokens = await service.llm.encode(request.prompt, add_special=request.add_special_tokens is not False)
    else:
        if request.add_special_tokens:
            raise bad("the chat template writes the special tokens; leave add_special_tokens out", "add_special_tokens")
        prompts = request.add_generation_prompt is not False
        check_messages(request.messages or [])
        tokens = await render(service.llm, request.messages or [], add_generation_prompt=prompts)
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
    found["max_model_len"] = service.llm.loaded.max_model_len if service.llm.loaded is not None else None
    if request.return_token_strs:
        text = service.llm.opened.tokenizer.token_text
        found["token_strs"] = [text(token) async for piece in pieces(tokens, TOKENS) for token in piece]
    return found


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, control tokens included."""
    tokenizer = service.llm.opened.tokenizer
    largest = max(request.tokens, default=0)
    if largest >= tokenizer.vocab_size:
        raise bad(f"there is no token {largest}; ids are 0 to {tokenizer.vocab_size - 1}", "tokens")
    return {"prompt": await decoded(tokenizer, request.tokens, skip_special=False)}
