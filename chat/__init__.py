"""Contains the engine, chats, the command line and the server."""

if __name__ != "hybridmem.chat":
    raise ImportError("this folder is a package of hybridmem: import hybridmem.chat")
