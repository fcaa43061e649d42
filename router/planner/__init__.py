"""How many prefill and decode nodes a cluster wants (docs/planner.md).

plan.py     from what is observed to the wanted numbers of nodes, with the reason in a sentence; pure
sizing.py   how many nodes of each role a demand needs; pure
demand.py   what clients ask for per second, from the counters in nodes' load reports; pure
loop.py     one router of the cluster plans: observes, decides, writes to Redis
"""
