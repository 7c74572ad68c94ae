"""Runs a program on symbols: an oracle that shares no code with lowering and checker.

Every slot holds what was last put there.  Ranks take turns in random order; a message moves at
a random moment between its posts and the first of its waits.  Anything used that is not what
the semantics ask for raises `Wrong`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from pdmpi.schedule.program import ALL_STAGES, NO_SLOT, Instruction, Kind, Op, Program

EMPTY = "empty"


class Wrong(Exception):
    """What the program does is not what it should do."""


class Stuck(Exception):
    """All ranks wait."""


@dataclass
class Message:
    source: tuple = ()  # (rank, buffer, slot)
    target: tuple = ()
    sent: bool = False
    posted: bool = False
    moved: bool = False
    copy: object = None  # what an eager send keeps


@dataclass
class Machine:
    program: Program
    rng: random.Random
    rendezvous: bool = True
    memory: dict = field(default_factory=lambda: defaultdict(lambda: EMPTY))
    gradients: dict = field(default_factory=lambda: defaultdict(list))
    updates: dict = field(default_factory=lambda: defaultdict(list))
    messages: dict = field(default_factory=lambda: defaultdict(list))
    counts: dict = field(default_factory=lambda: defaultdict(int))
    arrived: dict = field(default_factory=lambda: defaultdict(set))

    def run(self) -> dict:
        """Run to the end; return, by (stage, version), which (microbatch, version) each update averaged."""
        program = self.program
        for stage, ranks in enumerate(program.topology.ranks):
            for rank in ranks:
                self.memory[rank, f"weights{stage}", 0] = 0
        lists = [list(program.instructions(rank)) for rank in range(len(program.rows))]
        at = [0] * len(lists)
        idle: set[int] = set()
        while True:
            live = [r for r in range(len(lists)) if at[r] < len(lists[r]) and r not in idle]
            if not live:
                break
            rank = self.rng.choice(live)
            if self.step(rank, lists[rank][at[rank]]):
                at[rank] += 1
                idle.clear()
            else:
                idle.add(rank)
        if any(at[r] < len(lists[r]) for r in range(len(lists))):
            raise Stuck(str({r: str(lists[r][at[r]]) for r in range(len(lists)) if at[r] < len(lists[r])}))
        for key, stream in self.messages.items():
            for message in stream:
                if not (message.sent and message.posted):
                    raise Wrong(f"message {message} of {key} is left over")
        if any(self.gradients.values()):
            raise Wrong("gradients without an update")
        return dict(self.updates)

    def step(self, rank: int, i: Instruction) -> bool:
        if i.op in (Op.POST_RECV, Op.WAIT_RECV, Op.POST_SEND, Op.WAIT_SEND):
            return self.message(rank, i)
        if i.op is Op.WAIT_REDUCE:
            return self.reduce(rank, i)
        getattr(self, i.op.name.lower())(rank, i)
        return True

    def expect(self, place: tuple, value: object, why: Instruction) -> None:
        if self.memory[place] != value:
            raise Wrong(f"{why}: {place} holds {self.memory[place]}, not {value}")

    # -- messages

    def message(self, rank: int, i: Instruction) -> bool:
        channel = self.program.channels[i["channel"]]
        sending = i.op in (Op.POST_SEND, Op.WAIT_SEND)
        key = (i["channel"], rank, i["peer"]) if sending else (i["channel"], i["peer"], rank)
        stream = self.messages[key]
        kind = "act" if channel.kind is Kind.ACTIVATION else "grad"
        side = "out" if sending else f"in{i['channel']}"
        place = (rank, f"{kind}{side}{i.stage}", i["slot"])
        if i.op in (Op.POST_SEND, Op.POST_RECV):
            number = self.counts[key, i.op]
            self.counts[key, i.op] += 1
            while len(stream) <= number:
                stream.append(Message())
            message = stream[number]
            if sending:
                message.source, message.sent = place, True
            else:
                message.target, message.posted = place, True
                self.memory[place] = "being received"
            if (key, i.op, i["slot"]) in self.counts:
                raise Wrong(f"{i}: the slot's last message was not waited for")
            self.counts[key, i.op, i["slot"]] = number
            if self.rng.random() < 0.5:
                self.move(message)
            return True
        post = Op.POST_SEND if sending else Op.POST_RECV
        if (key, post, i["slot"]) not in self.counts:
            raise Wrong(f"{i}: nothing was posted")
        number = self.counts[key, post, i["slot"]]
        message = stream[number]
        ready = message.sent and (message.posted or (sending and not self.rendezvous))
        if not ready:
            return False
        if sending and not message.posted:
            message.copy = self.memory[message.source]
        self.move(message)
        del self.counts[key, post, i["slot"]]
        return True

    def move(self, message: Message) -> None:
        if message.sent and message.posted and not message.moved:
            self.memory[message.target] = message.copy or self.memory[message.source]
            message.moved = True

    # -- computations

    def channels(self, stage: int, kind: Kind, incoming: bool) -> list[int]:
        return [
            c
            for c, channel in enumerate(self.program.channels)
            if channel.kind is kind and (channel.target_stage if incoming else channel.source_stage) == stage
        ]

    def weights(self, rank: int, i: Instruction) -> None:
        self.expect((rank, f"weights{i.stage}", i["weights"]), i["version"], i)

    def together(self, rank: int, i: Instruction) -> None:
        """Where replicas sum statistics: all have met, and run the same turn of the same computation."""
        ranks = self.program.topology.ranks[i.stage]
        if not any(group.statistics and group.stage == i.stage for group in self.program.groups):
            return
        number, self.memory[rank, f"met{i.stage}"] = self.memory[rank, f"met{i.stage}"], EMPTY
        turn = self.memory.setdefault(("turn", i.stage, number), (i.op, i.microbatch // len(ranks)))
        if number == EMPTY or turn != (i.op, i.microbatch // len(ranks)):
            raise Wrong(f"{i}: meeting {number} was for {turn}")

    def inputs(self, rank: int, i: Instruction) -> None:
        for c in self.channels(i.stage, Kind.ACTIVATION, True):
            source = self.program.channels[c].source_stage
            self.expect((rank, f"actin{c}{i.stage}", i["input"]), ("act", source, i.microbatch), i)

    def forward(self, rank: int, i: Instruction) -> None:
        if rank != self.program.topology.rank(i.stage, i.microbatch):
            raise Wrong(f"{i} on rank {rank}")
        self.counts["F", i.stage, i.microbatch] += 1
        self.together(rank, i)
        self.weights(rank, i)
        self.inputs(rank, i)
        if self.channels(i.stage, Kind.ACTIVATION, False):
            self.memory[rank, f"actout{i.stage}", i["output"]] = ("act", i.stage, i.microbatch)
        if i["saved"] != NO_SLOT:
            kept = ("saved", i.microbatch, i["version"], i["input"])
            self.memory[rank, f"saved{i.stage}", i["saved"]] = kept
        self.memory[rank, f"ran{i.stage}", i.microbatch] = (i["version"], i["input"])

    def recompute(self, rank: int, i: Instruction) -> None:
        self.weights(rank, i)
        self.inputs(rank, i)
        self.expect((rank, f"ran{i.stage}", i.microbatch), (i["version"], i["input"]), i)
        kept = ("saved", i.microbatch, i["version"], i["input"])
        self.memory[rank, f"saved{i.stage}", i["saved"]] = kept

    def take(self, rank: int, i: Instruction) -> None:
        self.weights(rank, i)
        version, slot = self.memory[rank, f"ran{i.stage}", i.microbatch]
        self.expect((rank, f"saved{i.stage}", i["saved"]), ("saved", i.microbatch, version, slot), i)
        if version != i["version"]:
            raise Wrong(f"{i}: the forward used version {version}")
        for c in self.channels(i.stage, Kind.ACTIVATION, True):  # autograd may keep views of the input
            source = self.program.channels[c].source_stage
            self.expect((rank, f"actin{c}{i.stage}", slot), ("act", source, i.microbatch), i)

    def backward_input(self, rank: int, i: Instruction) -> None:
        self.take(rank, i)
        self.together(rank, i)
        self.counts["B", i.stage, i.microbatch] += 1
        for c in self.channels(i.stage, Kind.GRADIENT, True):
            source = self.program.channels[c].source_stage
            self.expect((rank, f"gradin{c}{i.stage}", i["grad_in"]), ("grad", source, i.microbatch), i)
        if self.channels(i.stage, Kind.GRADIENT, False):
            self.memory[rank, f"gradout{i.stage}", i["grad_out"]] = ("grad", i.stage, i.microbatch)

    def backward_weight(self, rank: int, i: Instruction) -> None:
        self.take(rank, i)
        self.counts["W", i.stage, i.microbatch] += 1
        self.memory[rank, f"saved{i.stage}", i["saved"]] = EMPTY
        self.gradients[rank, i.stage].append((i.microbatch, i["version"]))

    def backward(self, rank: int, i: Instruction) -> None:
        self.backward_input(rank, i)
        self.backward_weight(rank, i)

    # -- updates

    def post_reduce(self, rank: int, i: Instruction) -> None:
        self.counts["reduce", rank, i["group"]] += 1

    def reduce(self, rank: int, i: Instruction) -> bool:
        group = self.program.groups[i["group"]]
        number = self.counts["reduced", rank, i["group"]]
        if self.counts["reduce", rank, i["group"]] != number + 1:
            raise Wrong(f"{i}: no reduction was posted")
        arrived = self.arrived[i["group"], number]
        arrived.add(rank)
        if len(arrived) < len(group.ranks):
            return False
        if group.statistics:
            self.counts["reduced", rank, i["group"]] += 1
            self.memory[rank, f"met{i.stage}"] = number
            return True
        if group.stage == ALL_STAGES:
            return self.joined(rank, i, number)
        if ("sum", i["group"], number) not in self.memory:
            whole = [pair for r in group.ranks for pair in self.gradients[r, i.stage]]
            self.memory["sum", i["group"], number] = sorted(whole)
        self.counts["reduced", rank, i["group"]] += 1
        self.memory[rank, f"reduced{i.stage}", number] = True
        self.gradients[rank, i.stage] = list(self.memory["sum", i["group"], number])
        return True

    def joined(self, rank: int, i: Instruction, number: int) -> bool:
        """Every rank has come: the gradients that each update averages are there, and none is made."""
        self.counts["reduced", rank, i["group"]] += 1
        topology = self.program.topology
        for stage, ranks in enumerate(topology.ranks):
            if ("norm", number, stage) not in self.memory:
                held = {k for r in ranks for k, _ in self.gradients[r, stage]}
                per_update = self.program.microbatches_per_update[stage]
                if held != set(range(number * per_update, (number + 1) * per_update)):
                    raise Wrong(f"{i}: stage {stage} brings the norm of {sorted(held)}")
                self.memory["norm", number, stage] = True
        return True

    def update(self, rank: int, i: Instruction) -> None:
        self.expect((rank, f"weights{i.stage}", i["read"]), i["version"] - 1, i)
        self.memory[rank, f"weights{i.stage}", i["write"]] = i["version"]
        averaged = sorted(self.gradients[rank, i.stage])
        self.gradients[rank, i.stage] = []
        per_update = self.program.microbatches_per_update[i.stage]
        due = list(range((i["version"] - 1) * per_update, i["version"] * per_update))
        if [k for k, _ in averaged] != due:
            raise Wrong(f"{i}: averages {averaged}, not microbatches {due[0]} to {due[-1]}")
        before = self.updates.setdefault((i.stage, i["version"]), averaged)
        if before != averaged:
            raise Wrong(f"{i}: replicas average different gradients")


def run(program: Program, seed: int = 0, rendezvous: bool = True) -> dict:
    """Run a program; raise `Wrong` or `Stuck`; return what each update averaged."""
    machine = Machine(program, random.Random(seed), rendezvous)
    updates = machine.run()
    for stage in range(program.topology.num_stages):
        for k in range(program.num_microbatches):
            backwards = 1 if program.microbatches_per_update[stage] else 0
            for letter, due in (("F", 1), ("B", backwards), ("W", backwards)):
                if machine.counts[letter, stage, k] != due:
                    raise Wrong(
                        f"{letter} of microbatch {k} at stage {stage}: {machine.counts[letter, stage, k]}"
                    )
    return updates
