"""The parts of `bench/chaos.py`.

scene     what runs: servers of a local stack, and the roles of a run; who dies is started again
killer    who dies when, drawn from a seed
journal   what the workers' logs tell of each episode: begun, played, acknowledged
tail      every record of the run's topics, read with the bare client
witness   what became of each acknowledged trajectory, found without the audit's code
rest      after the last kill: everything that can still be settled is
games     the demo's games, slow enough to be killed in the middle
"""
