"""langchain-tests' standard suite for chat models and embeddings, run by pytest inside the environment of `langchain`."""

import json
from pathlib import Path
from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

URL, MODEL = json.loads(Path(__file__).with_name("server.json").read_text())


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        common = {"model": MODEL, "base_url": URL, "api_key": "none", "temperature": 0, "max_tokens": 128, "max_retries": 0}
        return {**common, "stream_usage": True}  # off by default for other servers than OpenAI's

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        # The server receives texts; by default this client sends ids of OpenAI's own vocabulary.
        return {"model": MODEL, "base_url": URL, "api_key": "none", "check_embedding_ctx_length": False}
