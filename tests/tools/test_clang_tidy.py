"""Which kernels clang-tidy reads after a change."""

from __future__ import annotations

import pytest

from penstock.runtime.ops.native.build import KERNELS, SOURCES
from tools.clang_tidy import FOR_ALL, ROOT, concerned

BELOW = str(SOURCES.relative_to(ROOT))


def test_a_source_that_has_changed_is_read_alone() -> None:
    changed = [f"{BELOW}/linear/linear.cc", "docs/index.md", "tests/support/native/emulated/cpu.cc"]
    assert [str(source) for source in concerned(changed)] == [str(SOURCES / "linear" / "linear.cc")]
    assert concerned(["docs/index.md", f"{BELOW}/linear/gone.cc"]) == []


@pytest.mark.parametrize("name", [f"{BELOW}/linear/linear_expand.h", f"{BELOW}/.clang-tidy", *FOR_ALL])
def test_all_sources_are_read_if_something_has_changed_that_all_depend_on(name: str) -> None:
    assert (ROOT / name).is_file()
    assert len(KERNELS.sources) > 10
    assert concerned(["README.md", name]) == KERNELS.sources
