"""Lists the options of `hybrid-memory serve`.

Each row serves the command line, the configuration file and the environment.
"""

from __future__ import annotations

from hybridmem.chat.commands.option_table import Option
from hybridmem.defaults import ROLLBACK_WINDOW, STEP_TOKENS

SERVE: tuple[Option, ...] = (
    # These options concern the model and its memory.
    Option("model", "text", "embedded",
           'Name a checkpoint\'s folder, a GGUF file, a hub id, or "embedded" for the small model that is included.'),
    Option("device", "text", "cpu", "The model and its memory live on this device, such as cpu or cuda."),
    Option("dtype", "text", "auto", "Compute in float32, bfloat16 or float16; auto takes the checkpoint's own."),
    Option("weights", "text", "auto",
           "auto keeps the bits of the files, dense makes floats in --dtype; int8, int8-row or int4 round (CPU only)."),
    Option("reproducible", "flag", False,
           "Give a text the same logits, bit for bit, however it was reached: alone or beside others, with or without "
           "a kept prefix (CPU only)."),
    Option("threads", "whole", None,
           "The model uses this many threads on the CPU. By default, it uses as few as are hardly slower than "
           "more.", least=1),
    Option("budget", "bytes", None,
           "The memory uses at most this many bytes, such as 512MiB. The default is 1GiB; for the embedded model "
           "it is 8MiB, so that its page shows a full memory.", "memory"),
    Option("rollback_window", "whole", ROLLBACK_WINDOW,
           "A cached prefix may be rolled back by this many tokens to be reused.", "memory", least=0),
    Option("host_budget", "bytes", None,
           "Requests that make room may take this many bytes of host memory. By default, there is no limit.", "memory"),
    Option("swap_dir", "text", None, "What does not fit into host memory goes to this folder or URL.", "memory"),
    Option("disk_budget", "bytes", None,
           "The files in --swap-dir may take this many bytes. By default, there is no limit.", "memory"),
    Option("prefix_cache", "flag", True,
           "Keep prompts and replies, so that later prompts that begin like them reuse them."),
    Option("prefix_bytes", "bytes", None,
           "Kept prompts and replies may take this many bytes outside of --budget, in host memory and files. The "
           "default is 0, and 8GiB with --sessions."),
    Option("prefixes", "text", None, "Keep prompts and replies in this folder or URL across restarts."),
    Option("save_every", "number", None,
           "Write the folder of --prefixes at this interval, in seconds. By default, it is written when the "
           "server stops.", "server.save_seconds", least=1),
    Option("sessions", "text", None,
           "Keep stored responses and their checkpoints in this folder across restarts.", "server"),
    Option("session_bytes", "bytes", "1GiB",
           "The texts and tokens of sessions may take this many bytes. Beyond that, the oldest sessions are "
           "deleted.", "server"),
    Option("session_days", "number", 30.0, "Delete a session that nobody has used for this many days.", "server"),
    Option("alias", "texts", None,
           "Clients may call the model by this name, too, such as claude-*. The option may be repeated.", "server"),
    Option("warm", "text", None,
           "Compute the prompts in this file at the start and keep them, such as system prompts with tools: one "
           "request of /v1/chat/completions or /v1/messages a line.", "server"),
    Option("slot_save_path", "text", None,
           "Clients of llama.cpp's server may save the prefixes of slots in this folder, and restore them.", "server"),
    Option("trees", "flag", False,
           "Store chats and messages as well: the requests of an agent become a tree of its steps, at /v1/sessions and "
           "on the page.", "server"),
    # These options say who may send requests.
    Option("host", "text", "127.0.0.1", "Listen on this address. Addresses other than loopback need an API key."),
    Option("port", "whole", 8000, "Listen on this port; 0 takes a free one.", least=0, most=65535),
    Option("api_key", "text", None,
           "Clients must send this key. It is safer in the environment than on the command line.", "server"),
    Option("keys", "tables", None,
           "A TOML file with the keys of several clients, and max_requests and tokens_per_minute of each. The "
           "file of --config may hold them itself.", "server"),
    Option("ssl_certfile", "text", None, "Serve https with the certificate in this PEM file.", "server"),
    Option("ssl_keyfile", "text", None, "The PEM file with the certificate's key.", "server"),
    Option("access_log", "text", "off",
           "Write one line for each request to standard error.", "server", choices=("off", "text", "json")),
    Option("allowed_host", "texts", None,
           "Clients may call the server by this name, beside loopback's names. The option may be repeated.",
           "server.allowed_hosts"),
    Option("allowed_origin", "texts", None,
           "This web page may send requests, such as https://example.com. The option may be repeated.",
           "server.allowed_origins"),
    Option("parse_special", "flag", False,
           "Let messages hold special tokens, so that clients can write turns.", "server"),
    Option("isolate", "flag", False,
           "A request reuses only prompts of requests with the same prompt_cache_key and user. By default, all "
           "requests with one API key and cache_salt share them.", "server"),
    # These options are limits.
    Option("max_body", "bytes", "1MiB", "A request's body may have this many bytes.", "server.max_body_bytes"),
    Option("max_tokens", "whole", None,
           "A prompt and its reply may have this many tokens together. By default, the model and the budget "
           "decide.", "server", least=2),
    Option("default_tokens", "whole", None,
           "A chat's reply has at most this many tokens where the request does not say. By default, it may be as long "
           "as fits beside its prompt.", "server", least=1),
    Option("picture_host", "texts", None,
           "Fetch pictures that requests name by URL from this host, such as example.com. The option may be repeated. "
           "Without it, pictures come as data URLs alone.", "server.picture_hosts"),
    Option("max_pictures", "whole", 16, "A request may have this many pictures.", "server", least=1),
    Option("max_picture_bytes", "bytes", "20MiB", "A picture's file may have this many bytes.", "server"),
    Option("max_picture_pixels", "whole", 48_000_000, "A picture may have this many pixels.", "server", least=1),
    Option("max_requests", "whole", 256,
           "Answer this many requests at once. Others are told to come back later.", "server", least=1),
    Option("max_connections", "whole", 768,
           "Keep this many connections open at once. Beyond that, the one that was idle longest is closed.",
           "server", least=1),
    Option("max_peer_connections", "whole", 384, "One address may have this many open connections.", "server", least=1),
    Option("max_running", "whole", 128,
           "One step of the model computes tokens of at most this many replies.", "engine", least=1),
    Option("step_tokens", "whole", STEP_TOKENS,
           "One step of the model computes about this many tokens of prompts.", "engine", least=2),
    Option("speculation", "text", "none",
           "prompt-lookup drafts the next tokens of a reply from the texts so far, where that saves time. "
           "Replies stay the same.", choices=("none", "prompt-lookup")),
    Option("draft_model", "text", None,
           "Draft the next tokens of replies with this smaller model, where that saves time: a folder, a GGUF file or "
           "a hub id with the same tokenizer. --budget is for both. Replies stay the same."),
    Option("draft_head", "text", "none",
           "Draft with layers that read the model's hidden states, where that saves time: auto takes those of the "
           "checkpoint, if it has any, such as layers for multi-token prediction; or name a folder. --budget is for "
           "both. Replies stay the same."),
    Option("pooling", "text", None,
           "Embed a text by the last hidden state or the mean of all. By default, the checkpoint decides.",
           choices=("last", "mean")),
    Option("grace", "number", 10.0,
           "When the server is told to stop, replies may go on for this many seconds.",
           "server.grace_seconds", least=0),
)  # fmt: skip
"""Each option is one row here and an argument of the class that the row names: "server" is `ServerOptions`, "memory" is
`HybridMemory`, and "engine" is `Engine`.
"""
