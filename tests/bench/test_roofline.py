"""The roofline chart: where points and ceilings lie, what is left out, that labels can be read."""

from __future__ import annotations

import json
import sys
from itertools import combinations

import pytest

pytest.importorskip("matplotlib", reason="the chart needs matplotlib")

from pagedraft.bench.roofline import _text_box, chart_of, main, points_of, save_roofline

FACTS = {"device": "Some CPU", "threads": 2, "git": "abc1234", "date": "2026-01-01 00:00 UTC"}
CEILING = {"copy_rate": 40e9, "matmul_rate": 200e9, "read_rate": 50e9}
# As crowded as a layer is: many parts of one op near one intensity.
PARTS = ("qkv", "o", "gate_up", "down", "head", "gate_up_act", "o_norm", "down_norm")


def row(op: str, part: str, step: str, flops: float, num_bytes: float, seconds: float) -> dict:
    cost = {"flops": flops, "bytes": num_bytes}
    about = {"op": op, "part": part, "step": step, "problem": None}
    return about | cost | {"time": {"median": seconds}}


ROWS = [
    *(row("linear", part, "decode1", 1e6, 1e6, 3e-5 + 1e-6 * i) for i, part in enumerate(PARTS)),
    *(row("linear", part, "verify1", 9e6, 1.1e6, 5e-5 + 1e-6 * i) for i, part in enumerate(PARTS)),
    row("sample", "sample", "decode1", 1.2e7, 2e5, 4e-4),
    row("copy_blocks", "copy_blocks", "decode1", 0, 2e5, 1e-5),
    row("copy_blocks", "copy_blocks", "verify1", 0, 2e5, 1e-5),
    {**row("rms_norm", "norm", "decode1", 1, 1, 1), "problem": "output 0: error 1"},
]
DOCUMENT = {**FACTS, "model": "135m", "dtype": "bf16", "ceiling": CEILING, "rows": ROWS}


def lines(axes) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (*map(list, line.get_data()),) for line in axes.get_lines()}


def test_points_are_flops_over_bytes_and_seconds():
    point = points_of(DOCUMENT)[0][len(PARTS)]
    assert (point.name, point.step) == ("linear qkv", "verify1")
    assert point.intensity == pytest.approx(9 / 1.1)
    assert point.rate == pytest.approx(9e6 / 5e-5 / 1e12)


def test_what_cannot_be_drawn_is_said_once():
    points, left_out = points_of(DOCUMENT)
    assert left_out == {"no flops": ["copy_blocks"], "no time": ["rms_norm norm"]}
    assert len(points) == 2 * len(PARTS) + 1
    label = chart_of(DOCUMENT).axes[0].get_xlabel()
    assert "not shown, no flops: copy_blocks" in label
    assert "no time: rms_norm norm" in label


def test_ceiling_bends_where_both_rates_meet():
    found = lines(chart_of(DOCUMENT).axes[0])
    (low, ridge, high), heights = found["read 50 GB/s, matmul 0.2 TFLOP/s"]
    assert ridge == pytest.approx(200 / 50)
    assert heights == pytest.approx([low * 0.05, 0.2, 0.2])
    assert low < min(point.intensity for point in points_of(DOCUMENT)[0])
    assert high > max(point.intensity for point in points_of(DOCUMENT)[0])
    assert found["copy 40 GB/s"][1] == pytest.approx([low * 0.04, 0.2])


def test_products_that_do_not_judge_are_drawn_beside():
    products = {"mm": 150e9, "fbgemm_fp16": 200e9, "bf16 all through": 400e9}
    ceiling = CEILING | {"products": products}
    found = lines(chart_of(DOCUMENT | {"ceiling": ceiling}).axes[0])
    assert found["bf16 all through 0.4 TFLOP/s"][1] == [0.4, 0.4]
    assert found["mm 0.15 TFLOP/s"][1] == [0.15, 0.15]
    assert not any("fbgemm" in label for label in found)


def test_document_that_measured_copies_only_is_drawn():
    ceiling = {"copy_rate": 40e9, "matmul_rate": 200e9}
    found = lines(chart_of(DOCUMENT | {"ceiling": ceiling}).axes[0])
    assert "copy 40 GB/s, matmul 0.2 TFLOP/s" in found


def test_every_part_has_a_label_that_covers_no_other():
    figure = chart_of(DOCUMENT)
    renderer = figure.canvas.get_renderer()
    texts = figure.axes[0].texts
    assert {text.get_text() for text in texts} == {f"linear {part}" for part in PARTS} | {"sample"}
    boxes = [_text_box(text, renderer) for text in texts]
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    window = figure.bbox
    assert all(window.contains(box.x0, box.y0) and window.contains(box.x1, box.y1) for box in boxes)


def test_nothing_to_draw_is_an_error_that_the_bench_survives(tmp_path):
    document = DOCUMENT | {"rows": ROWS[-1:]}
    with pytest.raises(ValueError, match="expected a case with a time and flops"):
        chart_of(document)
    assert save_roofline(document, tmp_path / "a.json").startswith("no roofline chart: rows")


def test_without_matplotlib_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = save_roofline(DOCUMENT, tmp_path / "a.json")
    assert line == "no roofline chart: matplotlib is not installed"
    assert list(tmp_path.iterdir()) == []


def test_command_writes_beside_the_json(tmp_path, capsys):
    source = tmp_path / "kernels-135m-bf16.json"
    source.write_text(json.dumps(DOCUMENT))
    assert main([str(source)]) == 0
    target = tmp_path / "kernels-135m-bf16-roofline.png"
    assert str(target) in capsys.readouterr().out
    assert target.read_bytes().startswith(b"\x89PNG")


def test_command_fails_where_there_is_no_chart(tmp_path, capsys):
    source = tmp_path / "kernels.json"
    source.write_text(json.dumps(DOCUMENT | {"rows": []}))
    assert main([str(source)]) == 1
    assert "no roofline chart" in capsys.readouterr().out
