"""Gives a model of transformers this library's memory: `generate` stays the same, and `crop` and forks are exact."""

from __future__ import annotations

import torch
import transformers

from hybridmem import EMBEDDED, HybridCache, HybridMemory, attach

transformers.logging.set_verbosity_error()
hf_model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
attached = attach(hf_model)
memory = HybridMemory(attached.memory_spec, budget="64MiB", rollback_window=32)

chat = [{"role": "user", "content": "My cat is called Milo."}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
cache = HybridCache(memory, [memory.open()])
said = hf_model.generate(**prompt, cache=cache, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(said[0, prompt.input_ids.shape[1] :], skip_special_tokens=True))

# A fork shares everything so far. `crop` takes back what the fork has read in every layer, recurrent layers too.
fork = cache.fork()
with torch.no_grad():
    hf_model(torch.tensor([[5, 6, 7]]), cache=fork)
fork.crop(-3)
print(fork.sequences[0].length, "tokens, as", cache.sequences[0].length)

for each in (cache, fork):
    each.close()
attached.detach()
