"""What is counted and found in a program's HLO, against sums by hand."""

from __future__ import annotations

from tests.accelerators.hlo_bytes import moved_by, moved_bytes, widened

PROGRAM = """HloModule jit_step, is_scheduled=true

%looks (p0: bf16[1000,128], p1: s32[4]) -> bf16[4,128] {
  %p0 = bf16[1000,128]{1,0} parameter(0)
  %p1 = s32[4]{0} parameter(1)
  %same = bf16[1000,128]{1,0} bitcast(%p0)
  ROOT %gather.1 = bf16[4,128]{1,0} gather(%same, %p1), offset_dims={1}
}

%little (c0: f32[100]) -> f32[100] {
  ROOT %c0 = f32[100]{0} parameter(0)
}

%much (c1: f32[100]) -> f32[100] {
  %c1 = f32[100]{0} parameter(0)
  ROOT %negate.1 = f32[100]{0} negate(%c1)
}

%body (b: f32[100]) -> f32[100] {
  %b = f32[100]{0} parameter(0)
  ROOT %exp.1 = f32[100]{0} exponential(%b)
}

%ends (e: f32[100]) -> pred[] {
  %e = f32[100]{0} parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (table: bf16[1000,128], ids: s32[4], w: bf16[128,64], kv: bf16[9,2]) -> f32[100] {
  %table = bf16[1000,128]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  %w = bf16[128,64]{1,0} parameter(2)
  %kv = bf16[9,2]{1,0} parameter(3)
  %start = (bf16[128,64]{1,0:S(1)}, bf16[128,64]{1,0}, u32[]) copy-start(%w)
  %done = bf16[128,64]{1,0:S(1)} copy-done(%start)
  %rows = bf16[4,128]{1,0:S(1)} fusion(%table, %ids), kind=kCustom, calls=%looks
  %product = f32[4,64]{1,0} dot(%rows, %done), lhs_contracting_dims={1}
  %kernel = f32[100]{0:S(1)} custom-call(%product, %kv), custom_call_target="tpu_custom_call"
  %out = f32[100]{0} copy(%kernel)
  %loop = f32[100]{0} while(%out), condition=%ends, body=%body
  %flag = s32[] constant(0)
  ROOT %end = f32[100]{0} conditional(%flag, %loop, %loop), branch_computations={%much, %little}
}
"""


def test_each_instruction_counts_what_lies_in_the_large_memory() -> None:
    """A weight that is fetched counts once, of a table the four rows that are looked up, and the cache, which
    the kernel counts itself, not at all. Ids of 4 bytes count where they are read.
    """
    product = 4 * 64 * 4
    assert moved_by(PROGRAM, {"9,2"}) == {
        "copy-start start": 128 * 64 * 2,
        "fusion rows": 4 * 128 * 2 + 4 * 4,
        "dot product": product,
        "custom-call kernel": product,
        "copy out": 400,
        "while loop": 2 * 400,
    }
    assert moved_bytes(PROGRAM, {"9,2"}) == sum(moved_by(PROGRAM, {"9,2"}).values())


def test_of_a_condition_the_branch_that_moves_least_counts() -> None:
    other = PROGRAM.replace("{%much, %little}", "{%much, %much}")
    assert moved_bytes(other, ()) - moved_bytes(PROGRAM, ()) == 2 * 400
    named = PROGRAM.replace(
        "branch_computations={%much, %little}", "true_computation=%little, false_computation=%much"
    )
    assert moved_bytes(named, ()) == moved_bytes(PROGRAM, ())


def test_what_is_beside_counts_otherwise() -> None:
    assert moved_bytes(PROGRAM, ()) - moved_bytes(PROGRAM, {"9,2"}) == 9 * 2 * 2


def test_what_the_step_before_has_fetched_counts_once() -> None:
    early = PROGRAM.replace("copy-start(%w)", "copy-start(%w), cross_program_prefetch_index=0")
    assert moved_bytes(early, ()) == moved_bytes(PROGRAM, ())
    start = "  %start = (bf16[128,64]{1,0:S(1)}, bf16[128,64]{1,0}, u32[]) copy-start(%w)"
    both = early.replace("  ROOT %end", f"{start.replace('%start', '%next')}\n  ROOT %end")
    assert moved_bytes(both, ()) == moved_bytes(PROGRAM, ())


EXPANDS = """HloModule jit_step

%within (v: s8[64,128], y: bf16[4,128]) -> f32[4,64] {
  %v = s8[64,128]{1,0} parameter(0)
  %y = bf16[4,128]{1,0} parameter(1)
  %wide = bf16[64,128]{1,0} convert(%v)
  ROOT %made = f32[4,64]{1,0} dot(%y, %wide), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (w: s8[64,128], x: bf16[4,128]) -> f32[4,64] {
  %w = s8[64,128]{1,0} parameter(0)
  %x = bf16[4,128]{1,0} parameter(1)
  %moved = s8[128,64]{1,0} transpose(%w), dimensions={1,0}
  ROOT %product = f32[4,64]{1,0} fusion(%w, %x), kind=kOutput, calls=%within
}
"""


def test_a_weight_that_is_expanded_is_found_in_any_shape() -> None:
    """A convert within a fusion is not in memory, and one beside it is. What moves 8 bits expands nothing."""
    sizes = {64 * 128}
    assert widened(EXPANDS, sizes) == []
    alone = EXPANDS.replace("  ROOT %product", "  %other = bf16[8,8,128]{2,1,0} convert(%w)\n  ROOT %product")
    assert widened(alone, sizes) == ["convert bf16[8,8,128]"]
    assert widened(alone, {64 * 64}) == []
    by_fusion = EXPANDS.replace(
        "  ROOT %product",
        "  %both = (f32[64,128]{1,0}, s8[4]{0}) fusion(%w), kind=kLoop, calls=%within\n  ROOT %product",
    )
    assert widened(by_fusion, sizes) == ["fusion f32[64,128]"]
