"""A replica is chosen by session, by what can be resumed, and by load."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hybridmem.cluster.routing.policies import make_policy
from hybridmem.cluster.routing.policy import Bounds, ResumablePolicy
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.routing.route import as_header
from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import LanguageModel

NAMES = ["a", "b", "c"]


def prompt_of(tokens: list[int], session: str | None = None, owner: bytes | None = None) -> TokenPrompt:
    return TokenPrompt(np.array(tokens, "<i4").tobytes(), owner, session)


def policy_of(**bounds: float) -> ResumablePolicy:
    return ResumablePolicy(Bounds(**bounds), random.Random(0))


def held(prompt: TokenPrompt, *positions: int) -> dict[str, object]:
    return {"requests": 0, "prefixes": list(prompt.digests(positions))}


def test_the_deepest_resumable_prefix_wins_and_the_last_token_is_fed() -> None:
    policy, prompt = policy_of(), prompt_of(list(range(100)))
    policy.report("a", held(prompt, 40), 0.0)
    policy.report("c", held(prompt, 100), 0.0)
    route = policy.choose(prompt, NAMES, 0.0)
    assert (route.order, route.reason, route.depths) == (("c", "a", "b"), "prefix", {"a": 40, "c": 99})
    assert as_header(route.why("c")) == "prefix; resumable=99/100; replica=c"
    assert policy.choose(prompt_of([*range(39), 7]), NAMES, 0.0).depths == {}
    assert policy.choose(prompt_of(list(range(100)), owner=b"another"), NAMES, 0.0).depths == {}


def test_a_session_stays_unless_another_replica_can_resume_more() -> None:
    policy, prompt = policy_of(grid_tokens=0), prompt_of(list(range(100)), "s")
    policy.sent(prompt, "b", 0.0)
    policy.done("b")
    assert policy.choose(prompt_of(list(range(120)), "s"), NAMES, 1.0).reason == "session"
    later = prompt_of(list(range(200)), "s")
    policy.report("a", held(later, 180), 1.0)
    assert policy.choose(later, NAMES, 1.0).order[0] == "a"


def test_what_was_sent_is_believed_for_a_while_unless_it_is_reported() -> None:
    policy, prompt = policy_of(believed_seconds=10), prompt_of(list(range(100)))
    policy.sent(prompt, "b", 0.0)
    policy.report("b", {"requests": 1, "prefixes": []}, 5.0)
    assert policy.choose(prompt, NAMES, 9.0).order[0] == "b"
    assert policy.choose(prompt, NAMES, 10.0).depths == {}
    policy.report("b", held(prompt, 100), 11.0)
    assert policy.choose(prompt, NAMES, 1e9).order[0] == "b"
    policy.report("b", {"prefixes": []}, 12.0)
    assert policy.choose(prompt, NAMES, 12.0).depths == {}


def test_a_replica_with_too_much_load_is_passed_over() -> None:
    policy, prompt = policy_of(imbalance=1.5, slack_requests=2), prompt_of(list(range(100)), "s")
    policy.report("a", held(prompt, 100), 0.0)
    for _ in range(4):
        policy.sent(prompt, "a", 0.0)
    assert policy.choose(prompt, NAMES, 0.0).order[0] == "a", "4 of 4 requests, and 1.5 * 4/3 + 2 are allowed"
    policy.sent(prompt, "a", 0.0)
    route = policy.choose(prompt, NAMES, 0.0)
    assert route.order[0] != "a" and route.reason == "busy" and route.why("a")["reason"] == "busy"
    policy.done("a")
    assert policy.choose(prompt, NAMES, 0.0).order[0] == "a"


def test_a_replica_that_is_gone_is_forgotten() -> None:
    policy, prompt = policy_of(), prompt_of(list(range(100)), "s")
    policy.sent(prompt, "a", 0.0)
    policy.leave("a")
    route = policy.choose(prompt, ["b", "c"], 0.0)
    assert (route.reason, route.depths) == ("load", {})


@pytest.mark.parametrize("name", ["round-robin", "load", "consistent-hash"])
def test_policies_to_compare_with(name: str) -> None:
    policy = make_policy(name, seed=0)
    prompts = [prompt_of([1, 2, 3], f"session {i}") for i in range(300)]
    chosen = []
    for prompt in prompts:
        chosen.append(policy.choose(prompt, NAMES, 0.0).order[0])
        policy.sent(prompt, chosen[-1], 0.0)
    assert set(chosen) == set(NAMES) and max(map(chosen.count, NAMES)) < 150
    again = [policy.choose(prompt, NAMES, 0.0).order[0] for prompt in prompts]
    assert (again == chosen) == (name in ("consistent-hash", "round-robin"))
    if name == "consistent-hash":
        without = [policy.choose(prompt, ["a", "c"], 0.0).order[0] for prompt in prompts]
        assert all(new == old for new, old in zip(without, chosen, strict=True) if old != "b")


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SpecError, match="router='best'; choose one of resumable"):
        make_policy("best")


def test_what_a_cache_can_resume_is_what_its_digests_say(embedded: LanguageModel) -> None:
    """A lookup reuses at least what the router was told. The router is told of nothing more."""
    memory = HybridMemory(embedded.memory_spec, "16MiB", rollback_window=8)
    cache = PrefixCache(memory)
    shared = list(range(10, 90))
    for tail in ([3, 4, 5, 6] * 8, [7, 8]):
        sequence, found = cache.open(shared + tail, b"me")
        for end in [*cache.cuts(shared + tail, found.reused, owner=b"me"), len(shared + tail)]:
            memory.run(embedded, {sequence: (shared + tail)[sequence.length : end]})
            cache.insert(sequence, b"me")
    policy = policy_of()
    policy.report("a", {"prefixes": [(prefix.n_tokens, prefix.digest) for prefix in cache.resumable()]}, 0.0)
    for prompt in ([*shared, 3, 4, 5, 6, 9], [*shared, 7, 8, 9], [*shared, 9], shared[:30]):
        told = policy.choose(prompt_of(prompt, owner=b"me"), NAMES, 0.0).depths.get("a", 0)
        assert told <= cache.find(prompt, b"me").reused
    assert policy.choose(prompt_of([*shared, 7, 8, 9], owner=b"me"), NAMES, 0.0).depths == {"a": 82}
    assert [prefix.n_tokens for prefix in cache.resumable() if prefix.is_shared] == [80]
