"""Follows each copy of each value through a blocking run: what every worker holds, reads and still has at the end."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.ir.action import Kind, Op, Transfer, Value, actions
from meshwright.ir.analysis.carried_values import Load, carried
from meshwright.ir.analysis.effects import ACTIVATIONS, CONSUMED
from meshwright.ir.analysis.order import Flow, Place
from meshwright.passes.violation import Law, Violation


class ValueCopies:
    """The live values of each worker during a run: at most one copy each, created by a write or a receive, ended by a read."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.ways = carried(flow.schedule)
        self.live: list[set[int]] = [set(values) for values in flow.initial]
        self.ends = [value.kind in CONSUMED for value in flow.values]
        self.counts = [value.kind in ACTIVATIONS for value in flow.values]
        self.now = [0] * len(flow.lists)
        self.peak = [0] * len(flow.lists)
        self.waiting: dict[tuple[int, int, Kind], int] = {}
        self.came: list[dict[int, tuple[int, int, Kind]]] = [{} for _ in flow.lists]
        self.depth = 0

    def follow(self, event: tuple[Place, ...]) -> Violation | None:
        """Apply one event: an action, both ends of a message, or a collective."""
        if len(event) == 2 and type(entry := self.flow.lists[event[0][0]][event[0][1]]) is Transfer:
            return self._message(event[0], event[1], entry)
        for worker, index in event:
            if broken := self._entry(worker, index):
                return broken
        return None

    def _entry(self, worker: int, index: int) -> Violation | None:
        live, ends, counts, came = self.live[worker], self.ends, self.counts, self.came[worker]
        reads, writes = self.flow.reads[worker][index], self.flow.writes[worker][index]
        made = ended = 0
        for value in reads:
            if value not in live:
                return self._unread(worker, index, value)
        for value in writes:
            if value in live:
                return self._second(worker, index, value)
            live.add(value)
            made += counts[value]
        for value in reads:
            if ends[value]:
                live.discard(value)
                ended += counts[value]
            if value in came:
                self.waiting[came.pop(value)] -= 1
        if made or ended:
            self._count(worker, index, made, ended)
        return None

    def _message(self, sender: Place, receiver: Place, entry: Transfer) -> Violation | None:
        value = self.flow.reads[sender[0]][sender[1]][0]
        if value not in self.live[sender[0]]:
            return self._unread(*sender, value)
        if fault := self._uncarried(sender[0], receiver[0], entry.value, value):
            return Violation(Law.MESSAGE, *sender, entry, fault)
        if value in self.live[receiver[0]]:
            return self._second(*receiver, value)
        if self.ends[value]:
            self.live[sender[0]].discard(value)
        self.live[receiver[0]].add(value)
        channel = (sender[0], receiver[0], entry.value.kind)
        self.came[receiver[0]][value] = channel
        self.waiting[channel] = ahead = self.waiting.get(channel, 0) + 1
        self.depth = max(self.depth, ahead)
        return None

    def _uncarried(self, sender: int, receiver: int, value: Value, number: int) -> str | None:
        """Returns why a value cannot be sent from one worker to another, or None if it can."""
        way = self.ways.get(value.kind)
        if way is None:
            return f"{value} stays on its worker: only {', '.join(self.ways)} are sent between workers here"
        if not way.relayed and number in self.came[sender]:
            return f"worker {sender} only received {value}; {value.kind.value} must be sent by the worker that makes it"
        schedule = self.flow.schedule
        if way.load is Load.BUFFER and receiver not in schedule.runners[value.stage]:
            verb = "run" if schedule.owners else "hold"
            return f"worker {receiver} does not {verb} unit {value.stage} and has no buffer for {value}"
        return None

    def _count(self, worker: int, index: int, made: int, ended: int) -> None:
        """Counts a worker's live activations. R and I convert an activation, which does not add a second one."""
        swaps = sum(1 for a in actions(self.flow.lists[worker][index]) if a.op is Op.R or a.op is Op.I) if made and ended else 0
        self.peak[worker] = max(self.peak[worker], self.now[worker] + made - swaps)
        self.now[worker] += made - ended

    def _second(self, worker: int, index: int, value: int) -> Violation:
        reason = f"makes {self.flow.values[value]} while worker {worker} still holds it"
        return Violation(Law.COPY, worker, index, self.flow.lists[worker][index], reason)

    def _unread(self, worker: int, index: int, value_id: int) -> Violation:
        value = self.flow.values[value_id]
        entry = self.flow.lists[worker][index]
        verb = "sends" if isinstance(entry, Transfer) else "reads"
        law = Law.VERSION if value.kind is Kind.PARAM else Law.READ
        if value.kind is Kind.PARAM:
            why = f"version {value.version} of unit {value.stage} does not exist there yet"
        elif any(value_id in values for values in self.flow.writes[worker][:index]):
            why = "it has already been consumed"
        elif any(value_id in values for writes in self.flow.writes for values in writes):
            why = f"worker {worker} does not have it at that point"
        else:
            why = "no worker makes it"
        return Violation(law, worker, index, entry, f"{verb} {value}, but {why}")

    def leftover(self) -> Iterator[Violation]:
        """At the end of a step with a flush, only parameters and sums may be left."""
        for worker, live in enumerate(self.live):
            for value in live:
                if self.ends[value]:
                    index = self._writer(worker, value)
                    reason = f"makes {self.flow.values[value]}, which no worker uses"
                    yield Violation(Law.LEFTOVER, worker, index, self.flow.lists[worker][index], reason)

    def _writer(self, worker: int, value: int) -> int:
        return next(index for index, values in enumerate(self.flow.writes[worker]) if value in values)
