"""Machine code as nvdisasm prints it: instructions, their order on every path, and loops."""

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d+ )?\s*([A-Z].*?)\s*$")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


class Instruction(NamedTuple):
    """One instruction: its index, guarding predicate (or none), opcode and operands."""

    index: int
    guard: str
    text: str

    def has(self, name: str) -> bool:
        """Return whether the opcode is `name` or starts with its parts, such as `SYNCS.PHASECHK`."""
        return f"{self.text.split()[0]}.".startswith(f"{name}.")


class Code:
    """The instructions of one kernel in the order of their addresses."""

    def __init__(self, listing: str) -> None:
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in listing.splitlines():
            if label := _LABEL.match(line):
                self._labels[label[1]] = len(self.instructions)
            elif found := _LINE.search(line):
                self.instructions.append(Instruction(len(self.instructions), found[1] or "", found[2]))

    def count(self, *names: str) -> int:
        """Count instructions with these opcodes."""
        return _count(self.instructions, names)

    def loops_with(self, name: str) -> list["Loop"]:
        """Return the innermost loops around instructions with an opcode, ordered by address."""
        around = [loop for loop in self.loops if loop.count(name)]

        def inner(loop):
            return any(other.members < loop.members for other in around)

        return [loop for loop in around if not inner(loop)]

    @cached_property
    def loops(self) -> list["Loop"]:
        """Natural loops: branches to an instruction on every path to them, and all instructions between.

        A retry after the kernel's end that jumps back is thus not part of a loop.
        """
        bodies: dict[int, set[int]] = {}
        for source, targets in enumerate(self._successors):
            for head in targets:
                if self.on_every_path(head, source):
                    bodies.setdefault(head, {head}).update(self._between(head, source))
        return [Loop(self, frozenset(bodies[head])) for head in sorted(bodies)]

    def on_every_path(self, first: int, second: int) -> bool:
        """Return whether every path to `second` passes through `first`."""
        return bool(self._dominators[second] >> first & 1)

    @cached_property
    def _successors(self) -> list[list[int]]:
        return [list(self._next(x)) for x in self.instructions]

    def _next(self, x: Instruction) -> Iterator[int]:
        yield from (self._labels[label] for label in _TARGET.findall(x.text))
        leaves = not x.guard and x.text.split()[0] in ("BRA", "EXIT")
        if not leaves and x.index + 1 < len(self.instructions):
            yield x.index + 1

    @cached_property
    def _predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.instructions]
        for source, targets in enumerate(self._successors):
            for target in targets:
                found[target].append(source)
        return found

    @cached_property
    def _dominators(self) -> list[int]:
        """Instructions on every path to each instruction, as bits; 0 for unreachable instructions."""
        reached = self._reached()
        found = [-1 if i in reached else 0 for i in range(len(self.instructions))]
        found[0], changed = 1, True
        while changed:
            changed = False
            for i in sorted(reached - {0}):
                common = -1
                for source in reached.intersection(self._predecessors[i]):
                    common &= found[source]
                changed |= found[i] != common | 1 << i
                found[i] = common | 1 << i
        return found

    def _reached(self) -> set[int]:
        seen, todo = {0}, [0]
        while todo:
            new = set(self._successors[todo.pop()]) - seen
            seen |= new
            todo += new
        return seen

    def _between(self, head: int, source: int) -> set[int]:
        """Return the instructions that reach `source` without passing `head`."""
        seen, todo = {head, source}, [source] if source != head else []
        while todo:
            new = set(self._predecessors[todo.pop()]) - seen
            seen |= new
            todo += new
        return seen


class Loop:
    """A loop of some code, including its inner loops."""

    def __init__(self, code: Code, members: frozenset[int]) -> None:
        self.code, self.members = code, members
        self.instructions = [code.instructions[i] for i in sorted(members)]

    def count(self, *names: str) -> int:
        """Count instructions with these opcodes."""
        return _count(self.instructions, names)

    def in_order(self, first: str, second: str, *, how_many: Callable[..., bool] = any) -> bool:
        """Return whether the loop has both opcodes, and any (or all) `first` come before each `second`."""
        firsts, seconds = ([x.index for x in self.instructions if x.has(name)] for name in (first, second))

        def after(j):
            return how_many(self.code.on_every_path(i, j) for i in firsts)

        return bool(firsts and seconds) and all(after(j) for j in seconds)


def _count(instructions: list[Instruction], names: tuple[str, ...]) -> int:
    return sum(any(x.has(name) for name in names) for x in instructions)
