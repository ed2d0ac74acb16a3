"""Lists the options of `hybrid-memory serve`: one row for the command line, the configuration file, the environment."""

from __future__ import annotations

from hybridmem.chat.commands.option_table import Option

SERVE: tuple[Option, ...] = (
    # the model and its memory
    Option("model", "text", "embedded", 'a checkpoint\'s folder, a hub id, or "embedded" for the small model that is '
           "included"),
    Option("device", "text", "cpu", "where the model and its memory live, such as cpu or cuda"),
    Option("dtype", "text", "auto", "auto (the checkpoint's own), float32, bfloat16 or float16"),
    Option("weights", "text", "auto", "int8, int8-row or int4 rounds weights to these, on the CPU; auto: --dtype"),
    Option("threads", "whole", None, "of the model on the CPU; unless given, the fewest that are hardly slower",
           least=1),
    Option("budget", "bytes", None, "bytes that the memory may use at most, such as 512MiB; unless given, 1GiB, and "
           "8MiB for the embedded model, whose page shows a full memory then", "memory"),
    Option("rollback_window", "whole", 32, "how many tokens a cached prefix may be rolled back to be reused",
           "memory", least=0),
    Option("host_budget", "bytes", None, "bytes in host memory for requests that make room; unless given, any",
           "memory"),
    Option("swap_dir", "text", None, "folder or URL for what finds no room there", "memory"),
    Option("disk_budget", "bytes", None, "bytes of its files; unless given, any", "memory"),
    Option("prefix_cache", "flag", True, "keep prompts and replies, for prompts that begin like them"),
    Option("prefix_bytes", "bytes", None, "bytes that they may take outside of --budget, in host memory and files; "
           "unless given, 0, and 8GiB with --sessions"),
    Option("prefixes", "text", None, "folder or URL that keeps them across restarts"),
    Option("save_every", "number", None, "seconds after which the folder is written anew; unless given, at the end",
           "server.save_seconds", least=1),
    Option("sessions", "text", None, "folder that keeps stored responses and their checkpoints across restarts",
           "server"),
    Option("session_bytes", "bytes", "1GiB", "bytes of the texts and tokens of sessions; beyond, the oldest go",
           "server"),
    Option("session_days", "number", 30.0, "days after which a session that nobody used is deleted", "server"),
    # who may ask
    Option("host", "text", "127.0.0.1", "address to listen on; others than loopback need an API key"),
    Option("port", "whole", 8000, "0 takes a free one", least=0, most=65535),
    Option("api_key", "text", None, "what clients must send; better set in the environment", "server"),
    Option("keys", "tables", None, "TOML file with keys of several clients, and max_requests and tokens_per_minute of "
           "each; --config's may hold them itself", "server"),
    Option("ssl_certfile", "text", None, "PEM file of a certificate, for https", "server"),
    Option("ssl_keyfile", "text", None, "PEM file of its key", "server"),
    Option("access_log", "text", "off", "a line for each request on the standard error", "server",
           choices=("off", "text", "json")),
    Option("allowed_host", "texts", None,
           "name that clients may call the server by, beside loopback's; may be repeated", "server.allowed_hosts"),
    Option("allowed_origin", "texts", None,
           "page that may send requests, such as https://example.com; may be repeated", "server.allowed_origins"),
    Option("parse_special", "flag", False, "let messages hold special tokens, so that clients can write turns",
           "server"),
    # limits
    Option("max_body", "bytes", "1MiB", "bytes of a request's body", "server.max_body_bytes"),
    Option("max_tokens", "whole", None, "tokens of a prompt and its reply; unless given, what the model and the budget "
           "allow", "server", least=2),
    Option("default_tokens", "whole", 1024, "tokens of a chat's reply, where the request does not say", "server",
           least=1),
    Option("max_requests", "whole", 256, "answered at once; others are told to come back", "server", least=1),
    Option("max_connections", "whole", 768, "open at once; beyond, the longest idle one is closed", "server", least=1),
    Option("max_peer_connections", "whole", 384, "of those, from one address", "server", least=1),
    Option("max_running", "whole", 128, "replies in one step of the model", "engine", least=1),
    Option("step_tokens", "whole", 256, "tokens of prompts in one step of the model", "engine", least=2),
    Option("speculation", "text", "none", "prompt-lookup drafts what replies say next from their own texts, where that "
           "pays; replies are the same", choices=("none", "prompt-lookup")),
    Option("pooling", "text", None, "how texts are embedded: last or mean of the hidden states; unless given, what the "
           "checkpoint says", choices=("last", "mean")),
    Option("grace", "number", 10.0, "seconds that replies may still take when the server is to stop",
           "server.grace_seconds", least=0),
)  # fmt: skip
"""An option is one row here, and a field of what its row names: `ServerOptions` for "server", the arguments of
`HybridMemory` for "memory" and of `Engine` for "engine".
"""
