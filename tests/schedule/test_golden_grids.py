"""The grids of the papers' figures, one line a rank."""

from __future__ import annotations

import importlib
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import loop, straight, vee

from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.execution import UNIT_COSTS, execute
from pdmpi.schedule.order import parse_actions, text_of
from pdmpi.schedule.program import Op, Program, Topology
from pdmpi.schedule.registry import generate
from pdmpi.schedule.text import grid


def drawn(name: str, topology: Topology, number: int, **choice) -> list[str]:
    program = generate(ScheduleChoice(name=name, **choice), topology, number)
    return [line.split("  ", 1)[1].rstrip() for line in grid(program).splitlines()]


def ticks(program: Program) -> int:
    cost = np.zeros(len(Op), int)
    for op, ticks_of_op in UNIT_COSTS.items():
        cost[op] = ticks_of_op
    starts = execute(program).start
    return max(int((s + cost[rows[:, 0]]).max()) for s, rows in zip(starts, program.rows, strict=True))


GOLDEN = {
    # PipeDream, figure 4 (SOSP 2019): the start-up state, then 1F1B.
    "pipedream": (straight(1, 1, 1, 1), 6, {}, """
        F0 F1 F2 F3 .  .  .  .  .  .  B0 -  F4 B1 -  F5 B2 -  .  B3 -  .  B4 -  .  B5 -
        .  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  F4 B2 -  F5 B3 -  .  B4 -  .  B5 -  .  .
        .  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  F4 B3 -  F5 B4 -  .  B5 -  .  .  .  .
        .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  F4 B4 -  F5 B5 -  .  .  .  .  .  .
    """),
    # PipeDream, figure 8: 1F1B-RR on a 2-1 configuration.
    "pipedream 2-1": (straight(2, 1), 6, {}, """
        F0 F2 .  .  B0 -  .  .  .  F4 B2 -  .  .  .  .  B4 -  .  .  .
        F1 F3 .  .  .  .  .  B1 -  F5 .  .  .  B3 -  .  .  .  .  B5 -
        .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  F4 B4 -  F5 B5 -  .  .
    """),
    # GPipe, figure 2c (NeurIPS 2019).
    "gpipe": (straight(1, 1, 1, 1), 1, {"microbatches": 4}, """
        F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B3 -  B2 -  B1 -  B0 -
        .  F0 F1 F2 F3 .  .  .  .  .  .  B3 -  B2 -  B1 -  B0 -  .  .
        .  .  F0 F1 F2 F3 .  .  .  B3 -  B2 -  B1 -  B0 -  .  .  .  .
        .  .  .  F0 F1 F2 F3 B3 -  B2 -  B1 -  B0 -  .  .  .  .  .  .
    """),
    "gpipe except-last": (straight(1, 1), 1, {"microbatches": 3, "recompute": "except-last"}, """
        F0 F1 F2 .  .  .  B2 -  R1 B1 -  R0 B0 -
        .  F0 F1 F2 B2 -  R1 B1 -  R0 B0 -  .  .
    """),
    # PipeDream-2BW, figure 2 (ICML 2021): no flush between updates.
    "2bw": (straight(1, 1), 2, {"microbatches": 2}, """
        F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -
        .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .
    """),
    # DAPPLE, figure 3 (PPoPP 2021); PipeDream-Flush.
    "1f1b": (straight(1, 1, 1), 2, {"microbatches": 3}, """
        F0 F1 F2 .  .  .  .  B0 -  .  B1 -  .  B2 -  F3 F4 F5 .  .  .  .  B3 -  .  B4 -  .  B5 -
        .  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -  .  .  .  F3 F4 .  .  B3 -  F5 B4 -  .  B5 -  .  .
        .  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .  .  .  .  .  F3 B3 -  F4 B4 -  F5 B5 -  .  .  .  .
    """),
    # Megatron-LM, figure 4 (SC 2021): two stages a rank.
    "interleaved": (loop(2, 2), 1, {"microbatches": 2}, """
        0F0 0F1 2F0 2F1 .   .   2B0 -   .   2B1 -   0B0 -   0B1 -
        .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1B0 -   1B1 -   .   .
    """),
    # Zero bubble, figure 3 (ICLR 2024).
    "zb-h1": (straight(1, 1, 1, 1), 1, {"microbatches": 5}, """
        F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4
        .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4
        .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4
        .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4
    """),
    # ZB-V, figure 3 (NeurIPS 2024).
    "zb-v": (vee(2), 1, {"microbatches": 4}, """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """),
    "data-parallel": (straight(3), 6, {}, """
        F0 B0 -  F3 B3 -
        F1 B1 -  F4 B4 -
        F2 B2 -  F5 B5 -
    """),
    "model-parallel": (straight(1, 1, 1), 2, {}, """
        F0 .  .  .  .  .  .  B0 -  F1 .  .  .  .  .  .  B1 -
        .  F0 .  .  .  B0 -  .  .  .  F1 .  .  .  B1 -  .  .
        .  .  F0 B0 -  .  .  .  .  .  .  F1 B1 -  .  .  .  .
    """),
}  # fmt: skip


