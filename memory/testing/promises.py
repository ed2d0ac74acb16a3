"""Lists the promises of a memory.

Each is a set of random histories, of which one would fail if the promise were broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hybridmem.memory.testing.histories import (
    Branch,
    Checkpoint,
    Close,
    CloseAll,
    Fork,
    Misuse,
    Open,
    Operation,
    Reload,
    Reorder,
    Retell,
    ReturnTo,
    Rollback,
    Step,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Says how large the histories for a subject are.

    Attributes:
        vocab_size: token ids are below this number.
        window: how many tokens a memory must be able to take back, counted from the furthest position that a sequence
            has reached. Histories also ask for longer rollbacks, which the memory may refuse.
        n_operations: how many operations the history of mixed operations has.
    """

    vocab_size: int
    window: int = 8
    n_operations: int = 40


@dataclass(frozen=True)
class Promise:
    """Describes a promise.

    Attributes:
        group: the invariant of the design to which the promise belongs.
        needs: what each history must have done: the class name of an operation, "Fault" (a layer failed), "Answer" (the
            memory said whether it can), or "Return" (a loaded sequence was rolled back).
        make: a function that draws a history.
        is_optional: True if a memory may refuse the promise without being asked to allow it.
    """

    name: str
    group: str
    needs: str
    make: _Make
    is_optional: bool = False


