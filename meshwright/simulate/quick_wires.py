"""Messages of the quick sweep: which link each kind of value uses, how long it occupies it, and who orders it."""

from __future__ import annotations

import numpy as np

from meshwright.ir.action import Kind, Op
from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Cluster, Duplex
from meshwright.ir.schedule import Schedule
from meshwright.simulate.quick_program import Ints, QuickLists


class QuickWires:
    """The costs of messages, the links that they use, and the lists of channels that order them."""

    def __init__(self, lists: QuickLists, schedule: Schedule, price: Price, cluster: Cluster) -> None:
        slots = lists.slots
        costs = [price.message_s(s.value, s.source, s.target) if s.source != s.target else (0.0, 0.0) for s in slots]
        self.busy = np.array([busy for busy, _ in costs] or [0.0])
        self.latency = np.array([latency for _, latency in costs] or [0.0])
        self.source = np.array([s.source for s in slots] or [0], np.int64)
        self.target = np.array([s.target for s in slots] or [0], np.int64)
        half = cluster.duplex is Duplex.HALF
        ends = [tuple(sorted((s.source, s.target))) if half else (s.source, s.target) for s in slots]
        links = {pair: n for n, pair in enumerate(dict.fromkeys(ends))}
        lanes = {key: n for n, key in enumerate(dict.fromkeys((s.source, s.target, s.value.kind) for s in slots))}
        self.link = np.array([links[pair] for pair in ends] or [0], np.int64)
        self.line = np.array([lanes[s.source, s.target, s.value.kind] for s in slots] or [0], np.int64)
        self.links, self.lanes = max(1, len(links)), max(1, len(lanes))
        self.carried = np.zeros(max(1, len(slots)), np.bool_)
        slot_of = {(s.value.kind, s.value.stage, s.value.replica, s.value.part): n for n, s in enumerate(slots)}
        self.channels: list[Ints] = []
        for channel in schedule.channels:
            values = []
            for producer in channel.producers:
                forward = producer.op is Op.F
                boundary = producer.stage if forward else producer.stage - 1
                slot = slot_of[Kind.ACT if forward else Kind.GRAD, boundary, producer.replica, producer.part]
                self.carried[slot] = True
                values.append(slot * lists.microbatches + producer.mb)
            self.channels.append(np.array(values, np.int64))
