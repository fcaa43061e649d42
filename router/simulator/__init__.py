"""`kvrelay simulate`: the real router's placement, driven by simulated nodes in virtual time.

    workload.py   the requests: a Mooncake trace, overlaid with copies of itself if needed, or synthetic ones
    hardware.py   the cluster's shape, and what a node's steps and transfers cost
    events.py     the clock that jumps
    cache.py      a node's KV blocks: used, cached, evicted least recently used first
    node.py       what both kinds of nodes have in common
    prefill.py    a prefill node: one prompt at a time
    decode.py     a decode node: continuous batching
    simulated_router.py  the real placer, prefix index, admission queue and node table; sees only what a router sees
    cluster.py    one run: requests go from the router to the nodes and come back
    planned.py    a cluster whose shape the planner changes, alone or with foresight
    report.py     the figures of a run
    plot.py       the same figures as a plot
    cli.py        the command

One process, one thread; nothing here waits, sleeps or opens a socket.
"""
