"""Parts of the engine bench: options, prompts, agreement, ratios, samples."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from pagedraft.bench import engine_cases, engine_ttft
from pagedraft.bench.engine_cases import AIMS, EDITS, Case, CaseResult, aim_of, unjudged
from pagedraft.bench.engine_cell import HEADERS, Cell
from pagedraft.bench.engine_options import parse
from pagedraft.bench.engine_prompts import PromptSource
from pagedraft.bench.engine_runs import (
    Clock,
    GateError,
    Run,
    Side,
    agreement,
    check_same,
    first_difference,
    our_side,
    run_ours,
)
from pagedraft.bench.engine_steps import StepFacts, StepTimes
from pagedraft.scheduler.llm import LLM
from pagedraft.scheduler.request import RequestStats
from pagedraft.tests.model.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("cpu_path")
PROMPTS = [[5, 6, 7, 8] * 3, [9, 3] * 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("engine_parts") / "model"
    save_tiny(path, "llama")
    return path


@pytest.fixture
def llm(folder):
    return LLM(folder, speculate="off", kv_tokens=512, block_size=8)


def facts(drafted, accepted):
    return StepFacts(1.0, 0.0, tuple(drafted), tuple(accepted))


@pytest.mark.parametrize(
    "one, other, place",
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)],
)
def test_first_difference(one, other, place):
    assert first_difference(one, other) == place


def test_agreement_is_counted_up_to_our_eos():
    ours = [[5, 6, 7], [5, 2, 9], [5, 6, 7], [5, 6, 7]]
    theirs = [[5, 6, 7], [5, 8, 8], [5, 6, 8], [4, 6, 7]]
    found = agreement(ours, theirs, eos_ids=[2])
    assert (found.num_same, found.num_prompts, found.first) == (2, 4, (0, 3))
    assert str(found) == "2 of 4, token 0"
    assert str(agreement(ours[:1], theirs[:1], [])) == "1 of 1"


def test_the_gate_names_prompt_and_token():
    with pytest.raises(GateError, match="k=2 changed the output of prompt 1 at token 2: no speed"):
        check_same("k=2", [[1], [1, 2, 3]], [[1], [1, 2, 4]])


class BrokenDrafter:
    is_lookup = True
    name = "broken"

    def propose(self, sequences, num_drafts):
        raise RuntimeError("out of ideas")

    def on_free(self, sequence):
        pass


def test_a_drafter_that_fails_is_no_slow_drafter(llm):
    broken = LLM(llm.target, drafter=BrokenDrafter(), k=2, kv_tokens=512, block_size=8)
    with pytest.raises(GateError, match="prompt 0: .*out of ideas.*no speed is reported"):
        run_ours(broken, PROMPTS, 6)


def side(name, seconds, **options):
    """A side whose rounds take these seconds, each with four tokens."""
    rounds = iter(seconds)
    return Side(name, lambda prompts, num: Run([[1, 2, 3, 4]], next(rounds)), **options)


def measured(case, sides, rounds):
    return engine_cases.measure(case, sides, 4, rounds, Clock(), 1.0, [])


def test_ratios_are_of_one_round():
    case = Case(EDITS, [[[1]]], ("plain",))
    ours, theirs = side("plain", [1, 2, 4]), side("x plain", [1, 4, 4], peer="x", mode="plain")
    result = measured(case, [ours, theirs], 2)
    assert result.speeds(ours) == [2.0, 1.0]
    assert result.ratios(ours, theirs) == [2.0, 1.0]


def test_sides_begin_in_turn():
    sides = [side(name, []) for name in "abc"]
    names = ["".join(one.name for one in engine_cases.rotated(sides, by)) for by in range(4)]
    assert names == ["abc", "bca", "cab", "abc"]


def test_aims_are_of_ours_with_drafts_where_the_case_has_them():
    case = Case(EDITS, [[[1]]], ("plain", "lookup"), has_drafts=True)
    plain, drafting = side("plain", []), side("auto", [], has_drafts=True)
    other = side("llama.cpp plain", [], peer="llama.cpp", mode="plain")
    assert aim_of(case, plain, other) is None
    assert aim_of(case, drafting, other).ratio == 1.5
    assert aim_of(case, drafting, side("v", [], peer="vLLM", mode="plain")) is None
    result = CaseResult(case, [plain, drafting, other], {"llama.cpp plain": [Run([[1]], 1.0)]})
    lines = unjudged([result], {"transformers": "transformers did not run: why not"})
    assert len(lines) == len(AIMS) - 1
    assert "code edits over llama.cpp lookup >= 1: llama.cpp has not run it" in lines
    assert (
        "single stream over transformers plain >= 2.5: transformers did not run: why not" in lines
    )


def test_a_side_that_does_not_tell_has_no_first_tokens(llm):
    silent = side("x plain", [1] * 9, peer="x", mode="plain")
    left_out = []
    prompts = [[5] * 8, [6] * 8, [7] * 8]
    ours = our_side("plain", llm)
    result = engine_ttft.measure(prompts, [ours, silent], 3, Clock(), 1.0, left_out)
    assert result.theirs == []
    assert len(result.seconds["plain"]) == 3
    assert left_out == ["TTFT of 8 tokens, x plain: it does not tell when a token came"]


def test_latency_is_told_by_token_and_by_step():
    """One request: a step of one token, one of four after 0.4 s, one of one after 0.2 s."""
    stats = RequestStats(submitted=0.0, emissions=[(1.0, 1), (1.4, 4), (1.6, 1)])
    stats.passes = [(None, 0, 0, 0, ""), ("x", 4, 4, 3, ""), ("x", 4, 2, 0, "")]
    cell, control = Cell(1, "x", 4), Cell(1, "x", 0)
    cell.add(Run([[1] * 6], 2.0, stats=[stats]), [facts([4], [3]), facts([2], [0])])
    control.add(Run([[1] * 6], 6.0, stats=[]), [facts([0], [0])] * 5)
    assert cell.itl == pytest.approx([0.1] * 4 + [0.2])
    assert cell.gaps == pytest.approx([0.4, 0.2])
    assert (cell.ttft, cell.tokens_per_pass) == ([1.0], 2.0)
    assert cell.acceptance == [0.5, 0.5, 1.0, 0.0]
    cell.finish(control, cell, StepTimes({1: 1.0, 5: 2.0}))
    assert cell.speedups == [2.5]
    assert cell.predicted == pytest.approx(5 / (2.0 + 1.5))
    assert len(cell.table_row()) == len(HEADERS)


def test_a_control_is_not_predicted():
    control = Cell(1, "x", 0)
    control.add(Run([[1]], 1.0), [facts([0], [0])])
    control.finish(control, control, StepTimes({1: 1.0, 3: 2.0}))
    assert (control.speedups, control.predicted) == ([1.0], None)


def test_prompts_without_a_tokenizer(llm):
    source = PromptSource(llm, 16)
    assert not source.has_text
    assert len(source.text(64)) == 64
    windows = source.windows(475, 3)
    assert [len(window) for window in windows] == [112] * 3  # what 128 positions have room for
    assert len({tuple(window[:8]) for window in windows}) == 3
    mixed = source.of_kind("mixed", 5)
    assert len({tuple(prompt) for prompt in mixed}) == 5
    with pytest.raises(ValueError, match="expected less than 128 positions, got 128"):
        PromptSource(llm, 128)


def test_prompts_of_text():
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()), chat_template=None)
    target = SimpleNamespace(config=SimpleNamespace(max_positions=8192, vocab_size=256))
    source = PromptSource(SimpleNamespace(tokenizer=tokenizer, target=target), 64)
    assert bytes(source.text(14)) == b"The lighthouse"
    chat = [bytes(prompt).decode() for prompt in source.chat(20)]
    assert len(set(chat)) == 20
    assert chat[8] == f"{chat[0]} (2)"
    mixed = [bytes(prompt).decode() for prompt in source.of_kind("mixed", 4)]
    assert [text.startswith("Rewrite this Python code") for text in mixed[::2]] == [True, True]
    assert mixed[1::2] == chat[:2]
    windows = source.windows(475, 2)
    assert [len(window) for window in windows] == [475, 475]
    assert windows[0] != windows[1]


WRONG = {
    "rounds": (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
    "tokens": (["--tokens", "1"], "--tokens: expected at least 2"),
    "batch": (["--batches", "4", "0"], "--batches: expected at least 1 each"),
    "length": (["--lengths", "-1"], "--lengths"),
    "word": (["--lengths", "many"], "expected a number of drafts or auto, got 'many'"),
    "drafter": (["--drafters", "suffix", "guess"], "--drafters: expected some of .*, got 'guess'"),
    "peer": (["--peers", "ollama"], "--peers: expected some of .*, got 'ollama'"),
    "alpha": (["--alphas", "1.5"], "--alphas: expected probabilities from 0 to 1, got 1.5"),
    "seconds": (["--seconds", "0"], "--seconds: expected more than 0, got 0"),
    "part": (["--parts", "serving"], "invalid choice: 'serving'"),
}


@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        parse(arguments)
    assert raised.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_options():
    quick, full = parse(["--quick"]), parse(["--lengths", "auto", "4", "4", "--peers", "none"])
    assert (quick.seconds, quick.batches, quick.draft) == (170.0, [1, 4], "demo-draft")
    assert quick.peers is None
    assert quick.ttft_short[0] >= 100
    assert (full.seconds, full.lengths, full.peers) == (None, [0, 4, "auto"], [])
    assert parse(["--draft", "none"]).draft is None
    assert parse(["--model", "x"]).draft is None
