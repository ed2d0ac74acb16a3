"""On S3, the store creates each file once, holds leases, and keeps sequences that continue bit for bit."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from hybridmem.cluster.store.leases import Leases, Stand
from hybridmem.cluster.store.place import Place
from hybridmem.cluster.store.sequences import Quota, SequenceStore, Subplace
from hybridmem.memory import HybridMemory
from hybridmem.models import load_model
from tests.ray.stores import Bucket


def test_a_file_is_created_once_whoever_tries_at_the_same_time(bucket: Bucket) -> None:
    place = Place(bucket.url)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda i: place.create("once/x.json", str(i).encode()), range(8)))
    assert made.count(True) == 1 and place.read("once/x.json") == str(made.index(True)).encode()
    assert place.names("once") == ["x.json"] and place.read("once/y.json") is None and place.names("nowhere") == []
    place.write("once/x.json", b"new")
    (entry,) = place.entries("once")
    assert (entry.name, entry.n_bytes) == ("once/x.json", 3) and abs(entry.changed_at - time.time()) < 60
    place.remove("once/x.json")
    assert not place.has("once/x.json")


def test_one_replica_at_a_time_holds_a_session(bucket: Bucket) -> None:
    shelf = Subplace(Place(bucket.url), "ab" * 32)
    a, b = (Leases(shelf, f"fleet/{name}", 30.0, time.time) for name in "ab")
    lease = a.take("session")
    assert lease is not None and b.take("session") is None
    assert a.release(lease, Stand("cd", 5))
    taken = b.take("session")
    assert taken is not None and taken.stand == Stand("cd", 5)


def test_a_sequence_goes_on_bit_for_bit_and_the_sweep_finds_it(bucket: Bucket) -> None:
    model = load_model("embedded")
    here, there = (HybridMemory(model.memory_spec, "16MiB") for _ in range(2))
    store = SequenceStore(Place(bucket.url), here.archive.signature, Quota(1, 3600.0), time.time)
    sequence = here.open()
    here.run(model, {sequence: list(range(20, 120))})
    store.write(b"\x01" * 16, 100, here.archive.pack(sequence))
    store.mark_hot(b"\x01" * 16, 100)
    moved = there.archive.open(there.archive.read(store.path(b"\x01" * 16, 100)))
    assert torch.equal(there.run(model, {moved: [5]}), here.run(model, {sequence: [5]}))
    assert store.hot() == {b"\x01" * 16: 100}
    assert store.sweep() > 10_000 and store.hot() == {} and not store.has(b"\x01" * 16, 100)