@pytest.mark.parametrize("label", GOLDEN)
def test_grid(label):
    topology, number, choice, expected = GOLDEN[label]
    lines = drawn(label.split()[0], topology, number, **choice)
    assert [line.rstrip(" .") for line in lines] == [
        line.rstrip(" .") for line in dedent(expected).strip().splitlines()
    ]


@pytest.mark.parametrize(("name", "module", "topology", "number", "microbatches"), [
    ("pipedream", "pipedream", straight(1, 1, 1, 1), 10, 1),
    ("gpipe", "gpipe", straight(1, 1, 1), 1, 4),
    ("1f1b", "flushed_1f1b", straight(1, 1, 1), 1, 4),
    ("zb-h1", "zb_h1", straight(1, 1, 1), 1, 5),
    ("model-parallel", "model_parallel", straight(1, 1), 2, 1),
])  # fmt: skip
def test_the_picture_in_the_source_is_what_runs(name, module, topology, number, microbatches):
    text = importlib.import_module(f"pdmpi.schedule.{module}").__doc__
    lines = drawn(name, topology, number, microbatches=microbatches)
    shown = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert len(shown) == len(lines)
    for line, start in zip(lines, shown, strict=True):
        assert line.rstrip(" .").startswith(start.rstrip(" ."))


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 24))
def test_flushed_pipelines_take_the_closed_form(num_stages, microbatches):
    topology = straight(*[1] * num_stages)
    for name in ("gpipe", "1f1b"):
        program = generate(ScheduleChoice(name=name, microbatches=microbatches), topology, 1)
        assert ticks(program) == 3 * (microbatches + num_stages - 1)
    program = generate(ScheduleChoice(name="zb-h1", microbatches=microbatches), topology, 1)
    if microbatches >= 2 * num_stages - 1:  # Qi et al. 2023, table 1: (p - 1) (TF + TB - TW)
        assert ticks(program) == 3 * microbatches + num_stages - 1


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_interleaving_cuts_the_bubble(num_places, chunks, groups):
    microbatches = num_places * groups
    choice = ScheduleChoice(name="interleaved", microbatches=microbatches)
    program = generate(choice, loop(num_places, chunks), 1)
    assert ticks(program) == 3 * microbatches * chunks + 3 * (num_places - 1)


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(0, 8))
def test_zb_v_is_never_idle_between_its_first_and_last_step(half, more):
    choice = ScheduleChoice(name="zb-v", microbatches=2 * half + more)
    program = generate(choice, vee(half), 1)
    assert ticks(program) == 6 * choice.microbatches + half - 1
    for start, rows in zip(execute(program).start, program.rows, strict=True):
        work = start[np.isin(rows[:, 0], list(UNIT_COSTS))]
        assert work.max() - work.min() <= 6 * choice.microbatches - 1 + (half - 1)
    most = max(sum(program.slots[s].saved for s in (p, 2 * half - 1 - p)) for p in range(half))
    assert most <= 2 * half + 1


def test_the_text_of_an_order_is_the_same_order():
    text = "2F0 2F1 2I0 2W0 2B11"
    assert text_of(parse_actions(text)) == text
    assert parse_actions("").shape == (0, 3)
    with pytest.raises(ValueError, match="'F2' is no action"):
        parse_actions("0F0 F2")
