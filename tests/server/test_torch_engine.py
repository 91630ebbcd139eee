"""The protocol, structured outputs and tools with the torch engine; the other tests use the native core."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.llm import LLM
from tests.server import test_protocol as protocol
from tests.server import test_structured as structured
from tests.server import test_tools as tools
from tests.server.harness import TORCH, Running
from tests.tiny_files import write_tiny_gguf

AGAIN = [
    protocol.test_a_cached_prefix_is_shared_only_under_the_same_salt,
    protocol.test_a_chat_equals_llm_chat_streamed_or_not,
    protocol.test_a_completion_equals_generate_streamed_or_not,
    protocol.test_a_negative_seed_is_a_distinct_seed,
    protocol.test_beams_and_best_of_equal_generate,
    protocol.test_chat_logprobs,
    protocol.test_choices_of_several_prompts_with_several_answers_have_indexes_of_their_own,
    protocol.test_echo_and_logprobs_score_a_prompt,
    protocol.test_fields_of_other_servers_work,
    protocol.test_figures,
    protocol.test_prompts_are_texts_or_token_ids_one_or_many,
    protocol.test_the_answers_have_the_shapes_of_the_protocol,
    structured.test_costly_forms_are_bounded,
    structured.test_json_schema,
    structured.test_other_servers_fields,
    structured.test_a_stream_equals_the_complete_answer,
    structured.test_the_server_equals_offline_generation,
    structured.test_keywords_without_a_mask_are_checked_at_the_end,
    tools.test_a_named_tool_is_called,
    tools.test_required_and_streamed,
]
for again in AGAIN:  # collected here, with the fixtures of this module
    globals()[again.__name__] = again


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("torch") / "tiny.gguf", context=1024)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with Running(model, max_queued_requests=3, **TORCH) as running:
        yield running


@pytest.fixture(scope="module")
def offline(model: Path) -> Iterator[LLM]:
    llm = LLM(model, **TORCH)
    yield llm
    llm.close()


def test_it_is_torch(server: Running) -> None:
    assert server.llm.loaded is not None
    assert "(torch, near-tie-exact)" in server.llm.loaded.note


def test_the_tests_leave_the_same_engine_process(server: Running) -> None:
    assert server.health() == {"status": "ready", "detail": "", "restarts": 0}
    assert server.complete(max_tokens=2).choices[0].text
