"""The loops of the quick sweep. With numba they are compiled and cached on disk; without it they run as plain Python.

`order` is `sweep` of `ir/analysis/order.py`: each list advances as soon as its inputs exist. `times` is the lowering of messages
and the engine in one pass over that order: a message is sent after its value exists, and after the message two before it on the
same channel was read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    from numba import njit as njit

    COMPILED = True
except ImportError:  # the extra `fast` is not installed

    def njit(**_: bool) -> Any:  # type: ignore[no-redef]
        """Leaves a function as it is."""
        return lambda function: function

    COMPILED = False


@njit(cache=True)
def _start(values: Any, free: float, time: Any, delay: Any, late: Any, travels: bool, each: int, count: int) -> Any:
    """Returns when an entry that reads these values can start, and the first value that does not exist yet, or -1."""
    start = free
    for value in values:
        if value < 0:
            continue
        made = time[value]
        if made < 0.0:
            return start, value
        if travels:
            made += delay[value // each] if value < count else late[(value - count) // each]
        start = max(start, made)
    return start, -1


@njit(cache=True)
def order(
    first: Any,  # where each list begins
    reads: Any,  # [entry, 2] ids of values; ids from `count` on have arrived over a channel
    writes: Any,
    duration: Any,  # by entry
    event: Any,  # by entry: the reduction that it takes part in, -1 for none
    members: Any,  # by event: how many lists take part
    delay: Any,  # by slot: how long a value travels between two workers
    late: Any,  # by slot: ... after a channel has carried it
    workers: int,
    each: int,  # values of a slot
    count: int,  # values in all
) -> Any:
    """Returns entries in the order in which they run, and the time that sorts them; fewer if the lists block each other."""
    lists = len(first) - 1
    at = first[:-1].copy()
    free = np.zeros(lists)
    time = np.full(2 * count, -1.0)
    waits = np.full(2 * count, -1, np.int64)  # the list that waits for a value
    arrived = np.zeros(len(members), np.int64)
    begins = np.zeros(len(members) + 1, np.int64)
    for e in range(len(members)):
        begins[e + 1] = begins[e] + members[e]
    here = np.zeros(begins[-1], np.int64)
    ran = np.empty(len(duration), np.int64)
    key = np.empty(len(duration))
    done = 0
    stack = np.empty(lists + 1, np.int64)
    top = 0
    for w in range(lists - 1, -1, -1):
        stack[top] = w
        top += 1
    while top > 0:
        top -= 1
        w = stack[top]
        while at[w] < first[w + 1]:
            entry = at[w]
            start, missing = _start(reads[entry], free[w], time, delay, late, w < workers, each, count)
            if missing >= 0:
                waits[missing] = w
                break
            joint = event[entry]
            if joint >= 0 and members[joint] > 1:
                free[w] = start
                here[begins[joint] + arrived[joint]] = w
                arrived[joint] += 1
                if arrived[joint] < members[joint]:
                    break
                joined = here[begins[joint] : begins[joint + 1]]
                together = free[joined].max()
                for m in joined:
                    free[m] = together + duration[at[m]]
                    ran[done], key[done] = at[m], free[m]
                    done += 1
                    at[m] += 1
                    if m != w:
                        stack[top] = m
                        top += 1
                continue
            finish = start + duration[entry]
            free[w] = finish
            ran[done] = entry
            key[done] = finish if w < workers else start
            done += 1
            at[w] += 1
            for column in range(2):
                value = writes[entry, column]
                if value >= 0:
                    time[value] = finish
                    if waits[value] >= 0:
                        stack[top] = waits[value]
                        top += 1
                        waits[value] = -1
    return ran[:done], key[:done]


@njit(cache=True)
def messages(
    sequence: Any,
    list_of: Any,
    reads: Any,
    writes: Any,
    source: Any,
    target: Any,
    line: Any,
    carried: Any,
    lines: int,
    workers: int,
    each: int,
    count: int,
) -> Any:
    """Places messages: for each position of the sequence the first message after it, the next of each, and its slot."""
    length = len(sequence)
    head = np.full(length, -1, np.int64)
    tail = np.full(length, -1, np.int64)
    after = np.full(count + 1, -1, np.int64)  # by value: the next message at the same position
    made = np.full(2 * count, -1, np.int64)
    before = np.full((lines, 2), -1, np.int64)  # by line: where its last two messages are read
    for position in range(length):
        entry = sequence[position]
        w = list_of[entry]
        for column in range(2):
            value = reads[entry, column]
            if value < 0:
                continue
            if w >= workers:  # a channel carries it now
                point = position
            elif value >= count:
                continue
            else:
                slot = value // each
                if source[slot] == w or carried[slot]:
                    continue
                point = made[value]
                k = line[slot]
                if before[k, 0] > point:
                    point = before[k, 0]
                if point >= position:
                    point = made[value]
                before[k, 0] = before[k, 1]
                before[k, 1] = position
            if head[point] < 0:
                head[point] = value
            else:
                after[tail[point]] = value
            tail[point] = value
        for column in range(2):
            value = writes[entry, column]
            if value >= 0:
                made[value] = position
    return head, after


@njit(cache=True)
def times(
    sequence: Any,
    list_of: Any,
    reads: Any,
    kind: Any,
    event: Any,
    first_member: Any,
    member: Any,
    duration: Any,
    head: Any,
    after: Any,
    source: Any,
    link: Any,
    busy: Any,
    latency: Any,
    links: int,
    workers: int,
    each: int,
    count: int,
    starts: Any,
) -> Any:
    """Returns the end of the last entry, message or reduction, and when each worker computed last.

    `kind` is 0 for computation, 1 for a reduction, 2 for the norm, 3 for an update.
    """
    computed = np.zeros(workers)
    reduced = np.zeros(workers)
    free = np.zeros(links)
    there = np.zeros(count)
    ran = np.zeros(len(first_member), np.bool_)
    norm = 0.0
    last = 0.0
    worked = np.zeros(workers)
    for position in range(len(sequence)):
        entry = sequence[position]
        w = list_of[entry]
        if w < workers:
            what = kind[entry]
            if what == 1 or what == 2:
                e = event[entry]
                if not ran[e]:
                    ran[e] = True
                    start = 0.0
                    for k in range(first_member[e], first_member[e + 1]):
                        m = member[k]
                        start = max(start, max(computed[m], reduced[m]))
                    end = start + duration[entry]
                    for k in range(first_member[e], first_member[e + 1]):
                        reduced[member[k]] = end
                    last = max(last, end)
                    if what == 2:
                        norm = end
            else:
                start = computed[w]
                if what == 3:
                    start = max(start, norm)
                else:
                    for column in range(2):
                        value = reads[entry, column]
                        if value >= 0:
                            value = value if value < count else value - count
                            start = max(start, there[value])
                computed[w] = start + duration[entry]
                starts[entry] = start
                last = max(last, computed[w])
                if what == 0:
                    worked[w] = computed[w]
        value = head[position]
        while value >= 0:
            slot = value // each
            k = link[slot]
            start = max(free[k], computed[source[slot]])
            free[k] = start + busy[slot]
            there[value] = start + busy[slot] + latency[slot]
            last = max(last, there[value])
            value = after[value]
    return last, worked
