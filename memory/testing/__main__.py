"""Prints which promises a memory keeps: `python -m hybridmem.memory.testing MODULE:FACTORY ...`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping

from hybridmem.memory.testing.adapter import Factory
from hybridmem.memory.testing.checking import (
    Result,
    allowed_refusals,
    check,
    check_for,
    is_good_enough,
    load_factory,
    may_refuse,
)
from hybridmem.memory.testing.promises import PROMISES


def main(arguments: list[str] | None = None) -> int:
    """Check subjects, print a table for each, and return the exit status: 1 if a promise is broken or refused."""
    asked = make_parser().parse_args(arguments)
    try:
        factories, allowed = _factories(asked.subjects + asked.subject), allowed_refusals(asked.allow_refused)
        chosen = [name for name in PROMISES if not asked.only or any(part in name for part in asked.only)]
        if asked.examples < 1:
            raise ValueError(f"--examples {asked.examples} checks nothing; give 1 or more")
        if not chosen:
            raise ValueError(f"--only {asked.only} names none of the promises: {', '.join(PROMISES)}")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    is_good = True
    for name, factory in factories.items():
        results = list(check(factory, chosen, seed=asked.seed, n_examples=asked.examples))
        if asked.minutes:
            seconds = 60 * asked.minutes / len(factories)
            results.append(check_for(factory, seconds, seed=asked.seed + asked.examples))
        its_allowed = allowed | (frozenset() if asked.subjects + asked.subject else own_refusals(name))
        sys.stdout.write(table(name, results, its_allowed))
        sys.stdout.flush()
        is_good &= all(is_good_enough(result, its_allowed) for result in results)
    return int(not is_good)


def own_refusals(name: str) -> frozenset[str]:
    """Return the promises that one of this library's own subjects may refuse."""
    from hybridmem.memory.testing.subjects import REFUSED

    return REFUSED.get(name, frozenset())


def table(name: str, results: list[Result], allowed: frozenset[str] = frozenset()) -> str:
    """Return the results of a subject as text: how to reproduce each failure, and which operations never happened."""
    width = max(len(result.promise.name) for result in results)
    lines = [name, f"{'promise':{width}}  verdict  histories  effective  refused  operations  outputs compared"]
    for r in results:
        counts = f"{r.n_histories:9,}  {r.n_effective:9,}  {r.n_refused:7,}  {r.n_operations:10,}  {r.n_compared:16,}"
        lines.append(f"{r.promise.name:{width}}  {_verdict(r, allowed):7}  {counts}")
    for r in results:
        if r.verdict == "failed":
            lines.append(f'\nfailed: {r.promise.name} (--seed {r.seed} --examples 1 --only "{r.promise.name}")')
            lines.append(f"  {r.why}")
        elif r.verdict == "refused":
            allow = "" if r.promise.name in allowed else f' (--allow-refused "{r.promise.name}")'
            lines.append(f"\n{_verdict(r, allowed)}: {r.promise.name}{allow}: {r.why}")
    happened = Counter[str]()
    for r in results:
        happened.update(r.exercised)
    lines.append("\nexercised: " + (", ".join(f"{n:,} {what}" for what, n in happened.items() if n) or "nothing"))
    if never := [what for what, n in happened.items() if not n]:
        lines.append(f"never exercised: {', '.join(never)}")
    verdicts = Counter(_verdict(r, allowed) for r in results)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("passed", "failed", "refused", "allowed"))
    operations, compared = sum(r.n_operations for r in results), sum(r.n_compared for r in results)
    return "\n".join([*lines, f"\n{name}: {counts}; {operations:,} operations, {compared:,} outputs compared\n\n"])


def _verdict(result: Result, allowed: frozenset[str]) -> str:
    return "allowed" if result.verdict == "refused" and may_refuse(result.promise, allowed) else result.verdict


def _factories(names: list[str]) -> Mapping[str, Factory]:
    if names:
        return {name: load_factory(name) for name in names}
    from hybridmem.memory.testing.subjects import all_subjects

    return all_subjects()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m hybridmem.memory.testing", description=__doc__)
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="MODULE:FACTORY",
        help="makes an adapter; unless given, all kinds of this library",
    )
    parser.add_argument("--subject", action="append", default=[], metavar="MODULE:FACTORY", help="one more; repeatable")
    parser.add_argument(
        "--seed", "--subject-seed", type=int, default=0, help="of the first history of each promise (0)"
    )
    parser.add_argument("--examples", "--subject-examples", type=int, default=20, help="histories a promise (20)")
    parser.add_argument("--minutes", type=float, default=0.0, help="so long, anything in any order as well (0)")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="promises whose names contain it")
    parser.add_argument(
        "--allow-refused",
        action="append",
        default=[],
        metavar="NAME",
        help="a promise that the memory may refuse, by its whole name; repeatable",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
