"""What bench.kernels counts, against numbers worked out by hand, and a tiny run of all of it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from bench.kernels import __main__ as command
from bench.kernels import products, stacks
from bench.kernels.lines import (
    SHAPES,
    Line,
    Product,
    Result,
    decode_line,
    layer,
    prefill_line,
    product_line,
)
from bench.kernels.lines import products as products_of
from bench.kernels.picture import drawing, roof
from bench.kernels.results import HEAD, from_record, latest, record, results, table, with_layers
from bench.measures import caches, limits
from bench.measures.cost import Machine, Work
from bench.measures.limits import PEAKS, Limits, buffer_bytes_for, operations_per_s, read_bytes_per_s
from penstock.runtime.models.registry import parse_config
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.library import Isa
from tests.support.models.configs import attentions, one_layer, published

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = Machine(operations_per_s=100e9, bytes_per_s=10e9)


@pytest.mark.parametrize("name", ["4B", "8B"])
def test_shapes_are_the_published_ones(name):
    config = parse_config(published(f"Qwen3-{name}"))
    attention, shape = attentions(config)[0], SHAPES[name]
    assert (shape.hidden, shape.inner) == (config.hidden_size, one_layer(config).mlp.intermediate_size)
    assert (shape.heads, shape.kv_heads) == (attention.num_heads, attention.num_kv_heads)
    assert shape.head_dim == attention.head_dim


def test_products_of_a_layer():
    # Qwen3-4B: 32 and 8 heads of 128, hidden 2560, inner 9728.
    sizes = {product.name: (product.outputs, product.inputs) for product in products_of(SHAPES["4B"])}
    assert sizes == {
        "qkv": (6144, 2560),
        "o": (2560, 4096),
        "gate+up": (19456, 2560),
        "down": (2560, 9728),
    }


def test_work_of_a_product():
    product = Product("o", outputs=32, inputs=64)
    assert product_line("0.6B", product, "bfloat16", 3).work == Work(2 * 32 * 64 * 3, 2 * 32 * 64)
    assert product_line("0.6B", product, "int8", 3).work == Work(2 * 32 * 64 * 3, 32 * 64 + 4 * 32)


def test_work_of_attention():
    # Qwen3-0.6B: 16 heads, 8 of keys and of values, of 128. A position costs 4 * 16 * 128 operations and has
    # 2 * 8 * 128 numbers.
    assert decode_line("0.6B", "bfloat16", 4, 100).work == Work(8192 * 400, 2 * 2048 * 400)
    assert decode_line("0.6B", "int8", 4, 100).work == Work(8192 * 400, (2048 + 2 * 8 * 4) * 400)
    # 512 tokens after 88 others: token i attends to 88 + i positions, i from 1 to 512.
    pairs = sum(88 + i for i in range(1, 513))
    assert prefill_line("0.6B", "bfloat16", 600).work == Work(8192 * pairs, 2 * 2048 * 600)
    with pytest.raises(ValueError, match="context"):
        prefill_line("0.6B", "bfloat16", 511)


def result(work, seconds, part="o", by="AVX2", kind="product", rows=1):
    return Result(Line(kind, "0.6B", part, "bfloat16", rows, 0, work), by, seconds, MACHINE)


def test_the_limit_that_binds():
    # 10 ms of reading and 1 ms of multiplying, in 20 ms.
    reads = result(Work(100e6, 100e6), 0.02)
    assert (reads.binds, reads.least_s, reads.share) == ("memory", 0.01, 0.5)
    multiplies = result(Work(2e9, 100e6), 0.025)
    assert (multiplies.binds, multiplies.least_s, multiplies.share) == (
        "multiplying",
        0.02,
        pytest.approx(0.8),
    )


def test_a_layer_is_its_four_products():
    parts = [result(Work(1e9, 10e6), 0.02, part) for part in ("qkv", "o", "gate+up", "down")]
    whole = layer(parts)
    assert (whole.line.part, whole.line.work, whole.seconds) == ("layer", Work(4e9, 40e6), 0.08)
    assert with_layers(parts) == [*parts, whole]
    assert with_layers(parts[:3]) == parts[:3]
    # The machine was half as fast when the second was measured: 10 + 20 ms of multiplying, 1 + 2 of reading.
    slow = replace(parts[1], machine=Machine(operations_per_s=50e9, bytes_per_s=5e9))
    whole = layer([parts[0], slow])
    assert whole.least_s == pytest.approx(0.03)
    assert whole.share == pytest.approx(0.75)
    assert whole.line.work.bytes_read / whole.machine.bytes_per_s == pytest.approx(0.003)


def test_records_are_read_as_they_were_written():
    one = result(Work(1e9, 10e6), 0.02)
    assert from_record(json.loads(json.dumps(record(one) | {"commit": "abc"}))) == one


def test_the_later_record_of_a_line_counts():
    first, second = (result(Work(1e9, 10e6), seconds) for seconds in (0.02, 0.03))
    other = result(Work(1e9, 10e6), 0.01, by="AVX512")
    assert latest([first, other, second]) == [second, other]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--contexts", "256", "512"], "chunks of 512 tokens"),
        (["--rows", "0"], "must be at least 1"),
        (["--rival", "env", "--formats", "int8"], "--rival: it computes the products of"),
        (["--rival", "nowhere"], "--rival: nowhere/bin/python is not there"),
        (["--only", "products", "--contexts", "512"], "--contexts: only attention has them"),
        (["--only", "prefill", "--rows", "4"], "--rows: prefill attention has one row"),
        (["--from", "records.jsonl", "--shapes", "4B"], "--shapes is for measuring"),
        (["--from", "records.jsonl", "--out", "more.jsonl"], "--out is for measuring"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, reason, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert reason in capsys.readouterr().err


def test_everybody_is_compared_with_the_limits_of_what_multiplies():
    rates = {"fma_256": 1e9, "madd_256": 2e9, "fma_512": 3e9, "dpwssd_512": 4e9, "dpbusd_512": 5e9}
    machine = Limits(10e9, {peak: rates[peak.function] for peak in PEAKS if peak.function in rates})
    seconds = {"AVX2": 1.0, "AVX512": 0.5, "oneDNN float32": 2.0}
    line = product_line("0.6B", Product("o", 32, 64), "bfloat16", 1)
    found = {each.by: each.machine for each in results((line, seconds), machine)}
    assert {by: machine.operations_per_s for by, machine in found.items()} == {
        "AVX2": 1e9,
        "AVX512": 3e9,
        "oneDNN float32": 3e9,
    }
    # AVX2 has nothing for bytes, so that int16 is its best; attention widens an int8 cache to int16.
    seconds = {"AVX2": 1.0, "AVX512": 1.0}
    weights = product_line("0.6B", Product("o", 32, 64), "int8", 1)
    for each, best in ((weights, 5e9), (decode_line("0.6B", "int8", 1, 64), 4e9)):
        avx2, avx512 = results((each, seconds), machine)
        assert (avx2.machine.operations_per_s, avx512.machine.operations_per_s) == (2e9, best)
    assert weights.multiplied(Isa.AMX) == "bfloat16"  # two products of bytes take as long
    assert product_line("0.6B", Product("o", 32, 64), "int4", 1).multiplied(Isa.AMX) == "int8"
    with pytest.raises(ValueError, match="nothing is known of multiplying bfloat16"):
        results((line, {"AVX2": 1.0}), Limits(10e9, {}))


def test_the_table():
    rows = table([result(Work(2e9, 100e6), 0.025), result(Work(100e6, 100e6), 0.02, rows=4)]).splitlines()
    assert rows[2] == "| o | 0.6B | bfloat16 | 1 |  | AVX2 | 25 | 4 | 80 | 80% | multiplying |"
    assert rows[3] == "| o | 0.6B | bfloat16 | 4 |  | AVX2 | 20 | 5 | 5 | 50% | memory |"


def test_a_roof():
    # 10 GB/s and 100 GFLOP/s meet at 10 operations per byte.
    assert roof(MACHINE, 1, 100, 1e9) == [(1, 10e9), (10, 100e9), (100, 100e9)]
    assert roof(MACHINE, 20, 100, 1e9) == [(20, 100e9), (100, 100e9)]
    assert roof(MACHINE, 0.01, 100, 1e9)[0] == (0.1, 1e9)  # it begins where it comes into the picture


def test_the_picture():
    found = [
        result(Work(1e9, 1e9), 0.2, "layer"),
        result(Work(1e9, 1e8), 0.02, "attention", kind="decode"),
        result(Work(1e9, 1e9), 0.3, "layer", by="oneDNN float32"),
    ]
    root = ET.fromstring(drawing(found))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    names = {"AVX2 bfloat16", "oneDNN float32", "0.6B: a layer"}
    assert {"operations per byte", "GFLOP/s", *names} <= set(texts)
    # The axes, from 1 to 16 operations per byte and from 1 to 100 GFLOP/s, meet at (70, 390) and are 480 and
    # 360 long. The results have 1, 10 and 1 operations per byte, and make 5, 50 and 3.33 GFLOP/s.
    signs = [(circle.get("cx"), circle.get("cy")) for circle in root.iter(f"{SVG}circle")]
    assert signs[:3] == [("70.0", "264.2"), ("468.6", "84.2"), ("70.0", "295.9")]
    # 10 GB/s and 100 GFLOP/s meet at 10 operations per byte.
    (roofline,) = root.iter(f"{SVG}polyline")  # a rival has no roof of its own
    assert roofline.get("points") == "70.0,210.0 468.6,30.0 550.0,30.0"
    with pytest.raises(ValueError, match="no layers"):
        drawing([result(Work(1e9, 1e9), 0.2, "o")])


def test_records_without_layers_make_no_picture(tmp_path, capsys):
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps(record(result(Work(1e9, 1e9), 0.2, "o"))) + "\n")
    assert command.main(["--from", str(records), "--plot", str(tmp_path / "plot.svg")]) == 1
    out, err = capsys.readouterr()
    assert "| o | 0.6B |" in out
    assert "bench.kernels: no layers and no attention" in err


def test_stacks_and_buffers_do_not_fit_into_the_largest_cache(tmp_path, monkeypatch):
    for index, size in (("index0", "32K\n"), ("index3", "1024M\n")):
        (tmp_path / index).mkdir()
        (tmp_path / index / "size").write_text(size)
    assert caches.largest_bytes(tmp_path) == 1 << 30
    assert caches.largest_bytes(tmp_path / "absent") == 0
    for cache, stack, buffer in ((1 << 30, 4 << 30, 512 << 20), (32 << 20, 512 << 20, 128 << 20)):
        monkeypatch.setattr(stacks, "largest_bytes", lambda cache=cache: cache)
        assert stacks.stack_bytes() == stack
        assert buffer_bytes_for(cache) == buffer
    assert buffer_bytes_for(0) == 512 << 20


def test_stacks():
    assert stacks.layers_kept(100, 250) == 3
    assert stacks.calls_per_run(3, 1.0) == 3
    assert stacks.calls_per_run(50, 8e9) == 2
    assert stacks.calls_per_run(50, 1e12) == 1
    assert list(itertools.islice(stacks.windows("abcd", 3), 3)) == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


@pytest.mark.skipif(not library.available(), reason="it needs the native kernels")
def test_limits_are_those_of_the_sets_that_the_machine_has():
    found = operations_per_s(threads=1, loops=1000)
    assert {peak.isa for peak in found} <= set(range(Isa.AVX2, library.load().penstock_best_isa() + 1))
    assert all(rate > 0 for rate in found.values())
    assert read_bytes_per_s(1, buffer_bytes=1 << 16) > 0


def test_the_limits_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(limits, "measure", lambda: Limits(29.4e9, {PEAKS[0]: 188e9}))
    assert limits.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "memory is read at 29.4 GB/s; multiplying, in GFLOP/s:",
        "- AVX2, bfloat16: 188 (float32 FMA, 256 bits)",
    ]


@pytest.mark.skipif(not library.available(), reason="it needs the native kernels")
def test_layers_lie_in_memory_of_their_own():
    layers = products.Layers(Product("o", 64, 64), "int8", least_bytes=3 * 64 * 64)
    assert len({tiles.unsafe_buffer_pointer() for tiles, _ in layers._layers}) == 3


@pytest.mark.ci
@pytest.mark.skipif(not library.available(), reason="it needs the native kernels")
def test_a_run(tmp_path, capsys, monkeypatch):
    """All kernels in all formats, with one layer each, and the same table again from the records."""
    monkeypatch.setattr("bench.kernels.turns.stack_bytes", lambda: 1 << 16)
    monkeypatch.setattr("bench.kernels.stacks._MOST_CALLS", 2)
    rates = itertools.count(10e9, 1e9)
    monkeypatch.setattr(
        "bench.measures.limits.measure", lambda: Limits(next(rates), dict.fromkeys(PEAKS, 100e9))
    )
    out, plot = tmp_path / "kernels.jsonl", tmp_path / "kernels.svg"
    shapes = ["--shapes", "0.6B", "--rows", "2", "--contexts", "512", "--rounds", "1"]
    assert command.main([*shapes, "--out", str(out)]) == 0
    first, at_once = capsys.readouterr()
    read = [from_record(json.loads(line)) for line in out.read_text().splitlines()]
    sets = 1 + library.load().penstock_best_isa() - Isa.AVX2
    products, decodes, prefills = (2 * 4, 2, 2)
    assert len(read) == (products + decodes + prefills) * sets
    assert all(each.seconds > 0 and each.share > 0 for each in read)
    # Four products and two kinds of attention in two formats, each line with its own limits.
    assert sorted({each.machine.bytes_per_s for each in read}) == [(10 + i) * 1e9 for i in range(12)]
    assert "memory is read at 10 to 21 GB/s" in first
    assert set(at_once.splitlines()) < set(first.splitlines()) | {*HEAD.splitlines()}
    assert command.main(["--from", str(out), "--layers", "--plot", str(plot)]) == 0
    again = capsys.readouterr().out
    assert set(again.splitlines()) <= set(first.splitlines())
    assert "| layer | 0.6B | int8 | 2 |" in again
    assert "| qkv |" not in again
    assert ET.fromstring(plot.read_text()).tag == f"{SVG}svg"
