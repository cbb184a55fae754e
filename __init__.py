"""rollstream: rollout-as-a-service for agent reinforcement learning, on a durable log.

The face is lazy: a name is imported from its folder when it is first asked for, so that `import rollstream` costs
nothing and a light install never meets torch.

    from rollstream.schemas import Trajectory       # the wire
    from rollstream.infra import MemoryLog          # the log, the object store, checkpoints, the local stack
    from rollstream.producers import Environment    # environments, engines, workers, the dispatcher
    from rollstream.consumers import Trainer        # reader, staleness, groups, losses, the trainer, the ledger
"""

__version__ = "0.1.0"
