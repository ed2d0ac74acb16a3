"""Serves many users with one model in one batch. Prompts that begin with the same tokens share their memory."""

from __future__ import annotations

from hybridmem import EMBEDDED, HybridMemory, load_model
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import encode_chat, load_tokenizer
from hybridmem.memory.prefix.cache import PrefixCache

model, tokenizer = load_model("embedded"), load_tokenizer(EMBEDDED)
memory = HybridMemory(model.memory_spec, budget="64MiB")
engine = Engine(model, memory, tokenizer, prefixes=PrefixCache(memory))

# Requests are submitted first and run together: each step of the model advances all of them.
names = ["Milo", "Luna", "Zoe", "Nala"]
chats = [
    [
        {"role": "user", "content": f"My cat is called {name}."},
        {"role": "assistant", "content": "Okay, noted."},
        {"role": "user", "content": "What is my cat called?"},
    ]
    for name in names
]
generations = [engine.submit(encode_chat(tokenizer, chat), max_tokens=30) for chat in chats]
engine.run()
for generation in generations:
    print(generation.text)
print(engine.stats.n_steps, "steps of the model for", engine.stats.n_generated, "tokens")

# The next request of a user begins with the last one. That part is not computed again.
prompt, n_before = encode_chat(tokenizer, chats[0]), engine.stats.n_reused
again = engine.submit(prompt, max_tokens=30)
engine.run()
print(again.text, engine.stats.n_reused - n_before, "of", len(prompt), "tokens were reused")