class Draw:
    """Draws tokens, lengths and names for one history."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.random = setting, Random(seed)

    def tokens(self, n_tokens: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(self.setting.vocab_size) for _ in range(n_tokens))

    def feed(self, name: str, n_tokens: int) -> Step:
        return Step(((name, self.tokens(n_tokens)),))

    def tree(self, name: str) -> Branch:
        """Feed a tree of some tokens, and keep one path, which begins at the root and may end before a leaf."""
        n, r = self.random.randint(2, 12), self.random
        parents = tuple(r.randint(-1, i - 1) if r.random() < 0.4 else i - 1 for i in range(n))
        path = tuple[int, ...]()
        while following := [i for i, parent in enumerate(parents) if parent == (path[-1] if path else -1)]:
            if r.random() < 0.2:
                break
            path = (*path, r.choice(following))
        return Branch(name, self.tokens(n), parents, path)

    def ones(self, name: str, n_tokens: int) -> list[Operation]:
        """Feed tokens one by one."""
        return [self.feed(name, 1) for _ in range(n_tokens)]

    def prompt(self, name: str = "a", least: int = 9, most: int = 40) -> list[Operation]:
        """Open a sequence and feed its prompt in one step, which every memory can do."""
        return [Open(name), self.feed(name, self.random.randint(least, most))]

    def back(self) -> int:
        """Draw a number of tokens within the window."""
        return self.random.randint(1, self.setting.window)


_Make = Callable[[Draw], list[Operation]]
PROMISES: dict[str, Promise] = {}


def _promise(name: str, group: str, needs: str, *, is_optional: bool = False) -> Callable[[_Make], _Make]:
    def register(make: _Make) -> _Make:
        PROMISES[name] = Promise(name, group, needs, make, is_optional)
        return make

    return register


@_promise("single tokens after a prompt are as the whole text", "one position", "Step")
def _decode(d: Draw) -> list[Operation]:
    return [*d.prompt(), *d.ones("a", 6)]


@_promise("a text in parts is as the whole text", "one position", "Step")
def _chunks(d: Draw) -> list[Operation]:
    return [*d.prompt(least=1), *(d.feed("a", d.random.choice((1, 2, 3, 7, 20))) for _ in range(4))]


@_promise("tokens that are none are refused, and nothing changes", "plan, then apply", "Misuse")
def _bad_tokens(d: Draw) -> list[Operation]:
    bad = [Misuse("a", how) for how in ("no tokens", "a negative token", "a token too large")]
    return [*d.prompt(), d.random.choice(bad), *d.ones("a", 2), d.random.choice(bad), *d.ones("a", 2)]


@_promise("positions that are none are refused, and nothing changes", "plan, then apply", "Misuse")
def _bad_positions(d: Draw) -> list[Operation]:
    bad = [Misuse("a", how) for how in ("a position too large", "a negative position")]
    return [*d.prompt(), *bad, *d.ones("a", 3)]


@_promise("a rollback from afar is exact, or refused with nothing changed", "plan, then apply", "Step")
def _far(d: Draw) -> list[Operation]:
    far = [Rollback("a", d.random.randint(9, 50)) for _ in range(2)]
    return [*d.prompt(least=30, most=60), *d.ones("a", 3), far[0], *d.ones("a", 2), far[1], *d.ones("a", 2)]


@_promise("a step that fails in any layer changes nothing", "coherence", "Fault")
def _failed_step(d: Draw) -> list[Operation]:
    found = [*d.prompt("a"), *d.prompt("b")]
    for n in range(4):
        failed = Step((("a", d.tokens(d.random.choice((1, 5, 20)))), ("b", d.tokens(1))), fail_after=n)
        found += [failed, *d.ones("a", 1), d.feed("b", 1)]
    return found


@_promise("tokens taken back leave no trace", "exactness", "Rollback")
def _dropped(d: Draw) -> list[Operation]:
    n_tokens = d.back()
    return [*d.prompt(), *d.ones("a", n_tokens), Rollback("a", n_tokens), *d.ones("a", 4)]


@_promise("a part of a chunk taken back leaves no trace", "exactness", "Rollback")
def _part(d: Draw) -> list[Operation]:
    return [*d.prompt(least=20), Rollback("a", d.back()), *d.ones("a", 4)]


@_promise("a sequence can go back twice, and back and forth", "exactness", "Rollback")
def _back_and_forth(d: Draw) -> list[Operation]:
    n_tokens, found = d.random.randint(2, d.setting.window), d.prompt()
    for _ in range(2):
        found += [*d.ones("a", n_tokens), Rollback("a", n_tokens // 2), Rollback("a", n_tokens - n_tokens // 2)]
    return [*found, *d.ones("a", 4)]


@_promise("a sequence can begin again", "exactness", "Rollback")
def _begin_again(d: Draw) -> list[Operation]:
    return [*d.prompt(), *d.ones("a", 3), Rollback("a", 10**6), d.feed("a", 12), *d.ones("a", 3)]


@_promise("a checkpoint is returned to from afar", "exactness", "ReturnTo")
def _checkpoint(d: Draw) -> list[Operation]:
    found = [*d.prompt(), *d.ones("a", 2), Checkpoint("a", "mark")]
    for _ in range(2):
        found += [d.feed("a", d.random.randint(20, 60)), *d.ones("a", 2), ReturnTo("a", "mark"), *d.ones("a", 3)]
    return found


@_promise("a checkpoint stays as it was, whatever its family does", "isolation", "ReturnTo")
def _checkpoint_stays(d: Draw) -> list[Operation]:
    n_tokens, found = d.back(), d.prompt()
    found += [*d.ones("a", n_tokens), Checkpoint("a", "mark"), Rollback("a", n_tokens), *d.ones("a", 3), Fork("a", "b")]
    found += [d.feed("b", d.random.randint(1, 40)), ReturnTo("b", "mark"), *d.ones("b", 2)]
    return [*found, ReturnTo("a", "mark"), *d.ones("a", 2), Close("b"), ReturnTo("a", "mark"), *d.ones("a", 2)]


@_promise("a path of a tree is as if it alone had been fed", "exactness", "Branch")
def _tree(d: Draw) -> list[Operation]:
    found = [*d.prompt(), d.tree("a"), *d.ones("a", 1), Fork("a", "b"), d.tree("a"), d.tree("b"), *d.ones("b", 2)]
    return [*found, Rollback("a", d.random.randint(1, 4)), d.tree("a"), d.tree("a"), *d.ones("a", 2)]


@_promise("a saved sequence goes on as it was", "exactness", "Reload")
def _saved(d: Draw) -> list[Operation]:
    found = [*d.prompt("a"), *d.ones("a", 3), *d.prompt("b"), Reload("a", anew=d.random.random() < 0.5)]
    return [*found, *d.ones("a", 2), *d.ones("b", 2)]


@_promise("a saved sequence can go back", "exactness", "Return")
def _saved_back(d: Draw) -> list[Operation]:
    found = [*d.prompt(), *d.ones("a", 3), Reload("a", anew=d.random.random() < 0.5)]
    return [*found, Rollback("a", d.random.randint(1, 3)), *d.ones("a", 3)]


@_promise("a batch of any lengths is as each sequence alone", "isolation", "Step")
def _batch(d: Draw) -> list[Operation]:
    names = [f"s{i}" for i in range(6)]
    found: list[Operation] = [Open(name) for name in names]
    found.append(Step(tuple((name, d.tokens(d.random.choice((1, 2, 9, 25)))) for name in names)))
    for _ in range(4):
        chosen = d.random.sample(names, d.random.randint(2, 6))
        found.append(Step(tuple((name, d.tokens(1)) for name in chosen)))
    return found


@_promise("a batch of prompts and single tokens is as each sequence alone", "isolation", "Step")
def _mixed_batch(d: Draw) -> list[Operation]:
    names = [f"s{i}" for i in range(4)]
    found: list[Operation] = [Open(name) for name in names]
    for _ in range(4):
        chosen = d.random.sample(names, d.random.randint(2, 4))
        found.append(Step(tuple((name, d.tokens(d.random.choice((1, 1, 4, 17)))) for name in chosen)))
    return found


@_promise("a fork goes its own way", "isolation", "Fork")
def _fork(d: Draw) -> list[Operation]:
    found = [*d.prompt(), *d.ones("a", 2), Fork("a", "b")]
    return [*found, *d.ones("b", 2), *d.ones("a", 2), Fork("b", "c"), *d.ones("c", 2), Close("b"), *d.ones("a", 2)]


@_promise("a fork can go back, and its origin stays", "isolation", "Rollback")
def _fork_back(d: Draw) -> list[Operation]:
    n_tokens = d.back()
    found = [*d.prompt(), *d.ones("a", n_tokens), Fork("a", "b"), Rollback("b", n_tokens), Fork("b", "c")]
    return [*found, *d.ones("b", 2), *d.ones("a", 2), *d.ones("c", 2)]


@_promise("sequences reorder all at once", "isolation", "Reorder")
def _reorder(d: Draw) -> list[Operation]:
    found = [*d.prompt("a"), *d.prompt("b"), *d.prompt("c")]
    for moves in ((("a", "b"), ("b", "b"), ("c", "a")), (("a", "c"), ("c", "a"))):
        found += [Reorder(moves), *d.ones("a", 1), *d.ones("b", 1), *d.ones("c", 1)]
    return found


@_promise("what others do, and leave behind, is not seen", "isolation", "Step")
def _neighbours(d: Draw) -> list[Operation]:
    found = d.prompt("witness")
    for i in range(3):
        found += [*d.prompt(f"n{i}"), *d.ones("witness", 1), Close(f"n{i}"), *d.ones("witness", 1)]
    return [*found, *d.prompt("last"), *d.ones("last", 2), *d.ones("witness", 2)]


@_promise("it says what it can", "no lies", "Answer")
def _can(d: Draw) -> list[Operation]:
    found = [*d.prompt(most=30), *d.ones("a", 2)]
    for n_tokens in d.random.sample(range(1, 3 * d.setting.window), 3):
        found += [Fork("a", f"f{n_tokens}"), Rollback("a", n_tokens), *d.ones("a", 1)]
    return found


@_promise("bytes in use are those of open sequences", "no lies", "CloseAll")
def _usage(d: Draw) -> list[Operation]:
    found = [*d.prompt("a"), Fork("a", "b"), Checkpoint("a", "mark"), *d.prompt("c"), *d.ones("b", 2)]
    return [*found, CloseAll(), *d.prompt("d"), *d.ones("d", 2), CloseAll()]


@_promise("bits are a function of the text", "one text, one result", "Retell", is_optional=True)
def _reproducible(d: Draw) -> list[Operation]:
    n_tokens = d.back()
    found = [*d.prompt("a", 20, 40), *d.prompt("b"), d.feed("a", d.random.choice((1, 3, 18)))]
    found += [Step((("b", d.tokens(1)), ("a", d.tokens(d.random.choice((1, 5)))))), Checkpoint("a", "mark")]
    found += [*d.ones("a", n_tokens), Rollback("a", n_tokens), Fork("a", "c"), d.feed("c", 20), ReturnTo("a", "mark")]
    found += [Reload("a"), d.feed("a", d.random.choice((2, 17))), *d.ones("a", 2)]
    return [*found, *(Retell(name, d.random.choice((1, 4, 19))) for name in ("a", "c"))]


@_promise("anything, in any order", "all of them", "Step")
def _anything(d: Draw) -> list[Operation]:
    found, names, n_named = list[Operation](d.prompt("s0")), ["s0"], 1
    while len(found) < d.setting.n_operations:
        operation = _any(d, names, f"s{n_named}")
        n_named += isinstance(operation, Open | Fork)
        if isinstance(operation, Open | Fork):
            names.append(operation.name)
        elif isinstance(operation, Close):
            names.remove(operation.name)
        found.append(operation)
    return [*found, *(d.feed(name, 1) for name in names), CloseAll()]


def _any(d: Draw, names: list[str], new: str) -> Operation:
    """Draw one operation on any of the sequences."""
    r = d.random
    if not names or (len(names) < 8 and r.random() < 0.08):
        return Open(new)
    name, other = r.choice(names), r.choice(names)
    kind = r.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0]
    if kind == "tree":
        return d.tree(name)
    if kind == "rollback":
        n_tokens = r.choice((d.back(), d.back(), r.randint(1, 60)))
        return Rollback(name, n_tokens)
    if kind == "fork" and len(names) < 8:
        return Fork(name, new)
    if kind == "checkpoint":
        return Checkpoint(name, f"mark of {name}")
    if kind == "return":
        return ReturnTo(name, f"mark of {name}")
    if kind == "reorder":
        return Reorder(tuple({name: other, other: r.choice(names)}.items()))
    if kind == "reload":
        return Reload(name, anew=r.random() < 0.1)
    if kind == "close" and len(names) > 3:
        return Close(name)
    if kind == "misuse":
        return Misuse(name, r.choice(("no tokens", "a negative token", "a token too large", "a position too large")))
    chosen = {other: 1, name: 1} if r.random() < 0.5 else {name: 1}
    requests = tuple((n, d.tokens(r.choice((1, 1, 1, 2, 5, 18)))) for n in chosen)
    return Step(requests, fail_after=r.randrange(5) if kind == "fail" else None)


_WEIGHTS = {
    "step": 50, "fail": 5, "rollback": 18, "checkpoint": 4, "return": 6, "fork": 8, "reorder": 6, "reload": 3,
    "close": 5, "misuse": 4, "tree": 6,
}  # fmt: skip
