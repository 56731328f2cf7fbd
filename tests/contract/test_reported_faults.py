"""Faults that users of other servers and clients reported, which were found here too, and the tests that hold
what is right since. Whoever changes one of these tests sees here why it is there.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from tests.support.toolchains import ROOT


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    reported: str
    """Where: repositories on GitHub, with the number of the issue."""
    wrong: str
    """What was wrong here."""
    held_by: tuple[str, ...]
    """The tests, as paths below tests/ with a function's name."""


FAULTS = [
    Fault(
        "pydantic/pydantic-ai#5508, pydantic/pydantic#13630",
        "A required call was refused where a schema of a tool that is not strict could not be enforced.",
        (
            "service/openai/chat/test_reported_requests.py::test_it_is_answered",
            "runtime/grammar/test_enforced_schemas.py::test_a_call_comes_and_the_rest_is_enforced",
            "runtime/grammar/test_enforced_schemas.py::test_a_strict_tool_is_refused_with_the_place",
            "runtime/grammar/test_enforced_schemas.py::test_no_schema_is_refused",
        ),
    ),
    Fault(
        "huggingface/transformers#28776, dottxt-ai/outlines#1321",
        "The space before an output was lost where the tokenizer strips one from the start of a text.",
        (
            "service/openai/chat/test_leading_space.py::test_what_the_tokenizer_makes_of_all_tokens",
            "service/openai/chat/test_leading_space.py::test_a_completion_goes_on_from_its_prompt",
            "service/openai/chat/test_leading_space.py::test_an_answer_to_a_conversation_is_a_text_of_its_own",
            "runtime/text/test_text.py::test_a_prompt_and_what_follows_it_are_the_decode_of_both",
        ),
    ),
    Fault(
        "ggml-org/llama.cpp#20156, vllm-project/vllm#49493",
        "Codex's requests were refused: client_metadata, its tools and its wishes.",
        (
            "service/openai/responses/test_tools.py::test_codex_calls_a_function_of_a_namespace_and_goes_on",
            "service/openai/responses/test_tools.py::test_tools_that_are_built_in_are_passed_over",
            "service/openai/responses/test_tools.py::test_every_tool_of_openai_is_taken_or_refused_on_purpose",
            "service/openai/test_wishes.py::test_wishes_are_taken_and_the_header_names_those_without_effect",
            "service/openai/outside/test_agents.py::test_a_script_of_turns",
        ),
    ),
    Fault(
        "anthropics/claude-code#68325",
        "A call with half a surrogate pair was handed out, and refused when it came back.",
        (
            "service/openai/chat/test_reported_requests.py::test_it_is_answered",
            "runtime/chat/test_history.py::test_half_a_pair_is_a_replacement_character",
            "runtime/chat/test_history.py::test_half_a_pair_from_elsewhere_is_rendered_too",
            "runtime/chat/test_history.py::test_every_call_can_come_back",
            "service/openai/messages/test_history.py::test_any_answer_can_be_sent_back",
        ),
    ),
    Fault(
        "ollama/ollama#16686, ollama/ollama#17914, vllm-project/vllm#57699",
        "Calls in XML with a tag missing were text, or a parameter swallowed the next one.",
        (
            "runtime/chat/tool_formats/test_xml.py::test_no_argument_swallows_another",
            "runtime/chat/tool_formats/test_xml.py::test_examples",
            "runtime/chat/tool_formats/test_xml.py::test_a_tag_that_is_missing_within_a_whole_output_makes_text",
        ),
    ),
    Fault(
        "vercel/ai#9601",
        "Schemas were refused for keywords that every value satisfies.",
        (
            "service/openai/chat/test_reported_requests.py::test_it_is_answered",
            "runtime/grammar/test_neutral_keywords.py::test_they_are_honoured_by_doing_nothing",
            "runtime/grammar/test_neutral_keywords.py::test_leaving_them_out_changes_no_verdict",
            "runtime/grammar/test_neutral_keywords.py::test_a_format_that_is_not_known_is_a_remark_if_asked",
            "runtime/grammar/test_schema_suite.py::test_a_schema_is_followed_or_refused_by_name",
        ),
    ),
    Fault(
        "vllm-project/vllm#51665, vllm-project/vllm#15125, huggingface/transformers#27923",
        "penstock check and penstock serve disagreed, and what broke a checkpoint was not told.",
        (
            "runtime/loading/test_broken_files.py::test_each_file_is_broken_in_turn",
            "runtime/loading/test_checkpoint.py::test_a_tied_head_that_differs_is_not_tied",
            "runtime/text/test_text.py::test_where_a_chat_template_is_read",
        ),
    ),
    Fault(
        "huggingface/trl#6028",
        "Updates whose tensors had another prefix than the checkpoint's were refused.",
        (
            "runtime/updating/test_names.py::test_names_begin_as_they_may_in_a_checkpoint",
            "runtime/updating/test_names.py::test_a_part_with_the_embeddings_tells_how_names_begin",
            "runtime/updating/test_names.py::test_a_name_that_only_begins_otherwise_is_refused_with_the_models",
        ),
    ),
    Fault(
        "encode/uvicorn#1264",
        "A half-close had no documented answer; heads without Host and wrong codings were taken.",
        (
            "service/openai/test_going_away.py::test_a_client_that_closes_its_side_is_one_that_goes_away",
            "service/openai/listening/test_hostile.py::test_heads_are_checked_as_http_wants_it",
        ),
    ),
    Fault(
        "meta-llama/PurpleLlama#161",
        "data: URLs with line breaks, spaces or escapes were refused.",
        (
            "clients/client/generation/test_client_images.py::test_the_data_of_a_url_is_read_as_browsers_read_it",
            "clients/client/generation/test_client_images.py::test_bytes_come_through_every_spelling_of_their_url",
        ),
    ),
    Fault(
        "microsoft/autogen#2457",
        "Names of turns, and neutral values of fields that have no effect, were refused.",
        (
            "service/openai/chat/test_reported_requests.py::test_it_is_answered",
            "service/openai/test_wishes.py::test_neutral_values_ask_for_nothing",
            "service/openai/test_wishes.py::test_each_refused_field_has_a_neutral_value_or_none_at_all",
        ),
    ),
    Fault(
        "seen beside these",
        "Errors had names of Python's classes, or lines of a grammar that nobody wrote.",
        (
            "service/openai/test_reading.py::test_messages_speak_of_json_and_not_of_how_it_is_checked",
            "runtime/grammar/test_enforced_schemas.py::test_a_strict_tool_is_refused_with_the_place",
        ),
    ),
]


@pytest.mark.parametrize("node", sorted({node for fault in FAULTS for node in fault.held_by}))
def test_each_test_is_there(node: str) -> None:
    path, _, name = node.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in [it.name for it in tree.body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)]
