"""Serves the engine to OpenAI's clients: `make_app` builds the app, `bind` and `run` put it on a port.

It needs the extra: pip install "hybridmem[server]". The command is `hybrid-memory serve`.
"""

from hybridmem.chat.server.app import make_app
from hybridmem.chat.server.listening import bind, run
from hybridmem.chat.server.options import ServerOptions
from hybridmem.chat.server.service import Service

__all__ = ["ServerOptions", "Service", "bind", "make_app", "run"]
