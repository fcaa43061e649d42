"""`kvrelay simulate`: the router's own index and policies, driven by simulated nodes in virtual time.

    workload.py   the requests: a Mooncake trace, laid over itself for more, or synthetic ones
    hardware.py   what a node's steps and transfers cost
    events.py     the clock that jumps
    cache.py      a node's KV blocks: used, cached, evicted least recently used first
    prefill.py    a prefill node: one prompt at a time
    decode.py     a decode node: continuous batching
    simulated_router.py  the real placer, prefix index, admission queue and node table; sees only what a router sees
    cluster.py    one run: requests go from the brain to the nodes and come back
    report.py     what a run says
    plot.py       the same as a picture
    cli.py        the command

One process, one thread; nothing here waits, sleeps or opens a socket.
"""
