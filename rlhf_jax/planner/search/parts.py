"""Define the parts of a machine that a call may have, and which of them are equivalent.

A machine is cut into blocks, a power of two of them. A part is aligned: half of the machine, a
quarter, and so on down to a block; or three quarters of such a part, at its beginning or its end.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_jax.planner.search.schedule import Option, Placed


def powers_of_two(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, up to `most`."""
    yield from (1 << power for power in range(most.bit_length()))


def part_sizes(blocks: int) -> list[int]:
    """Return the possible numbers of blocks of a part, the fewest first."""
    threes = [3 * quarter for quarter in powers_of_two(blocks // 4)]
    return sorted([*powers_of_two(blocks), *threes])


def is_aligned(first: int, size: int) -> bool:
    """Return whether a range of blocks from `first` on is a part."""
    return first % size == 0 if size % 3 else first % (size // 3 * 4) in (0, size // 3)


def part_starts(size: int, blocks: int) -> list[int]:
    """Return the first blocks of all parts of one size."""
    return [first for first in range(blocks - size + 1) if is_aligned(first, size)]


def missing_quarter(option: Option) -> tuple[int, int]:
    """Return the first block and the size of the quarter that an option of three leaves free."""
    size = option.blocks // 3
    begins = option.first % (4 * size) == 0
    return (option.ends if begins else option.first - size), size


def surroundings(option: Option, chosen: Placed, blocks: int) -> tuple[tuple[int, ...], ...]:
    """Return what the parts around an option, each twice as large, share with chosen calls.

    For three quarters they are the parts around the missing one. Two options of one size with equal
    surroundings are equivalent: their parts below the first common one share all of a call or
    nothing, and may be swapped.
    """
    first, size = (option.first, option.blocks) if option.blocks % 3 else missing_quarter(option)
    shares_around = []
    while size < blocks:
        start = first // size * size
        shared = (
            max(0, min(one.ends, start + size) - max(one.first, start)) for one in chosen.values()
        )
        shares_around.append(tuple(shared))
        size *= 2
    return tuple(shares_around)


def turned(chosen: Placed, option: Option) -> dict[str, Option] | None:
    """Return an equivalent choice with the half that contains an option's free quarter mirrored.

    So its inner quarter becomes the outer one, which three quarters may leave free. None for a part
    of a power of two, if the half is empty, or if chosen three quarters end in it.
    """
    if option.blocks % 3:
        return None
    first, size = missing_quarter(option)
    half = range(first // (2 * size) * 2 * size, first // (2 * size) * 2 * size + 2 * size)
    inside = {
        call
        for call, one in chosen.items()
        if half.start <= one.first and one.ends <= half.stop and one.blocks < len(half)
    }
    cut = any(
        one.first < half.start < one.ends < half.stop
        or half.start < one.first < half.stop < one.ends
        for one in chosen.values()
    )
    if cut or not inside:
        return None
    return {
        call: one.at(half.start + half.stop - one.ends) if call in inside else one
        for call, one in chosen.items()
    }
