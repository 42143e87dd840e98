"""Paged KV memory, compiled: how many blocks are free, and what the freed ones still hold, oldest first."""

from typing import Any

import numpy as np

from dcut.jit import compiled

Rows = Any
"""A structured array or a row of it: a checker of types knows nothing of their fields."""

NOBODY = -1
"""Owner of free blocks that hold nothing anyone could use again."""

MEMORY = np.dtype(
    [
        ("num_blocks", np.int64),  # usable ones: a server keeps one more for padding
        ("num_free", np.int64),  # in the queue of free blocks, whatever they hold
        ("head", np.int64),  # number of the oldest stretch in the queue
        ("tail", np.int64),  # number that the next stretch will have
        ("block_size", np.int64),  # tokens
        ("unit_blocks", np.int64),  # blocks of a unit, the part of a prompt that a hash stands for; 0: none
    ]
)
STRETCH = np.dtype([("owner", np.int64), ("num_blocks", np.int64)])  # blocks that were freed together
UNIT = np.dtype([("num_users", np.int64), ("stretch", np.int64)])  # by hash; where it lies when unused

_STRETCHES = 65_536  # remembered at least; beyond, the oldest content is forgotten, not its blocks


def new_memory(
    num_blocks: int, block_size: int, num_units: int = 0, unit_tokens: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An empty memory: MEMORY [1], STRETCH [ring], UNIT [num_units]. unit_tokens: behind each hash."""
    memory = np.zeros(1, MEMORY)
    stretches = np.zeros(_STRETCHES + 2 * num_units, STRETCH)
    units = np.zeros(num_units, UNIT)
    units["stretch"] = -1
    memory[0] = (num_blocks, num_blocks, 0, 1, block_size, unit_tokens // block_size if num_units else 0)
    stretches[0] = (NOBODY, num_blocks)
    return memory, stretches, units


@compiled
def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens need."""
    return (num_tokens + block_size - 1) // block_size


@compiled
def release(memory: Rows, stretches: Rows, owner: int, num_blocks: int) -> int:
    """Put blocks at the end of the queue, whose content `owner` may ask for again; the stretch's number."""
    m = memory[0]
    if m.tail - m.head == len(stretches):  # forget what the oldest holds
        oldest = stretches[m.head % len(stretches)]
        m.head += 1
        after = stretches[m.head % len(stretches)]
        after.num_blocks += oldest.num_blocks
        after.owner = NOBODY
    stretch = stretches[m.tail % len(stretches)]
    stretch.owner = owner
    stretch.num_blocks = num_blocks
    m.num_free += num_blocks
    m.tail += 1
    return m.tail - 1


@compiled
def take(memory: Rows, stretches: Rows, num_blocks: int) -> None:
    """Use the blocks that were freed longest ago; of a stretch the last first, as they were freed."""
    m = memory[0]
    m.num_free -= num_blocks
    while num_blocks > 0:
        stretch = stretches[m.head % len(stretches)]
        if stretch.num_blocks > num_blocks:
            stretch.num_blocks -= num_blocks
            return
        num_blocks -= stretch.num_blocks
        stretch.num_blocks = 0
        m.head += 1


@compiled
def surviving(memory: Rows, stretches: Rows, number: int, owner: int) -> int:
    """Leading blocks of a stretch that still hold what `owner` left there."""
    stretch = stretches[number % len(stretches)]
    return stretch.num_blocks if number >= memory[0].head and stretch.owner == owner else 0


@compiled
def withdraw(memory: Rows, stretches: Rows, number: int, num_blocks: int) -> None:
    """Take leading blocks of a stretch out of the queue, with what they hold."""
    stretch = stretches[number % len(stretches)]
    stretch.num_blocks -= num_blocks
    stretch.owner = NOBODY
    memory[0].num_free -= num_blocks


@compiled
def is_cached(memory: Rows, stretches: Rows, units: Rows, unit: int) -> bool:
    """Whether the blocks of a unit are in memory, used or not."""
    return (
        units[unit].num_users > 0
        or surviving(memory, stretches, units[unit].stretch, unit) == memory[0].unit_blocks
    )


@compiled
def use_unit(memory: Rows, stretches: Rows, units: Rows, unit: int) -> None:
    """Hold a unit that is cached."""
    if units[unit].num_users == 0:
        withdraw(memory, stretches, units[unit].stretch, memory[0].unit_blocks)
    units[unit].num_users += 1


@compiled
def leave_unit(memory: Rows, stretches: Rows, units: Rows, unit: int) -> None:
    """Let go of a unit; its blocks become free with its last user."""
    units[unit].num_users -= 1
    if units[unit].num_users == 0:
        units[unit].stretch = release(memory, stretches, unit, memory[0].unit_blocks)
