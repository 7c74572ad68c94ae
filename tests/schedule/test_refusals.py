"""What a schedule does not take is refused with the knob, its value and the remedy."""

from __future__ import annotations

import pytest
from shapes import dealt, loop, straight, vee

from pdmpi.errors import InputError
from pdmpi.plan.plan import ScheduleChoice
from pdmpi.schedule.dump import parse
from pdmpi.schedule.evaluation import evaluation
from pdmpi.schedule.registry import SCHEDULES, generate

REFUSED = [
    ({"name": "gpip"}, straight(1), 1, "schedule.name = 'gpip' is unknown; did you mean 'gpipe'"),
    (
        {"recompute": "allways"},
        straight(1),
        1,
        "schedule.recompute = 'allways' is unknown; did you mean 'always'",
    ),
    (
        {},
        straight(2, 1),
        9,
        "9 minibatches do not fill rounds over 2-1 replicas: take a multiple of 2, 8 or 10",
    ),
    ({}, straight(2, 3), 4, "take a multiple of 6, 6"),
    ({}, straight(1), 0, "0 minibatches"),
    (
        {"microbatches": 4},
        straight(1, 1),
        4,
        "schedule.microbatches = 4: schedule 'pipedream' steps after every",
    ),
    ({}, loop(2, 2), 4, "schedule 'pipedream' plays one stage a rank, but the plan gives rank 0 several"),
    ({"name": "2bw", "microbatches": 3}, straight(1, 1, 1, 1), 4, "at least as many .* set it to 4 or more"),
    ({"name": "2bw", "microbatches": 2}, straight(2, 2), 4, "set it to 4 or more"),
    ({"name": "gpipe", "microbatches": 3}, straight(2, 1), 1, "microbatches = 3 cannot be shared .* 2 or 4"),
    ({"name": "1f1b", "microbatches": 1}, straight(2, 1), 1, "take a multiple of 2, 2$"),
    ({"name": "1f1b"}, straight(1), 0, "0 minibatches: take at least 1"),
    (
        {"name": "gpipe", "extra_in_flight": 1},
        straight(1),
        1,
        "extra_in_flight = 1 means nothing to .* set it to 0",
    ),
    ({"name": "zb-v"}, straight(1, 1), 1, "lays 2 stages out as a V over ranks .* on 0, 1; plan again"),
    ({"name": "zb-v"}, vee(1, 1), 0, "0 minibatches"),
    ({"name": "interleaved"}, vee(2), 1, "deals 4 stages to ranks in turn .* on 0, 1, 1, 0"),
    ({"name": "interleaved"}, dealt([0, 1, 0]), 1, "deals 3 stages"),
    (
        {"name": "interleaved", "microbatches": 2},
        straight(2, 1),
        1,
        "needs the same number of replicas .* not 2-1",
    ),
    ({"name": "data-parallel"}, straight(1, 1), 1, "takes one stage, but the plan has 2"),
    ({"name": "data-parallel"}, straight(3), 4, "take a multiple of 3, 3 or 6"),
    ({"name": "model-parallel"}, straight(2, 1), 2, "takes no replicas .2-1."),
]


@pytest.mark.parametrize(("choice", "topology", "number", "message"), REFUSED)
def test_refused(choice, topology, number, message):
    with pytest.raises(InputError, match=message):
        generate(ScheduleChoice(**choice), topology, number)


def test_nothing_to_evaluate():
    with pytest.raises(InputError, match="0 microbatches to evaluate"):
        evaluation(straight(1), 0)


def test_every_schedule_takes_one_rank_but_the_v():
    for name in SCHEDULES:
        if name != "zb-v":
            assert len(generate(ScheduleChoice(name=name), straight(1), 2).rows[0])


@pytest.mark.parametrize(("text", "message"), [
    ("", "no text of a program"),
    ("something", "line 1 of the program, 'something': a program starts with"),
    ("pdmpi program 2\nnonsense a=1", "line 2 .* 'nonsense' begins no line"),
    ("pdmpi program 2\nrank 1", "rank 0 is due"),
    ("pdmpi program 2\nrank 0\n  FORWARD s0 k0", "FORWARD takes version, weights"),
    ("pdmpi program 2\nrank 0\n  FLY s0 k0", "'FLY'"),
    ("pdmpi program 2\nstage ranks=0 per_update=1", "'weights'"),
    ("pdmpi program 2\nedge source=0 target=x gradient=1", "invalid literal"),
])  # fmt: skip
def test_text_that_is_no_program_names_its_line(text, message):
    with pytest.raises(InputError, match=message):
        parse(text)
