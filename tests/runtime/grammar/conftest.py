"""The demo model's tokenizer and a compiler of grammars for it. Both last for the session, so that the
process that tries grammars starts only once.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.vocabulary import Vocabulary
from tests.support.schemas import RandomWriter

TOKENIZER = Path(__file__).parents[3] / "runtime/penstock/runtime/loading/demo_model/tokenizer.json"
EOS = (2041, 2039)
"""The ids of <|im_end|> and <|endoftext|>."""


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="session")
def vocabulary(backend: Tokenizer) -> Vocabulary:
    return Vocabulary.from_tokenizer(backend, 2048, EOS)


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary, backend: Tokenizer) -> Iterator[GrammarCompiler]:
    # No compile here is slow, but a busy machine may be.
    config = CompilerConfig(time_limit_s=60.0)
    compiler = GrammarCompiler(
        vocabulary, config, lambda text: backend.encode(text, add_special_tokens=False).ids
    )
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def writer(vocabulary: Vocabulary) -> RandomWriter:
    return RandomWriter(vocabulary.tokens, vocabulary.eos_token_ids)
