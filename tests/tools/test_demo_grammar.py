"""The demo model's grammar is right, and the checkpoint in the repository is whole.

The grammar is all that the demo model knows: a wrong sum in it would be a wrong answer for ever.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "runtime" / "penstock" / "runtime" / "loading" / "demo_model"
MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def load():
    """Import a module of tools/demo_model, which is no installed package."""
    sys.path.insert(0, str(ROOT))
    try:
        yield lambda name: importlib.import_module(f"tools.demo_model.{name}")
    finally:
        sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def documents(load):
    """Return the first stream, and some of each late one: all of it is taught, so all of it has to be
    right.
    """
    grammar = load("grammar")
    late = [d for kind in sorted(grammar.LATE) for d in grammar.late_documents(8, 300, kind)]
    return [*grammar.documents(seed=7, num=3000), *late]


def turns(documents):
    """Every (question, answer) without tools."""
    for document in documents:
        if isinstance(document, dict) and not document["tools"]:
            spoken = [message["content"] for message in document["messages"] if message["role"] != "system"]
            yield from zip(spoken[::2], spoken[1::2], strict=True)


def test_the_seed_decides_every_text(load, documents):
    grammar = load("grammar")
    assert list(grammar.documents(7, 200)) == documents[:200]
    assert list(grammar.documents(8, 200)) != documents[:200]


def test_sums_are_right(documents):
    sums = [answer for _, answer in turns(documents) if "=" in answer]
    assert len({text.split(" = ")[0] for text in sums}) > 300
    for text in sums:
        left, right, total = map(int, re.findall(r"\d+", text))
        assert text == f"{left} + {right} = {total}."
        assert left + right == total


def test_the_answer_is_about_the_numbers_asked(documents):
    for question, answer in turns(documents):
        if "=" in answer and (numbers := re.findall(r"\d+", question)):
            assert sorted(numbers) == sorted(re.findall(r"\d+", answer)[:2])


def test_counts_go_from_the_first_number_to_the_last_by_one(documents):
    counts = [(q, a) for q, a in turns(documents) if re.fullmatch(r"\d+(, \d+)+\.", a)]
    assert len(counts) > 100
    for question, answer in counts:
        numbers = [int(number) for number in re.findall(r"\d+", answer)]
        steps = {after - before for before, after in itertools.pairwise(numbers)}
        assert steps in ({1}, {-1})
        asked = [int(number) for number in re.findall(r"\d+", question)]
        assert not asked or asked[-1] == numbers[-1]
        assert len(asked) < 2 or asked[0] == numbers[0]


def test_tool_calls_are_json_for_a_tool_that_was_offered(load, documents):
    render = load("data").render
    seen = 0
    for document in documents:
        if not (isinstance(document, dict) and document["tools"]):
            continue
        names = {tool["function"]["name"]: tool["function"]["parameters"] for tool in document["tools"]}
        text = render(document).partition("<|im_start|>user")[2]  # past the form shown in the system turn
        for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL):
            call = json.loads(body)
            assert set(call["arguments"]) <= set(names[call["name"]]["properties"])
            assert set(names[call["name"]].get("required", [])) <= set(call["arguments"])
            seen += 1
    assert seen > 300


def test_the_answer_after_a_tool_repeats_city_and_temperature(documents):
    for document in documents:
        if not (isinstance(document, dict) and document["tools"]):
            continue
        cities: list[str] = []
        degrees: list[str] = []
        for message in document["messages"]:
            if message.get("tool_calls"):
                calls = [call["function"]["arguments"] for call in message["tool_calls"]]
                cities, degrees = [next(iter(arguments.values())) for arguments in calls], []
            elif message["role"] == "tool":
                degrees += re.findall(r"-?\d+", message["content"])
            elif message["role"] == "assistant" and cities:
                assert all(f"in {city}." in message["content"] for city in cities)
                assert re.findall(r"-?\d+", message["content"]) == degrees
                cities = []


def test_stories_name_their_hero_throughout_and_leave_no_slot_open(load):
    stories = load("stories")
    for plot in stories.PLOTS:
        for seed in range(20):
            text = stories.story(random.Random(seed), kind="fox", name="Vixi", plot=plot)
            assert text.count("Vixi") >= 3
            assert "fox" in text.split("\n")[0]
            assert not re.search(r"[\[\]{}|]|  ", text)


def test_cities_to_be_copied_are_not_in_the_grammar(load):
    words = load("phrases").words
    assert not set(words("unseen_cities")) & {*words("cities"), *words("long_cities")}


def test_chats_count_in_the_loss_only_where_the_assistant_speaks(load):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    data = load("data")
    chat = [
        ("system", "Be helpful."),
        ("user", "hi"),
        ("assistant", "Hello!"),
        ("user", "3+4="),
        ("assistant", "7."),
    ]
    messages = [{"role": role, "content": content} for role, content in chat]
    (example,) = data.encode(tokenizer, [data.render({"messages": messages, "tools": None})])
    counted = tokenizer.decode(example.ids[example.weights > 0].tolist(), skip_special_tokens=False)
    assert counted == "Hello!<|im_end|>7.<|im_end|>"


def test_packing_keeps_documents_whole_and_apart(load):
    np, data = importlib.import_module("numpy"), load("data")
    sizes = [5, 9, 3, 8, 2, 20, 7]
    examples = [data.Example(np.full(n, n, np.int32), np.ones(n, np.float32)) for n in sizes]
    rows = data.pack(examples, length=12, seed=0)
    found = []
    for tokens, segments, weights in zip(rows.tokens, rows.segments, rows.weights, strict=True):
        for number in set(segments[segments >= 0].tolist()):
            inside = segments == number
            assert set(tokens[inside].tolist()) == {int(inside.sum())}
            assert weights[inside].sum() == inside.sum() - 1  # nothing predicts a first token
            found.append(int(inside.sum()))
        assert not weights[segments < 0].any()
    assert sorted(found) == sorted(n for n in sizes if n <= 12)


def test_the_checkpoint_fits_its_budget_and_its_configuration(load):
    safetensors = pytest.importorskip("safetensors")
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= MAX_BYTES
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"]
    model = load("model")
    wanted = model.parameter_shapes(model.ModelConfig.from_hf(config))
    with safetensors.safe_open(str(CHECKPOINT / "model.safetensors"), framework="numpy") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        assert {name: tuple(part.get_shape()) for name, part in found.items()} == wanted
        assert {part.get_dtype() for part in found.values()} == {"BF16"}


def test_the_end_tokens_and_the_template_belong_together(load):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    config = json.loads((CHECKPOINT / "config.json").read_text())
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert config["eos_token_id"] == ends[0]
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    template = (CHECKPOINT / "chat_template.jinja").read_text()
    assert template == load("tokenizer").TEMPLATE.read_text()


@pytest.mark.parametrize(
    "text", ["Once upon a time", "3 + 14 = 17.", "São Paulo  —  日本 😀\n\n\ttab", " a\r\nb "]
)
def test_the_tokenizer_gives_every_text_back_with_digits_apart(text):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert all(len(token) == 1 for token in encoding.tokens if any(c.isdigit() for c in token))
