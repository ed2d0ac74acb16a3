"""Contains the engine, chats, the command line and the server."""

if not __name__.startswith("hybridmem."):
    raise ImportError("this folder is a package of hybridmem: import hybridmem.chat")
