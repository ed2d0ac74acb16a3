"""Replicas are added at once when the load grows, and removed one by one when it stays low.

A wrong file is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridmem.cluster.commands.deploy import read_config
from hybridmem.cluster.serving.scaling import PATIENCE_SECONDS, TARGET_TOKENS, decide, wanted_replicas
from hybridmem.memory import SpecError


@pytest.mark.parametrize(
    ("n", "tokens", "free", "wanted"),
    [
        (2, [], [], 1),
        (2, [TARGET_TOKENS, TARGET_TOKENS], [900, 900], 2),
        (2, [2 * TARGET_TOKENS, TARGET_TOKENS + 1], [900, 900], 4),
        (4, [0, 0, 0, 0], [0, 0, 0, 0], 5),
        (4, [0, 0, 0, 0], [0, 400, 400, 0], 4),
        (4, [0, 0], [0, 200], 5),
        (5, [0, 0, 0, 0, 0], [1000] * 5, 1),
    ],
)
def test_tokens_in_flight_and_free_bytes_say_how_many(
    n: int, tokens: list[float], free: list[float], wanted: int
) -> None:
    assert wanted_replicas(n, tokens, free, [1000] * len(free)) == wanted


def test_replicas_go_one_by_one_after_a_while() -> None:
    assert decide(2, 5, None, 0.0) == (5, None)
    n, since = decide(5, 2, None, 10.0)
    assert (n, since) == (5, 10.0)
    assert decide(5, 2, since, 10.0 + PATIENCE_SECONDS - 1) == (5, 10.0)
    n, since = decide(5, 2, since, 10.0 + PATIENCE_SECONDS)
    assert n == 4 and decide(4, 2, since, 11.0 + PATIENCE_SECONDS) == (4, since)
    assert decide(4, 4, since, 12.0 + PATIENCE_SECONDS) == (4, None)


def test_a_file_has_the_options_of_serve_by_name(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("address: auto\nmodel: embedded\nreplicas: 3\nmax_replicas: 6\nbudget: 2GiB\nstore: s3://b/x\n")
    chosen, about = read_config(file)
    assert (chosen["replicas"], chosen["max_replicas"], chosen["store"]) == (3, 6, "s3://b/x")
    assert about == {"address": "auto"} and chosen["port"] == 8000
    for text, error in (
        ("replica: 3", "there is no option 'replica'"),
        ("replicas: many", "replicas: 'many'; give a whole number"),
        ("router: best", "give one of 'resumable'"),
        ("- 3", "holds no options"),
        ("a: [", "cannot be read as YAML"),
    ):
        file.write_text(text)
        with pytest.raises(SpecError, match=error):
            read_config(file)


def test_the_documented_file_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "cluster.md").read_text()
    file = tmp_path / "fleet.yaml"
    (text,) = re.findall(r'```yaml title="fleet.yaml"\n(.*?)```', page, re.DOTALL)
    file.write_text(text)
    chosen, about = read_config(file)
    assert chosen["max_replicas"] == 16 and about["name"] == "jamba"
