"""Loads a model, talks to it, and takes tokens back: every layer's memory goes back at once."""

from __future__ import annotations

from hybridmem import EMBEDDED, HybridMemory, Sequence, load_model
from hybridmem.chat.prompts import encode_chat, find_stop_ids, load_tokenizer

model, tokenizer = load_model("embedded"), load_tokenizer(EMBEDDED)
memory = HybridMemory(model.memory_spec, budget="64MiB", rollback_window=32)
stop_ids = find_stop_ids(tokenizer, model)


def reply(sequence: Sequence, messages: list[dict[str, str]], n_known: int = 0) -> str:
    """Feed the tokens of a chat from `n_known` on, and decode until the reply ends."""
    new = encode_chat(tokenizer, messages)[n_known:]
    said: list[int] = []
    while not said or said[-1] not in stop_ids:
        logits = memory.run(model, {sequence: new})
        new = [int(logits.argmax())]
        said += new
    return tokenizer.decode(said[:-1])


def told(name: str) -> list[dict[str, str]]:
    """Return a chat that states a name and asks for it."""
    return [
        {"role": "user", "content": f"My cat is called {name}."},
        {"role": "assistant", "content": "Okay, noted."},
        {"role": "user", "content": "What is my cat called?"},
    ]


sequence = memory.open()
print(reply(sequence, told("Milo")))

# The two texts agree up to the name. Tokens from the name on are taken back, and those of the other text are fed.
milo, luna = (encode_chat(tokenizer, told(name)) for name in ("Milo", "Luna"))
n_common = next(i for i, (a, b) in enumerate(zip(milo, luna, strict=False)) if a != b)
memory.rollback(sequence, to=n_common)
print(reply(sequence, told("Luna"), n_known=n_common))

# A sequence can return to a checkpoint from any distance. A checkpoint costs the bytes that it does not share.
checkpoint = memory.checkpoint(sequence)
memory.run(model, {sequence: encode_chat(tokenizer, told("Rex")) * 4})
memory.rollback(sequence, to=checkpoint)
print(sequence.length, "tokens again")
