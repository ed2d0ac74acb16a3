"""Serves one model from many replicas.

It routes each prompt to a replica that can resume it, and moves sessions between replicas.

It needs the extra: pip install "hybridmem[cluster]". `cluster.routing` and the leases of `cluster.store` are plain
Python, without Ray; `cluster.serving` is an application of Ray Serve.
"""

if not __name__.startswith("hybridmem."):
    raise ImportError("this folder is a package of hybridmem: import hybridmem.cluster")
