"""Prints which promises a memory keeps: `python -m memory.testing MODULE:FACTORY ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from memory.testing.adapter import Factory
from memory.testing.checking import Result, check, check_for, load_factory
from memory.testing.promises import PROMISES


def main(arguments: list[str] | None = None) -> int:
    """Check subjects, print a table for each and return the exit status: 1 if a promise is broken."""
    asked = make_parser().parse_args(arguments)
    try:
        factories = _factories(asked.subjects)
        chosen = [name for name in PROMISES if not asked.only or any(part in name for part in asked.only)]
        if asked.examples < 1:
            raise ValueError(f"--examples {asked.examples} checks nothing; give 1 or more")
        if not chosen:
            raise ValueError(f"--only {asked.only} names none of the promises: {', '.join(PROMISES)}")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    is_broken = False
    for name, factory in factories.items():
        results = list(check(factory, chosen, seed=asked.seed, n_examples=asked.examples))
        if asked.minutes:
            seconds = 60 * asked.minutes / len(factories)
            results.append(check_for(factory, seconds, seed=asked.seed + asked.examples))
        sys.stdout.write(table(name, results))
        sys.stdout.flush()
        is_broken |= any(result.verdict == "failed" for result in results)
    return int(is_broken)


def table(name: str, results: list[Result]) -> str:
    """Return the results of a subject as text, and what is needed to see each failure again."""
    width = max(len(result.promise.name) for result in results)
    lines = [f"{name}", f"{'promise':{width}}  verdict  histories  operations  outputs compared"]
    for r in results:
        counts = f"{r.n_histories:9,}  {r.n_operations:10,}  {r.n_compared:16,}"
        lines.append(f"{r.promise.name:{width}}  {r.verdict:7}  {counts}")
    for r in results:
        if r.verdict == "failed":
            lines.append(f'\nfailed: {r.promise.name} (--seed {r.seed} --examples 1 --only "{r.promise.name}")')
            lines.append(f"  {r.why}")
        elif r.verdict == "refused":
            lines.append(f"\nrefused: {r.promise.name}: {r.why}")
    n_of = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("passed", "failed", "refused")}
    operations, compared = sum(r.n_operations for r in results), sum(r.n_compared for r in results)
    counts = ", ".join(f"{n} {verdict}" for verdict, n in n_of.items())
    return "\n".join([*lines, f"\n{name}: {counts}; {operations:,} operations, {compared:,} outputs compared\n\n"])


def _factories(names: list[str]) -> Mapping[str, Factory]:
    if names:
        return {name: load_factory(name) for name in names}
    from memory.testing.subjects import all_subjects

    return all_subjects()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m memory.testing", description=__doc__)
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="MODULE:FACTORY",
        help="makes an adapter; unless given, all kinds of this library",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first history of each promise (0)")
    parser.add_argument("--examples", type=int, default=20, help="histories a promise (20)")
    parser.add_argument("--minutes", type=float, default=0.0, help="so long, anything in any order as well (0)")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="promises whose names contain it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
